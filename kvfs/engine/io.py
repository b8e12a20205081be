"""Work for the device, and the generators that wait for it.

The engine is sans-I/O: a call that may need the device is a `Step`, a generator
that yields the completions it has to wait for and returns its result. Between
two yields nothing else runs, so synchronous code is the lock. A step whose data
is in memory never yields. Who drives steps decides how to wait: `run` in place,
the mount's loop by parking the task.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Completion(Generic[T]):
    """The result of one piece of work, to come. Belongs to the loop's thread."""

    done: bool = False
    error: BaseException | None = None
    _value: Any = None
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def result(self) -> T:
        """The value; raises what the work raised."""
        assert self.done
        if self.error is not None:
            raise self.error
        value: T = self._value
        return value

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once finished: at once if it already is."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def finish(self, value: T | None = None, error: BaseException | None = None) -> None:
        assert not self.done
        self.done, self._value, self.error = True, value, error
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()


# Errors that do not come from what was seen of the state.
_FINAL = (errno.EIO, errno.ENOSPC)

Step = Generator[Completion[Any], None, T]


class DeadlineExceeded(Exception):
    """What a driver throws into a step that has waited for too long. Not an OSError:
    the device has not said that it failed."""


class Executor(Protocol):
    """Runs work off the loop's thread, and steps beside the caller."""

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        """Run work that touches only the device and buffers, in a thread."""

    def spawn(self, step: Step[T]) -> Completion[T]:
        """Drive a step in the loop, independently of the caller and its deadline."""

    @property
    def has_room(self) -> bool:
        """False when the queue is so long that work which can wait should not be added."""


class InlineExecutor:
    """Runs work at once, in the caller's thread."""

    has_room = True

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        completion: Completion[T] = Completion()
        try:
            completion.finish(work())
        except Exception as error:
            completion.finish(error=error)
        return completion

    def spawn(self, step: Step[T]) -> Completion[T]:
        return self.submit(lambda: run(step))


class WorkerThreads:
    """Runs work in daemon threads; completions are finished through `call_soon`,
    which must run a callable in the loop's thread.

    Daemon threads, because one that hangs in a dead device must not hold up the exit.
    """

    def __init__(self, threads: int, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Completion[Any]]] = (
            queue.SimpleQueue()
        )
        self._call_soon = call_soon
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._work, name=f"kvfs-io-{number}", daemon=True).start()

    @property
    def has_room(self) -> bool:
        return self._queue.qsize() < 2 * self._threads

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        completion: Completion[T] = Completion()
        self._queue.put((work, completion))
        return completion

    def _work(self) -> None:
        while True:
            work, completion = self._queue.get()
            try:
                finish = _Finish(completion, work(), None)
            except Exception as error:
                finish = _Finish(completion, None, error)
            self._call_soon(finish)
            del work, completion, finish


@dataclass(slots=True)
class _Finish:
    completion: Completion[Any]
    value: Any
    error: BaseException | None

    def __call__(self) -> None:
        self.completion.finish(self.value, self.error)


def wait(completion: Completion[T]) -> Step[T]:
    """Wait for one completion and return its result."""
    if not completion.done:
        yield completion
    return completion.result()


def wait_all(completions: Iterable[Completion[Any]]) -> Step[None]:
    """Wait for all, then raise the first error among them."""
    completions = list(completions)
    for completion in completions:
        if not completion.done:
            yield completion
    for completion in completions:
        completion.result()


def together(steps: Iterable[Step[None]]) -> Step[None]:
    """Drive steps side by side: what they wait for is under way at the same time."""
    left = list(steps)
    try:
        while left:
            waiting = [(step, completion) for step in left for completion in islice(step, 1)]
            left = [step for step, _ in waiting]
            for _, completion in waiting:
                if not completion.done:
                    yield completion
    finally:
        for step in left:
            step.close()


def run(step: Step[T]) -> T:
    """Drive a step whose work runs in place, so that it never has to wait."""
    try:
        next(step)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("the step waits for something that nobody will finish")


def settled(make: Callable[[], Step[T]]) -> Step[T]:
    """Run a step again until it goes through without waiting, so that all it saw, and
    failed for, is the state of one moment. What it loads has to stay in memory."""
    while True:
        step, waited = make(), False
        try:
            while True:
                completion = next(step)
                waited = True
                yield completion
        except StopIteration as stop:
            if not waited:
                result: T = stop.value
                return result
        except OSError as failure:
            if not waited or failure.errno in _FINAL:
                raise
        finally:
            step.close()

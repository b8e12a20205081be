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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
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
_TRIES = 3  # before a step is given more memory
_PASSED_OVER_MAX = 3  # turns that go to demand while write-back waits

Step = Generator[Completion[Any], None, T]


class DeadlineExceeded(Exception):
    """What a driver throws into a step that has waited for too long. Not an OSError:
    the device has not said that it failed."""


class Urgency(IntEnum):
    """Who waits for a piece of work: a reader; somebody who wants what was answered in the
    ring; nobody, it is a guess."""

    DEMAND = 0
    WRITE_BACK = 1
    BACKGROUND = 2


class Readable(Protocol):
    """What can be read from: a device."""

    def read(self, address: int, buffers: Sequence[memoryview]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Read(Generic[T]):
    """A read of the device, and what is then done with the bytes: work for an executor, which
    may have another way to read than a thread that waits. `is_quick`: what is done takes no
    longer than to tell another thread to do it."""

    device: Readable
    address: int
    buffers: list[memoryview]
    use: Callable[[], T]
    is_quick: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.buffers))

    def __call__(self) -> T:
        self.device.read(self.address, self.buffers)
        return self.use()


class Executor(Protocol):
    """Runs work off the loop's thread, and steps beside the caller."""

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Completion[T]:
        """Run work that touches only the device and buffers, in a thread."""

    def hasten(self, completion: Completion[Any]) -> None:
        """Somebody waits for that work now, which was submitted for the background."""

    def spawn(self, step: Step[T]) -> Completion[T]:
        """Drive a step in the loop, independently of the caller and its deadline."""

    @property
    def has_room(self) -> bool:
        """False when so much work waits that more which can wait should not be added; what
        runs in the background is not counted."""


class InlineExecutor:
    """Runs work at once, in the caller's thread."""

    has_room = True

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Completion[T]:
        completion: Completion[T] = Completion()
        try:
            completion.finish(work())
        except Exception as error:
            completion.finish(error=error)
        return completion

    def hasten(self, completion: Completion[Any]) -> None:
        assert completion.done

    def spawn(self, step: Step[T]) -> Completion[T]:
        return self.submit(lambda: run(step))


class WorkerThreads:
    """Runs work in daemon threads, the most urgent first; completions are finished through
    `call_soon`, which must run a callable in the loop's thread.

    Daemon threads, because one that hangs in a dead device must not hold up the exit.
    """

    def __init__(self, threads: int, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._queue = WorkQueue(max(1, threads // 2))
        self._lock = threading.Lock()
        # One for each piece of work that waits and may run: what threads sleep at.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._call_soon = call_soon
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._work, name=f"kvfs-io-{number}", daemon=True).start()

    @property
    def has_room(self) -> bool:
        return self._queue.urgent < 2 * self._threads

    @property
    def demand_waits(self) -> bool:
        """Whether a reader waits for a thread."""
        return self._queue.demand_waits

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Completion[T]:
        completion: Completion[T] = Completion()
        with self._lock:
            self._queue.put(Work(urgency, work, completion))
        self._tokens.put(None)
        return completion

    def hasten(self, completion: Completion[Any]) -> None:
        with self._lock:
            self._queue.hasten(completion)
        # The one that it came with may have been used up while it was not allowed to run.
        self._tokens.put(None)

    def _work(self) -> None:
        while True:
            self._tokens.get()
            with self._lock:
                work = self._queue.take()
            if work is None:
                continue
            try:
                finish = _Finish(work.completion, work.call(), None)
            except Exception as error:
                finish = _Finish(work.completion, None, error)
            self._call_soon(finish)
            if work.urgency is Urgency.BACKGROUND:
                self._ended(work)
            del work, finish

    def _ended(self, work: Work) -> None:
        """Another one of the background may have been passed over because of it."""
        with self._lock:
            self._queue.ended(work)
        self._tokens.put(None)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A piece of work that waits, or runs in a thread."""

    urgency: Urgency
    call: Callable[[], Any]
    completion: Completion[Any]


class WorkQueue:
    """What is next. Demand goes first, but every fourth turn is write-back's, so that readers
    cannot keep an fsync from its end; what runs in the background has what both leave, and
    never more than `background_max` threads: demand finds the others at once."""

    def __init__(self, background_max: int) -> None:
        self._waiting: tuple[deque[Work], ...] = tuple(deque() for _ in Urgency)
        self._background_max = background_max
        self._in_background = 0
        self._passed_over = 0

    @property
    def urgent(self) -> int:
        """How much waits, without what runs in the background."""
        return len(self._waiting[Urgency.DEMAND]) + len(self._waiting[Urgency.WRITE_BACK])

    @property
    def demand_waits(self) -> bool:
        return bool(self._waiting[Urgency.DEMAND])

    def put(self, work: Work) -> None:
        self._waiting[work.urgency].append(work)

    def take(self) -> Work | None:
        """The next one to run, if there is one that may. Each wants one of `ended`."""
        demand, write_back, background = self._waiting
        if write_back and (not demand or self._passed_over == _PASSED_OVER_MAX):
            self._passed_over = 0
            return write_back.popleft()
        if demand:
            self._passed_over += bool(write_back)
            return demand.popleft()
        if background and self._in_background < self._background_max:
            self._in_background += 1
            return background.popleft()
        return None

    def hasten(self, completion: Completion[Any]) -> None:
        """Work of the background that still waits becomes demand."""
        background = self._waiting[Urgency.BACKGROUND]
        for work in background:
            if work.completion is completion:
                background.remove(work)
                self.put(replace(work, urgency=Urgency.DEMAND))
                return

    def ended(self, work: Work) -> None:
        if work.urgency is Urgency.BACKGROUND:
            self._in_background -= 1


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


def settled(
    make: Callable[[], Step[T]], gathering: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Step[T]:
    """Run a step again until it goes through without waiting, so that all it saw, and
    failed for, is the state of one moment. What it loads has to stay in memory: `gathering`
    sees to that, for a step that needs more at once than usually stays."""
    step = make()
    try:
        # As a rule all is in memory.
        waiting: Completion[Any] | None = next(step)
    except StopIteration as stop:
        at_once: T = stop.value
        return at_once
    with ExitStack() as stack:
        tries = 0
        while True:
            waited = waiting is not None
            try:
                while True:
                    completion = waiting or next(step)
                    waiting, waited = None, True
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
            tries += 1
            if tries == _TRIES:
                stack.enter_context(gathering())
            step = make()

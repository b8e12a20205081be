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
import time
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
_STUCK_SECONDS = 0.25
_REPLACED_MAX = 256

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
    longer than to tell another thread to do it. `salvage` makes what it can of a read that
    failed, or raises."""

    device: Readable
    address: int
    buffers: list[memoryview]
    use: Callable[[], T]
    is_quick: bool
    salvage: Callable[[OSError], T] | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.buffers))

    def __call__(self) -> T:
        try:
            self.device.read(self.address, self.buffers)
        except OSError as failure:
            if self.salvage is None:
                raise
            return self.salvage(failure)
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

    Daemon threads, because one that hangs in a dead device must not hold up the exit. Another
    one takes its place, so that it does not hold up what else there is to do either.
    """

    def __init__(self, threads: int, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._queue = WorkQueue(threads - threads // 5, max(1, threads // 2))
        self._lock = threading.Lock()
        # One for each piece of work that waits and may run: what threads sleep at.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._call_soon = call_soon
        self._threads = threads
        self._busy: dict[threading.Thread, tuple[Work, float]] = {}
        self._replaced: set[threading.Thread] = set()
        for _ in range(threads):
            self._add_thread()

    def _add_thread(self) -> None:
        threading.Thread(target=self._work, name="kvfs-io", daemon=True).start()

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

    def replace_stuck(self) -> None:
        """Call several times a second: where work waits, each thread that has been at one piece
        for longer is replaced."""
        before = time.monotonic() - _STUCK_SECONDS
        with self._lock:
            if not self._queue.waits:
                return
            for thread, (work, since) in self._busy.items():
                if since >= before or thread in self._replaced:
                    continue
                if len(self._replaced) == _REPLACED_MAX:
                    return
                self._replaced.add(thread)
                self._queue.ended(work)
                self._add_thread()
                self._tokens.put(None)

    def _work(self) -> None:
        this = threading.current_thread()
        while this not in self._replaced:
            self._tokens.get()
            with self._lock:
                work = self._queue.take()
                if work is not None:
                    self._busy[this] = work, time.monotonic()
            if work is None:
                continue
            try:
                finish = _Finish(work.completion, work.call(), None)
            except Exception as error:
                finish = _Finish(work.completion, None, error)
            self._call_soon(finish)
            with self._lock:
                del self._busy[this]
                if this not in self._replaced:
                    self._queue.ended(work)
                if self._queue.waits:
                    # It may have been passed over because of this one.
                    self._tokens.put(None)
            del work, finish
        with self._lock:
            self._replaced.discard(this)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A piece of work that waits, or runs in a thread."""

    urgency: Urgency
    call: Callable[[], Any]
    completion: Completion[Any]


class WorkQueue:
    """What is next. Demand goes first, but every fourth turn is write-back's, and never more
    than `demand_max` threads read, so that readers cannot keep an fsync from its end, also those
    that no device answers; what runs in the background has what both leave, and never more than
    `background_max` threads: demand finds the others at once."""

    def __init__(self, demand_max: int, background_max: int) -> None:
        self._waiting: tuple[deque[Work], ...] = tuple(deque() for _ in Urgency)
        self._demand_max = demand_max
        self._background_max = background_max
        self._running = [0 for _ in Urgency]
        self._passed_over = 0

    @property
    def urgent(self) -> int:
        """How much waits, without what runs in the background."""
        return len(self._waiting[Urgency.DEMAND]) + len(self._waiting[Urgency.WRITE_BACK])

    @property
    def demand_waits(self) -> bool:
        return bool(self._waiting[Urgency.DEMAND])

    @property
    def waits(self) -> bool:
        return any(self._waiting)

    def put(self, work: Work) -> None:
        self._waiting[work.urgency].append(work)

    def take(self) -> Work | None:
        """The next one to run, if there is one that may. Each wants one of `ended`."""
        urgency = self._next()
        if urgency is None:
            return None
        self._running[urgency] += 1
        return self._waiting[urgency].popleft()

    def _next(self) -> Urgency | None:
        demand, write_back, background = map(bool, self._waiting)
        demand = demand and self._running[Urgency.DEMAND] < self._demand_max
        if write_back and (not demand or self._passed_over == _PASSED_OVER_MAX):
            self._passed_over = 0
            return Urgency.WRITE_BACK
        if demand:
            self._passed_over += write_back
            return Urgency.DEMAND
        if background and self._running[Urgency.BACKGROUND] < self._background_max:
            return Urgency.BACKGROUND
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
        self._running[work.urgency] -= 1


@dataclass(slots=True)
class _Finish:
    completion: Completion[Any]
    value: Any
    error: BaseException | None

    def __call__(self) -> None:
        self.completion.finish(self.value, self.error)


@dataclass(slots=True)
class Limit:
    """So many pieces of work are under way at once; who comes later waits for `room`. One that
    goes on although there is none is counted all the same."""

    most: int
    under_way: int = 0
    _freed: Completion[None] = field(default_factory=Completion)

    @property
    def is_reached(self) -> bool:
        return self.under_way >= self.most

    def room(self) -> Step[None]:
        while self.is_reached:
            yield self._freed

    def began(self, work: Completion[Any]) -> None:
        self.under_way += 1
        work.when_done(self._ended)

    def _ended(self) -> None:
        self.under_way -= 1
        if not self.is_reached:
            freed, self._freed = self._freed, Completion()
            freed.finish()


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

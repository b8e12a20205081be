"""Drives the engine's steps in the loop, each with a deadline, and has their work done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeGuard, TypeVar

from kvfs.engine.device import FileDevice
from kvfs.engine.io import (
    Completion,
    DeadlineExceeded,
    Read,
    Readable,
    Step,
    Urgency,
    WorkerThreads,
)
from kvfs.mount.loop import Loop
from kvfs.mount.uring import Ring, open_ring

log = logging.getLogger(__name__)
T = TypeVar("T")

# What is larger is summed, and sent off, beside the loop.
_RING_READ_MAX = 256 * 1024
_LOOK_SECONDS = 0.25


class Ended(Protocol):
    """Told of the end of a step: its result, or what it raised."""

    def __call__(self, value: Any, error: Exception | None) -> None: ...


class LoopExecutor(WorkerThreads):
    """Work goes to threads, what somebody waits for to be read to the kernel's ring, spawned steps
    to the loop. Implements engine.io.Executor."""

    def __init__(self, loop: Loop, threads: int) -> None:
        super().__init__(threads, loop.call_from_thread)
        self.loop = loop
        self._threads_max = threads
        self._ring = open_ring()
        if self._ring is not None:
            loop.add_reader(self._ring.fd, self._ring.finish)
        self._look()

    def _look(self) -> None:
        self.replace_stuck()
        self.loop.call_later(_LOOK_SECONDS, self._look)

    @property
    def has_room(self) -> bool:
        return super().has_room and self._reads < 2 * self._threads_max

    @property
    def demand_waits(self) -> bool:
        return super().demand_waits or self._reads > self._threads_max

    @property
    def _reads(self) -> int:
        return 0 if self._ring is None else self._ring.in_flight

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Completion[T]:
        if urgency is Urgency.DEMAND and isinstance(work, Read) and work.size <= _RING_READ_MAX:
            ring, device = self._ring, work.device
            if ring is not None and ring.has_room and _is_direct(device):
                with suppress(OSError):  # the kernel is short of something
                    return self._read(ring, device, work)
        return super().submit(work, urgency)

    def _read(self, ring: Ring, device: FileDevice, read: Read[T]) -> Completion[T]:
        completion: Completion[T] = Completion()

        def done(result: int) -> None:
            if result != read.size:
                # What is wrong is found out, or put right, by a read that waits.
                _pass_on(super(LoopExecutor, self).submit(read), completion)
            elif read.is_quick:
                _finish(completion, read.use)
            else:
                _pass_on(super(LoopExecutor, self).submit(read.use), completion)

        ring.read(device.fd, read.address, read.buffers, done)
        return completion

    def spawn(self, step: Step[T]) -> Completion[T]:
        completion: Completion[T] = Completion()

        def ended(value: Any, error: Exception | None) -> None:
            if error is not None and not isinstance(error, OSError):
                log.error("a background step failed", exc_info=error)
            completion.finish(value, error)

        self.loop.call_soon(start, self.loop, step, None, ended)
        return completion

    def aside(self, work: Callable[[], None]) -> Completion[None]:
        """Work that may wait for requests of ours, and so must not take the threads that
        these need."""
        completion: Completion[None] = Completion()
        future = self.loop.run_in_executor(None, work)
        future.add_done_callback(lambda done: completion.finish(error=done.exception()))
        return completion


def _is_direct(device: Readable) -> TypeGuard[FileDevice]:
    return isinstance(device, FileDevice) and device.direct


def _finish(completion: Completion[T], work: Callable[[], T]) -> None:
    try:
        completion.finish(work())
    except Exception as error:
        completion.finish(error=error)


def _pass_on(source: Completion[T], completion: Completion[T]) -> None:
    source.when_done(lambda: _finish(completion, source.result))


def start(
    loop: asyncio.AbstractEventLoop,
    step: Step[Any],
    deadline_seconds: float | None,
    ended: Ended,
) -> None:
    """Run a step as far as it goes, and on from there in the loop. One that waits for longer
    than the deadline gets DeadlineExceeded thrown into it."""
    try:
        completion = next(step)
    except StopIteration as stop:
        ended(stop.value, None)
    except Exception as error:
        ended(None, error)
    else:
        _Waiting(loop, step, deadline_seconds, ended).wait_for(completion)


async def drive(step: Step[T], deadline_seconds: float | None) -> T:
    """A step from within a coroutine."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def ended(value: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    start(loop, step, deadline_seconds, ended)
    return await future


class _Waiting:
    """A step that waits."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        step: Step[Any],
        deadline_seconds: float | None,
        ended: Ended,
    ) -> None:
        self._loop = loop
        self._step = step
        self._ended = ended
        self._turn = 0
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None
        if deadline_seconds is not None:
            self._timer = loop.call_later(deadline_seconds, self._expire)

    def wait_for(self, completion: Completion[Any]) -> None:
        self._turn += 1
        if self._is_late and not completion.done:
            # Past its deadline it waits for nothing more.
            self._loop.call_soon(self._go_on, self._turn, DeadlineExceeded())
            return
        turn = self._turn

        def done() -> None:
            # Not at once: what finishes a completion may be in the midst of a change.
            self._loop.call_soon(self._go_on, turn, None)

        completion.when_done(done)

    def _expire(self) -> None:
        self._is_late = True
        self._go_on(self._turn, DeadlineExceeded())

    def _go_on(self, turn: int, error: DeadlineExceeded | None) -> None:
        if turn != self._turn:
            return  # it went on when its deadline came
        self._turn += 1
        try:
            completion = self._step.send(None) if error is None else self._step.throw(error)
        except StopIteration as stop:
            self._end(stop.value, None)
        except Exception as failure:
            self._end(None, failure)
        else:
            self.wait_for(completion)

    def _end(self, value: Any, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended(value, error)

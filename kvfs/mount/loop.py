"""Drives the engine's steps in a trio loop, each with a deadline."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from kvfs.engine.io import Completion, DeadlineExceeded, Step, WorkerThreads

log = logging.getLogger(__name__)
T = TypeVar("T")


class LoopExecutor(WorkerThreads):
    """Work goes to threads, spawned steps to a nursery. Implements engine.io.Executor."""

    def __init__(self, nursery: trio.Nursery, threads: int) -> None:
        super().__init__(threads, trio.lowlevel.current_trio_token().run_sync_soon)
        self._nursery = nursery

    def spawn(self, step: Step[T]) -> Completion[T]:
        completion: Completion[T] = Completion()
        self._nursery.start_soon(_run_spawned, step, completion)
        return completion


async def _run_spawned(step: Step[Any], completion: Completion[Any]) -> None:
    try:
        completion.finish(await drive(step, None))
    except OSError as error:
        completion.finish(error=error)
    except Exception as error:
        log.exception("a background step failed")
        completion.finish(error=error)


async def drive(step: Step[T], deadline_seconds: float | None) -> T:
    """Run a step to its end. One that waits for longer than the deadline gets
    DeadlineExceeded thrown into it."""
    try:
        completion = next(step)
        limit = math.inf if deadline_seconds is None else trio.current_time() + deadline_seconds
        while True:
            if await _finished(completion.when_done, limit):
                completion = step.send(None)
            else:
                completion = step.throw(DeadlineExceeded())
    except StopIteration as stop:
        result: T = stop.value
        return result


async def _finished(when_done: Callable[[Callable[[], None]], None], limit: float) -> bool:
    event = trio.Event()
    when_done(event.set)
    with trio.move_on_at(limit):
        await event.wait()
    return event.is_set()

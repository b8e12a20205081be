"""Steps in the loop: each ends, with its result, its error, or the deadline."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest

from kvfs.engine.io import Completion, DeadlineExceeded, Step, wait
from kvfs.mount.executor import LoopExecutor, drive
from kvfs.mount.loop import Loop
from kvfs.mount.session import errno_of

T = TypeVar("T")


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def run(loop: Loop, coroutine: Coroutine[Any, Any, T]) -> T:
    return loop.run_until_complete(asyncio.wait_for(coroutine, 20))


def waits_for(completion: Completion[int], cleaned: list[str]) -> Step[int]:
    try:
        return (yield from wait(completion))
    finally:
        cleaned.append("up")


def test_a_step_that_nobody_finishes_ends_at_its_deadline_and_cleans_up(
    loop: Loop,
) -> None:
    cleaned: list[str] = []
    with pytest.raises(DeadlineExceeded):
        run(loop, drive(waits_for(Completion(), cleaned), 0.05))
    assert cleaned == ["up"]


def test_past_its_deadline_a_step_waits_for_nothing_more(loop: Loop) -> None:
    told: list[str] = []

    def stubborn() -> Step[int]:
        for _ in range(3):
            try:
                yield Completion()
            except DeadlineExceeded:
                told.append("late")
        finished: Completion[int] = Completion()
        finished.finish(7)
        yield finished
        return finished.result()

    assert run(loop, drive(stubborn(), 0.05)) == 7
    assert told == ["late"] * 3


def test_what_comes_after_the_deadline_moves_nothing(loop: Loop) -> None:
    """The completion that a step gave up finishes while it waits for another."""
    first: Completion[int] = Completion()
    second: Completion[int] = Completion()

    def step() -> Step[int]:
        try:
            yield first
        except DeadlineExceeded:
            first.finish(1)
        second.finish(2)
        return (yield from wait(second))

    assert run(loop, drive(step(), 0.05)) == 2


def test_a_step_goes_on_only_after_what_finished_its_completion(
    loop: Loop,
) -> None:
    """Synchronous code is the lock: nothing else runs in the midst of it."""
    completion: Completion[None] = Completion()
    order: list[str] = []

    def waits() -> Step[None]:
        yield from wait(completion)
        order.append("waiter")

    def finishes() -> None:
        completion.finish()
        order.append("finisher")

    loop.call_later(0.01, finishes)
    run(loop, drive(waits(), 10))
    assert order == ["finisher", "waiter"]


def test_work_in_threads_finishes_steps_in_the_loop(loop: Loop) -> None:
    executor = LoopExecutor(loop, 2)
    work = executor.submit(lambda: (41 + 1, threading.current_thread().name))
    value, thread = run(loop, drive(wait(work), 10))
    assert value == 42
    assert thread != threading.main_thread().name


def test_a_spawned_step_goes_on_when_its_caller_has_given_up(
    loop: Loop,
) -> None:
    executor = LoopExecutor(loop, 1)
    late: Completion[int] = Completion()
    spawned = executor.spawn(waits_for(late, []))
    with pytest.raises(DeadlineExceeded):
        run(loop, drive(wait(spawned), 0.05))
    late.finish(7)
    assert run(loop, drive(wait(spawned), 10)) == 7


def test_what_a_spawned_step_raises_is_its_result(loop: Loop) -> None:
    def fails() -> Step[None]:
        raise OSError(errno.EIO, "gone")
        yield

    with pytest.raises(OSError, match="gone"):
        run(loop, drive(wait(LoopExecutor(loop, 1).spawn(fails())), 10))


def test_work_aside_does_not_take_the_threads_of_requests(
    loop: Loop,
) -> None:
    executor = LoopExecutor(loop, 1)
    freed = threading.Event()
    asides = [executor.aside(lambda: freed.wait(20) and None) for _ in range(3)]
    assert run(loop, drive(wait(executor.submit(lambda: 5)), 10)) == 5
    freed.set()
    for aside in asides:
        run(loop, drive(wait(aside), 10))


def test_nothing_that_threads_say_is_lost_awake_or_asleep(loop: Loop) -> None:
    """With pauses, in which the loop falls asleep, and without."""
    said: list[tuple[int, int]] = []

    def say(thread: int) -> None:
        for number in range(200):
            loop.call_from_thread(partial(said.append, (thread, number)))
            if number % 20 == thread:
                time.sleep(0.003)

    async def listen() -> None:
        while len(said) < 4 * 200:
            await asyncio.sleep(0.002)

    threads = [threading.Thread(target=say, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    run(loop, listen())
    for thread in range(4):
        assert [number for who, number in said if who == thread] == list(range(200))


def test_a_sleeping_loop_is_woken_by_a_thread(loop: Loop) -> None:
    async def wait_for_it() -> None:
        event = asyncio.Event()
        await asyncio.sleep(0.05)  # it spins no longer
        threading.Timer(0.1, loop.call_from_thread, (event.set,)).start()
        await asyncio.wait_for(event.wait(), 10)

    run(loop, wait_for_it())


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (OSError("without a number"), errno.EIO),
        (DeadlineExceeded(), errno.ETIMEDOUT),
        (MemoryError(), errno.EIO),
        (AssertionError("a fault of ours"), errno.EIO),
    ],
)
def test_whatever_a_handler_raises_is_an_errno(raised: Exception, expected: int) -> None:
    assert errno_of("a request", raised) == expected

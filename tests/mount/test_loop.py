"""Steps in the loop: each ends, with its result, its error, or the deadline."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from kvfs.engine.io import Completion, DeadlineExceeded, Step, wait
from kvfs.mount.loop import LoopExecutor, SpinningSelector, drive, new_loop
from kvfs.mount.session import errno_of

T = TypeVar("T")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = new_loop()
    yield loop
    loop.close()


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    return loop.run_until_complete(asyncio.wait_for(coroutine, 20))


def waits_for(completion: Completion[int], cleaned: list[str]) -> Step[int]:
    try:
        return (yield from wait(completion))
    finally:
        cleaned.append("up")


def test_a_step_that_nobody_finishes_ends_at_its_deadline_and_cleans_up(
    loop: asyncio.AbstractEventLoop,
) -> None:
    cleaned: list[str] = []
    with pytest.raises(DeadlineExceeded):
        run(loop, drive(waits_for(Completion(), cleaned), 0.05))
    assert cleaned == ["up"]


def test_past_its_deadline_a_step_waits_for_nothing_more(loop: asyncio.AbstractEventLoop) -> None:
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


def test_what_comes_after_the_deadline_moves_nothing(loop: asyncio.AbstractEventLoop) -> None:
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
    loop: asyncio.AbstractEventLoop,
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


def test_work_in_threads_finishes_steps_in_the_loop(loop: asyncio.AbstractEventLoop) -> None:
    executor = LoopExecutor(loop, 2)
    work = executor.submit(lambda: (41 + 1, threading.current_thread().name))
    value, thread = run(loop, drive(wait(work), 10))
    assert value == 42
    assert thread != threading.main_thread().name


def test_a_spawned_step_goes_on_when_its_caller_has_given_up(
    loop: asyncio.AbstractEventLoop,
) -> None:
    executor = LoopExecutor(loop, 1)
    late: Completion[int] = Completion()
    spawned = executor.spawn(waits_for(late, []))
    with pytest.raises(DeadlineExceeded):
        run(loop, drive(wait(spawned), 0.05))
    late.finish(7)
    assert run(loop, drive(wait(spawned), 10)) == 7


def test_what_a_spawned_step_raises_is_its_result(loop: asyncio.AbstractEventLoop) -> None:
    def fails() -> Step[None]:
        raise OSError(errno.EIO, "gone")
        yield

    with pytest.raises(OSError, match="gone"):
        run(loop, drive(wait(LoopExecutor(loop, 1).spawn(fails())), 10))


def test_work_aside_does_not_take_the_threads_of_requests(
    loop: asyncio.AbstractEventLoop,
) -> None:
    executor = LoopExecutor(loop, 1)
    freed = threading.Event()
    asides = [executor.aside(lambda: freed.wait(20) and None) for _ in range(3)]
    assert run(loop, drive(wait(executor.submit(lambda: 5)), 10)) == 5
    freed.set()
    for aside in asides:
        run(loop, drive(wait(aside), 10))


def test_the_selector_sees_what_is_ready_and_how_long_to_wait() -> None:
    ours, theirs = socket.socketpair()
    selector = SpinningSelector()
    selector.register(ours, 1)
    for timeout in (0, 0.001, 0.01):
        assert selector.select(timeout) == []
    for _ in range(20):  # it learns in between that waiting is worth it, and that it is not
        theirs.send(b"x")
        ((key, _),) = selector.select(None)
        assert key.fileobj is ours
        ours.recv(1)
        assert selector.select(0.001) == []
    selector.close()
    ours.close()
    theirs.close()


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

"""Steps in the loop: each ends, with its result, its error, or the deadline."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

trio = pytest.importorskip("trio")
pyfuse3 = pytest.importorskip("pyfuse3")

from kvfs.engine.io import Completion, DeadlineExceeded, Step, wait  # noqa: E402
from kvfs.mount.fuse import _handler  # noqa: E402
from kvfs.mount.loop import LoopExecutor, drive  # noqa: E402


def waits_for(completion: Completion[int], cleaned: list[str]) -> Step[int]:
    try:
        return (yield from wait(completion))
    finally:
        cleaned.append("up")


def test_a_step_that_nobody_finishes_ends_at_its_deadline_and_cleans_up() -> None:
    cleaned: list[str] = []
    with pytest.raises(DeadlineExceeded):
        trio.run(drive, waits_for(Completion(), cleaned), 0.05)
    assert cleaned == ["up"]


def test_work_in_threads_finishes_steps_in_the_loop() -> None:
    async def main() -> tuple[int, str]:
        async with trio.open_nursery() as nursery:
            executor = LoopExecutor(nursery, 2)
            work = executor.submit(lambda: (41 + 1, threading.current_thread().name))
            return await drive(wait(work), 10)
        raise AssertionError

    value, thread = trio.run(main)
    assert value == 42
    assert thread != threading.main_thread().name


def test_a_spawned_step_goes_on_when_its_caller_has_given_up() -> None:
    async def main() -> int:
        async with trio.open_nursery() as nursery:
            executor = LoopExecutor(nursery, 1)
            late: Completion[int] = Completion()
            spawned = executor.spawn(waits_for(late, []))
            with pytest.raises(DeadlineExceeded):
                await drive(wait(spawned), 0.05)
            late.finish(7)
            return await drive(wait(spawned), 10)
        raise AssertionError

    assert trio.run(main) == 7


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (DeadlineExceeded(), errno.ETIMEDOUT),
        (MemoryError(), errno.EIO),
        (AssertionError("a fault of ours"), errno.EIO),
        (pyfuse3.FUSEError(errno.EPERM), errno.EPERM),
    ],
)
def test_whatever_a_handler_raises_is_an_errno(raised: BaseException, expected: int) -> None:
    @_handler
    async def handler() -> Any:
        raise raised

    with pytest.raises(pyfuse3.FUSEError) as answered:
        trio.run(handler)
    assert answered.value.errno == expected

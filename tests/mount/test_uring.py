"""Reads by io_uring: the same bytes, and the same errors, as a read that waits."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.engine.buffers import aligned
from kvfs.engine.device import FileDevice, create_image
from kvfs.engine.io import Read, Step, Urgency, wait
from kvfs.mount import executor as executors
from kvfs.mount.executor import LoopExecutor, drive
from kvfs.mount.loop import Loop
from kvfs.mount.uring import Ring, open_ring

T = TypeVar("T")
BLOCK = 4096
BLOCKS = 256
CONTENT = os.urandom(BLOCK * BLOCKS)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("uring") / "image"
    create_image(path, len(CONTENT))
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(scope="module")
def ring() -> Ring:
    found = open_ring()
    if found is None:
        pytest.skip("there is no io_uring here")
    return found


@pytest.fixture(scope="module")
def fd(image: Path) -> Iterator[int]:
    fd = os.open(image, os.O_RDONLY | os.O_DIRECT)
    yield fd
    os.close(fd)


def finish_all(ring: Ring) -> None:
    while ring.in_flight:
        assert select.select([ring.fd], [], [], 20)[0], "nothing comes"
        ring.finish()


spans = st.tuples(st.integers(0, BLOCKS - 1), st.lists(st.integers(1, 8), min_size=1, max_size=5))


@given(wanted=st.lists(spans, min_size=1, max_size=64))
def test_every_read_has_its_bytes_and_only_so_many_as_there_are(
    ring: Ring, fd: int, wanted: list[tuple[int, list[int]]]
) -> None:
    results: dict[int, int] = {}
    reads = []
    for number, (first, lengths) in enumerate(wanted):
        buffers = [aligned(length * BLOCK) for length in lengths]
        reads.append(buffers)
        ring.read(
            fd,
            first * BLOCK,
            buffers,
            lambda result, number=number: results.update({number: result}),
        )
    finish_all(ring)
    for number, (first, lengths) in enumerate(wanted):
        size = min(sum(lengths), BLOCKS - first) * BLOCK
        assert results[number] == size
        got = b"".join(reads[number])[:size]
        assert got == CONTENT[first * BLOCK :][:size]


def test_it_goes_on_after_many_turns_and_says_when_it_is_full(ring: Ring, fd: int) -> None:
    seen: list[int] = []
    for _ in range(5):
        buffers = []
        while ring.has_room:
            buffers.append(aligned(BLOCK))
            ring.read(fd, 0, [buffers[-1]], seen.append)
        assert ring.in_flight == 64
        finish_all(ring)
        assert all(buffer == CONTENT[:BLOCK] for buffer in buffers)
    assert seen == [BLOCK] * 5 * 64


def test_an_error_is_told_to_who_asked(ring: Ring) -> None:
    told: list[int] = []
    ring.read(9999, 0, [aligned(BLOCK)], told.append)
    finish_all(ring)
    assert told == [-errno.EBADF]


# -- in the loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def device(image: Path) -> Iterator[FileDevice]:
    device = FileDevice(image, read_only=True)
    yield device
    device.close()


def run(loop: Loop, step: Step[T]) -> T:
    return loop.run_until_complete(drive(step, 20))


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("size", [BLOCK, 256 * 1024, 512 * 1024])
def test_a_read_fills_its_buffers_before_they_are_used(
    loop: Loop, device: FileDevice, size: int, is_quick: bool
) -> None:
    buffer = aligned(size)
    users: list[threading.Thread] = []

    def use() -> bytes:
        users.append(threading.current_thread())
        return bytes(buffer)

    executor = LoopExecutor(loop, 2)
    read = Read(device, BLOCK, [buffer], use, is_quick)
    assert run(loop, wait(executor.submit(read))) == CONTENT[BLOCK:][:size]
    # What takes time does not hold up the requests of others.
    assert is_quick or users != [threading.main_thread()]


def test_what_cannot_be_read_is_an_error(loop: Loop, device: FileDevice) -> None:
    executor = LoopExecutor(loop, 2)
    behind = Read(device, len(CONTENT) - BLOCK, [aligned(2 * BLOCK)], lambda: None, True)
    with pytest.raises(OSError, match="ends at byte") as failure:
        run(loop, wait(executor.submit(behind)))
    assert failure.value.errno == errno.EIO


def test_what_its_use_raises_is_its_result(loop: Loop, device: FileDevice) -> None:
    def use() -> None:
        raise ValueError("not good")

    for is_quick in (True, False):
        read = Read(device, 0, [aligned(BLOCK)], use, is_quick)
        with pytest.raises(ValueError, match="not good"):
            run(loop, wait(LoopExecutor(loop, 2).submit(read)))


def test_there_is_room_again_when_reads_are_done(loop: Loop, device: FileDevice) -> None:
    executor = LoopExecutor(loop, 2)
    reads = [Read(device, 0, [aligned(BLOCK)], lambda: 1, True) for _ in range(200)]

    def all_of_them() -> Step[int]:
        submitted = [executor.submit(read) for read in reads]
        results = []
        for one in submitted:
            results.append((yield from wait(one)))
        return sum(results)

    assert run(loop, all_of_them()) == 200
    assert executor.has_room and not executor.demand_waits


def test_guesses_leave_the_ring_to_who_waits(
    loop: Loop, device: FileDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise AssertionError("not by the ring")

    monkeypatch.setattr(Ring, "read", refused)
    executor = LoopExecutor(loop, 2)
    for urgency in (Urgency.BACKGROUND, Urgency.WRITE_BACK):
        read = Read(device, 0, [aligned(BLOCK)], lambda: 1, True)
        assert run(loop, wait(executor.submit(read, urgency))) == 1


def test_without_a_ring_threads_read(
    loop: Loop, device: FileDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "open_ring", lambda: None)
    buffer = aligned(BLOCK)
    read = Read(device, 0, [buffer], lambda: bytes(buffer), True)
    assert run(loop, wait(LoopExecutor(loop, 2).submit(read))) == CONTENT[:BLOCK]

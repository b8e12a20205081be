"""Image files as devices: aligned vectors, one owner, and errors that say what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvfs.engine import buffers as buffers_module
from kvfs.engine.buffers import BufferPool, aligned, copy, is_aligned
from kvfs.engine.device import DeviceError, FileDevice, create_image, read_bytes
from kvfs.engine.format import BLOCK
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store
from kvfs.engine.superblocks import format_device
from kvfs.tiers.oplog import OperationLog
from tests.engine.kit import MIB, OPTIONS, noise


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "ring.img"
    create_image(path, 16 * MIB)
    return path


def buffers(*parts: bytes) -> list[memoryview]:
    made = []
    for part in parts:
        buffer = aligned(len(part))
        buffer[:] = part
        made.append(buffer)
    return made


def test_vectors_are_written_and_read_one_after_the_other(image: Path) -> None:
    device = FileDevice(image)
    parts = [noise(BLOCK, 1), noise(3 * BLOCK, 2), noise(2 * BLOCK, 3)]
    device.write(4 * BLOCK, buffers(*parts))
    device.flush()
    assert bytes(read_bytes(device, 4 * BLOCK, 6 * BLOCK)) == b"".join(parts)
    into = buffers(bytes(2 * BLOCK), bytes(4 * BLOCK))
    device.read(4 * BLOCK, into)
    assert b"".join(into) == b"".join(parts)
    device.close()
    assert image.read_bytes()[4 * BLOCK : 10 * BLOCK] == b"".join(parts)


def test_more_buffers_than_a_call_takes_are_all_written(image: Path) -> None:
    device = FileDevice(image)
    parts = [noise(BLOCK, number) for number in range(1500)]
    device.write(0, buffers(*parts))
    assert bytes(read_bytes(device, 0, 1500 * BLOCK)) == b"".join(parts)
    device.close()


def test_an_image_has_all_of_its_space(image: Path) -> None:
    assert image.stat().st_blocks * 512 >= 16 * MIB
    assert image.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_image(image, MIB)


def test_a_read_behind_the_end_is_eio(image: Path) -> None:
    device = FileDevice(image)
    assert device.size == 16 * MIB
    with pytest.raises(OSError, match="ends at byte") as caught:
        read_bytes(device, 16 * MIB - BLOCK, 2 * BLOCK)
    assert caught.value.errno == errno.EIO
    device.close()


def test_a_size_that_is_not_whole_blocks_is_rounded_down(tmp_path: Path) -> None:
    path = tmp_path / "odd.img"
    path.write_bytes(bytes(3 * BLOCK + 100))
    device = FileDevice(path)
    assert device.size == 3 * BLOCK
    device.close()


def test_a_device_has_one_owner(image: Path) -> None:
    device = FileDevice(image)
    for read_only in (False, True):
        with pytest.raises(DeviceError, match="in use"):
            FileDevice(image, read_only=read_only)
    device.close()
    FileDevice(image).close()


def test_readers_share_a_device_and_keep_writers_out(image: Path) -> None:
    first, second = FileDevice(image, read_only=True), FileDevice(image, read_only=True)
    with pytest.raises(DeviceError, match="in use"):
        FileDevice(image)
    assert first.read_only
    first.close()
    second.close()


def test_what_is_no_device_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="does not exist; make it with: kvfs mkfs"):
        FileDevice(tmp_path / "none")
    with pytest.raises(DeviceError, match="neither a block device nor an image file"):
        FileDevice(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_of_somebody_else_is_refused(image: Path) -> None:
    image.chmod(0)
    with pytest.raises(DeviceError, match="permission denied"):
        FileDevice(image)


def test_a_store_lives_on_an_image_file(image: Path, tmpfs: Path) -> None:
    device = FileDevice(image)
    format_device(device, MIB)
    store = Store.open(device, "ring", InlineExecutor(), OperationLog(tmpfs / "log", 64 * MIB))
    ino = run(store.create(1, b"file", 0o100644, 0, 0)).inode.ino
    run(store.write(ino, 5, noise(3 * MIB)))
    run(store.close())
    device.close()
    device = FileDevice(image, read_only=True)
    log = OperationLog(tmpfs / "log", 64 * MIB)
    store = Store.open(device, "ring", InlineExecutor(), log, OPTIONS)
    assert bytes(run(store.read(ino, 5, 3 * MIB))) == noise(3 * MIB)
    device.close()


def test_buffers_are_aligned_and_used_again() -> None:
    pool = BufferPool(2 * MIB, kept_max=1)
    first, second = pool.take(), pool.take()
    assert is_aligned(first)
    assert is_aligned(aligned(3 * BLOCK))
    assert not is_aligned(aligned(2 * BLOCK)[1:])
    assert not is_aligned(aligned(2 * BLOCK)[: BLOCK + 1])
    pool.give(first)
    pool.give(second)
    assert pool.take() is first
    assert pool.take() is not second, "more than one idle buffer was kept"


def test_nobody_waits_for_memory_that_was_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool(MIB, kept_max=8)
    pool.stock(5)
    monkeypatch.setattr(buffers_module, "_touched", lambda size: pytest.fail("it touches memory"))
    pool.stock(3)
    assert len({id(pool.take()) for _ in range(5)}) == 5


@pytest.mark.parametrize("size", [0, 1, 64 * 1024 - 1, 64 * 1024, MIB])
def test_copies_of_any_length(size: int) -> None:
    target = bytearray(size + 2)
    copy(memoryview(noise(size)), memoryview(target)[1 : size + 1])
    assert target == b"\0" + noise(size) + b"\0"


# -- opened again ------------------------------------------------------------------------


def filled(path: Path, size: int, byte: bytes) -> Path:
    path.write_bytes(byte * size)
    return path


def first_byte(device: FileDevice) -> bytes:
    return bytes(read_bytes(device, 0, BLOCK)[:1])


def test_another_file_at_its_place_is_opened_and_locked(tmp_path: Path) -> None:
    path = filled(tmp_path / "ring.img", 4 * BLOCK, b"1")
    device = FileDevice(path)
    device.reopen(anyway=False)
    assert first_byte(device) == b"1"
    filled(tmp_path / "new", 4 * BLOCK, b"2").replace(path)
    assert first_byte(device) == b"1"
    device.reopen(anyway=False)
    assert first_byte(device) == b"2"
    with pytest.raises(DeviceError, match="in use"):
        FileDevice(path)
    device.close()


def test_where_nothing_is_what_is_open_stays(tmp_path: Path) -> None:
    path = filled(tmp_path / "ring.img", 4 * BLOCK, b"1")
    device = FileDevice(path)
    path.unlink()
    device.reopen(anyway=True)
    assert first_byte(device) == b"1"
    device.close()


def test_what_cannot_be_opened_again_is_neither_read_nor_written(tmp_path: Path) -> None:
    path = filled(tmp_path / "ring.img", 4 * BLOCK, b"1")
    device = FileDevice(path)
    filled(tmp_path / "new", 2 * BLOCK, b"2").replace(path)
    with pytest.raises(DeviceError, match="smaller"):
        device.reopen(anyway=False)
    for call in (lambda: first_byte(device), lambda: device.write(0, [aligned(BLOCK)])):
        with pytest.raises(OSError, match=r"\[Errno"):
            call()
    filled(tmp_path / "new", 4 * BLOCK, b"3").replace(path)
    device.reopen(anyway=False)
    assert first_byte(device) == b"3"
    device.close()

"""The mount's contract for file data, on a real mount."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading
from pathlib import Path

import pytest

from tests.support import aio
from tests.support.mounter import Mounter

MIB = 1024 * 1024


def aligned(data: bytes) -> memoryview:
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    return memoryview(buffer)


def drop_caches() -> None:
    """So that what is read comes from the daemon. Needs root; elsewhere it is a no-op."""
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")


def reopened(mounter: Mounter) -> Path:
    """Unmount and mount: everything then comes from the ring."""
    mounter.umount()
    mounter.mount()
    return mounter.mountpoint


def test_bytes_come_back_from_the_page_cache_the_daemon_and_the_ring(
    mounter: Mounter, kv_mount: Path
) -> None:
    data = random.Random(1).randbytes(5 * MIB + 123)
    (kv_mount / "layer.000").write_bytes(data)
    assert (kv_mount / "layer.000").read_bytes() == data
    drop_caches()
    assert (kv_mount / "layer.000").read_bytes() == data
    assert (reopened(mounter) / "layer.000").read_bytes() == data


def test_a_direct_open_reads_and_writes_whole_and_unaligned(kv_mount: Path) -> None:
    data = random.Random(2).randbytes(8 * MIB)
    fd = os.open(kv_mount / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert os.write(fd, aligned(data)) == len(data)
    buffer = mmap.mmap(-1, len(data))
    assert os.preadv(fd, [buffer], 0) == len(data)
    assert buffer[:] == data
    assert os.pread(fd, 1000, 12345) == data[12345:13345]
    assert os.pwrite(fd, b"x" * 777, 3 * MIB + 5) == 777
    assert (
        os.pread(fd, 779, 3 * MIB + 4)
        == data[3 * MIB + 4 :][:1] + b"x" * 777 + data[3 * MIB + 782 :][:1]
    )
    os.close(fd)


def test_direct_can_be_switched_on_after_open(kv_mount: Path) -> None:
    data = random.Random(3).randbytes(2 * MIB)
    fd = os.open(kv_mount / "f", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    assert os.write(fd, aligned(data)) == len(data)
    assert os.preadv(fd, [mmap.mmap(-1, 2 * MIB)], 0) == 2 * MIB
    os.close(fd)
    assert (kv_mount / "f").read_bytes() == data


def test_a_write_past_the_page_cache_is_seen_by_buffered_readers(kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.write_bytes(b"old " * MIB)
    with path.open("rb") as open_before:
        assert open_before.read(4) == b"old "
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
        os.write(fd, aligned(b"new " * MIB))
        os.close(fd)
        assert path.read_bytes() == b"new " * MIB


@pytest.mark.skipif(not aio.MACHINE_IS_KNOWN, reason="its system calls are not known here")
def test_what_is_read_during_an_asynchronous_direct_write_does_not_stay(kv_mount: Path) -> None:
    path, size = kv_mount / "f", 32 * MIB
    path.write_bytes(bytes(size))
    writer, content = aio.Writer(), mmap.mmap(-1, size)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    # A fault of one page overtakes the last requests of a long write.
    pages.madvise(mmap.MADV_RANDOM)
    stop = threading.Event()

    def fault_in_the_end() -> None:
        while not stop.wait(0.0001):
            pages[-1]

    reader = threading.Thread(target=fault_in_the_end)
    reader.start()
    try:
        for number in range(1, 11):
            content[:] = bytes([number]) * size
            writer.write(fd, content)
            assert pages[-1] == number
            assert os.pread(fd, 1, size - 1) == bytes([number])
    finally:
        stop.set()
        reader.join()
        os.close(fd)
        writer.close()


def test_append_goes_to_the_end_whatever_the_position(kv_mount: Path) -> None:
    first = os.open(kv_mount / "f", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    second = os.open(kv_mount / "f", os.O_WRONLY | os.O_APPEND)
    for number in range(100):
        os.write(first if number % 2 else second, f"{number:04}".encode())
    os.close(first)
    os.close(second)
    assert (kv_mount / "f").read_text() == "".join(f"{number:04}" for number in range(100))


def test_holes_and_what_was_cut_off_read_as_zeros(kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.write_bytes(b"x" * 10_000)
    os.truncate(path, 5_000)
    os.truncate(path, 1_000_000)
    with path.open("r+b") as file:
        file.seek(900_000)
        file.write(b"end")
    drop_caches()
    expected = b"x" * 5_000 + bytes(895_000) + b"end" + bytes(1_000_000 - 900_003)
    assert path.read_bytes() == expected
    assert path.stat().st_blocks * 512 < 200_000


def test_open_with_truncate_empties_the_file(kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.write_bytes(b"x" * MIB)
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    assert path.stat().st_size == 0
    assert path.read_bytes() == b""


def test_shared_and_private_mappings(mounter: Mounter, kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.write_bytes(bytes(2 * MIB))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shared[MIB : MIB + 5] = b"hello"
        shared.flush()
    with path.open("rb") as file:
        private = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        assert private[MIB : MIB + 5] == b"hello"
        private[0:1] = b"!"
        private.close()
    assert (reopened(mounter) / "f").read_bytes() == bytes(MIB) + b"hello" + bytes(MIB - 5)


def test_all_ways_to_a_file_see_each_other(mounter: Mounter, kv_mount: Path) -> None:
    """What is written for writing alone, past the page cache, and by a mapping, beside it."""
    rng, size = random.Random(5), 256 * 1024
    path, model = kv_mount / "f", bytearray(size)
    with path.open("x+b", buffering=0) as made:
        made.write(model)
        with mmap.mmap(made.fileno(), size) as shared:
            shared[: len(b"mapped")] = model[: len(b"mapped")] = b"mapped"
            assert os.pread(made.fileno(), 8, 0) == b"mapped\0\0"
        assert made.write(b"more") == 4
        os.truncate(path, size)
    with path.open("r+b", buffering=0) as both, mmap.mmap(both.fileno(), size) as shared:
        handles = [os.open(path, os.O_WRONLY), both.fileno(), os.open(path, os.O_RDONLY)]
        for _ in range(2000):
            length = rng.choice((1, 100, 4096, 30_000))
            at = rng.randrange(size - length)
            match rng.randrange(4):
                case 0:
                    data = rng.randbytes(length)
                    assert os.pwrite(rng.choice(handles[:2]), data, at) == length
                    model[at : at + length] = data
                case 1:
                    data = rng.randbytes(length)
                    shared[at : at + length] = data
                    model[at : at + length] = data
                case 2:
                    found = os.pread(rng.choice(handles[1:]), length, at)
                    assert found == model[at : at + length]
                case 3:
                    assert shared[at : at + length] == model[at : at + length]
        os.close(handles[0])
        os.close(handles[2])
    assert (reopened(mounter) / "f").read_bytes() == model


def test_a_mapping_by_a_direct_handle_is_written_while_others_read(kv_mount: Path) -> None:
    """Were its pages dropped when they are written, the kernel would wait for itself."""
    path = kv_mount / "f"
    path.write_bytes(bytes(4096))
    drop_caches()
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    with mmap.mmap(fd, 4096) as shared:
        for word in (b"mapped", b"again!"):
            assert path.read_bytes()[:6] == shared[:6]
            shared[:6] = word
            shared.flush()
    os.close(fd)
    assert path.read_bytes()[:6] == b"again!"


@pytest.mark.parametrize("mode", ["wb", "xb", "x+b"])
def test_what_is_written_for_writing_alone_is_not_copied_to_the_page_cache(
    mounter: Mounter, kv_mount: Path, mode: str
) -> None:
    """Nor by who makes a file that nobody else may have made."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 6):
        pytest.skip("this kernel copies all")

    def served() -> int:
        count: int = mounter.stats()["counters"]["payload_read"]
        return count

    path, data = kv_mount / "f", os.urandom(4 * MIB)
    with path.open(mode) as file:
        file.write(data)
    before = served()
    assert path.read_bytes() == data
    assert served() - before == len(data)
    assert path.read_bytes() == data
    assert served() - before == len(data), "now it is there"


def test_many_overwrites_at_random_equal_a_model(mounter: Mounter, kv_mount: Path) -> None:
    rng = random.Random(4)
    model = bytearray()
    with (kv_mount / "f").open("w+b", buffering=0) as file:
        for _ in range(400):
            offset, data = rng.randrange(3 * MIB), rng.randbytes(rng.randrange(1, 70_000))
            model.extend(bytes(max(0, offset + len(data) - len(model))))
            model[offset : offset + len(data)] = data
            assert os.pwrite(file.fileno(), data, offset) == len(data)
            if rng.random() < 0.05:
                os.fsync(file.fileno())
            if rng.random() < 0.05:
                cut = rng.randrange(len(model))
                os.ftruncate(file.fileno(), cut)
                del model[cut:]
    drop_caches()
    assert (kv_mount / "f").read_bytes() == model
    assert (reopened(mounter) / "f").read_bytes() == model


def test_a_file_without_a_name_lives_until_it_is_closed(kv_mount: Path) -> None:
    path = kv_mount / "f"
    with path.open("w+b") as file:
        file.write(b"x" * MIB)
        path.unlink()
        file.write(b"y" * MIB)
        file.flush()
        assert os.fstat(file.fileno()).st_nlink == 0
        os.ftruncate(file.fileno(), MIB + 1)
        os.fchmod(file.fileno(), 0o600)
        file.seek(0)
        assert file.read() == b"x" * MIB + b"y"
    assert list(kv_mount.iterdir()) == []


def test_space_is_counted_and_comes_back(mounter: Mounter, kv_mount: Path) -> None:
    before = os.statvfs(kv_mount)
    path = kv_mount / "f"
    path.write_bytes(random.Random(5).randbytes(64 * MIB))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    full = os.statvfs(kv_mount)
    assert full.f_bsize == 4096
    assert before.f_bfree - full.f_bfree >= 62 * MIB // 4096
    assert 64 * MIB <= path.stat().st_blocks * 512 <= 65 * MIB
    path.unlink()
    reopened(mounter)
    reopened(mounter)
    after = os.statvfs(kv_mount)
    assert before.f_bfree - after.f_bfree <= 16 * MIB // 4096


def test_a_full_ring_says_enospc_and_keeps_what_it_has(mounter: Mounter, kv_mount: Path) -> None:
    written: dict[str, bytes] = {}
    with pytest.raises(OSError, match="No space left") as full:
        for number in range(1000):
            data = random.Random(number).randbytes(8 * MIB)
            with (kv_mount / f"f{number}").open("wb", buffering=0) as file:
                for start in range(0, len(data), MIB):
                    file.write(data[start : start + MIB])
            written[f"f{number}"] = data
    assert full.value.errno == errno.ENOSPC
    assert len(written) > 40
    for name, data in written.items():
        assert (kv_mount / name).read_bytes() == data
    for name in written:
        (kv_mount / name).unlink()
    for path in kv_mount.iterdir():
        path.unlink()
    (kv_mount / "again").write_bytes(b"y" * 64 * MIB)
    assert (reopened(mounter) / "again").read_bytes() == b"y" * 64 * MIB


def test_fsync_of_files_and_directories_answers(kv_mount: Path) -> None:
    (kv_mount / "d").mkdir()
    for path in (kv_mount, kv_mount / "d"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
    with (kv_mount / "d" / "f").open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fdatasync(file.fileno())


def test_a_codec_shrinks_what_it_is_set_for(mounter: Mounter, kv_mount: Path) -> None:
    os.setxattr(kv_mount, "user.kvfs.codec", b"zstd")
    (kv_mount / "d").mkdir()
    path = kv_mount / "d" / "f"
    data = b"the same words again and again. " * 65536
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    drop_caches()
    assert path.stat().st_blocks * 512 < len(data) // 10
    assert path.read_bytes() == data
    assert (reopened(mounter) / "d" / "f").read_bytes() == data


def test_a_long_direct_write_comes_in_requests_of_a_mebibyte(
    mounter: Mounter, kv_mount: Path
) -> None:
    fd = os.open(kv_mount / "f", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    before = mounter.stats()["counters"]["operations"]
    os.write(fd, aligned(bytes(16 * MIB)))
    os.close(fd)
    assert mounter.stats()["counters"]["operations"] - before == 16

"""Mooncake's stores on a disk: a file an object (`root_fs_dir`); buckets of objects, and one file
overwritten at random (`MOONCAKE_OFFLOAD_FILE_STORAGE_PATH`)."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import zlib
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engines.calls.contract import MIB, Contract, Engine, content, new_home
from tests.support.calls import fallocate
from tests.support.mounter import Mounter


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


class FilePerKey(Engine):
    """Two levels of directories by the hash of the key; locked while written and read."""

    def store(self, key: str, data: bytes) -> None:
        path = self.path(key)
        os.makedirs(path.parent, exist_ok=True)
        fd = os.open(path, os.O_CLOEXEC | os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
        half = len(data) // 2
        assert os.pwritev(fd, [data[:half], data[half:]], 0) == len(data)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def load(self, key: str) -> bytes | None:
        path = self.path(key)
        if not path.exists():
            return None
        try:
            fd = os.open(path, os.O_CLOEXEC | os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        size = os.fstat(fd).st_size
        buffers = [bytearray(size // 2), bytearray(size - size // 2)]
        assert os.preadv(fd, buffers, 0) == size
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        return b"".join(buffers)

    def remove(self, key: str) -> None:
        self.path(key).unlink()

    def path(self, key: str) -> Path:
        number = zlib.crc32(key.encode())
        first, second = (chr(ord("a") + (number >> shift) % 16) for shift in (0, 4))
        return self.root / first / second / key


class Buckets(Engine):
    """Objects of a bucket lie in one file; a file of metadata, renamed when it is whole, says
    where. Both are durable before they count."""

    is_flat = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.index: dict[str, tuple[Path, int, int]] = {}
        for entry in os.scandir(root):
            path = Path(entry.path)
            if path.suffix == ".tmp":
                path.unlink()
            elif path.suffix == ".meta":
                self._know(path)
        for entry in os.scandir(root):
            path = Path(entry.path)
            if path.suffix == ".bucket" and not path.with_suffix(".meta").exists():
                path.unlink()

    def _know(self, meta: Path) -> None:
        for key, (offset, size) in json.loads(meta.read_bytes()).items():
            self.index[key] = (meta.with_suffix(".bucket"), offset, size)

    def store(self, key: str, data: bytes) -> None:
        bucket = self.root / f"{zlib.crc32(key.encode())}.bucket"
        flags = os.O_CLOEXEC | os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        fd = os.open(bucket, flags, 0o644)
        assert os.pwritev(fd, [key.encode(), data], 0) == len(key) + len(data)
        os.fdatasync(fd)
        os.close(fd)
        meta = bucket.with_suffix(".meta")
        fd = os.open(f"{meta}.tmp", flags, 0o644)
        os.write(fd, json.dumps({key: [len(key), len(data)]}).encode())
        os.fdatasync(fd)
        os.close(fd)
        os.rename(f"{meta}.tmp", meta)
        sync_directory(self.root)
        self._know(meta)

    def load(self, key: str) -> bytes | None:
        if key not in self.index:
            # Another process may have stored it; on a start it would have been found.
            meta = self.root / f"{zlib.crc32(key.encode())}.meta"
            with suppress(FileNotFoundError):
                self._know(meta)
        bucket, offset, size = self.index.get(key, (self.root / "none", 0, 0))
        try:
            fd = os.open(bucket, os.O_CLOEXEC | os.O_RDONLY)
        except FileNotFoundError:
            self.index.pop(key, None)
            return None
        into = bytearray(size)
        assert os.preadv(fd, [into], offset) == size
        os.close(fd)
        return bytes(into)

    def remove(self, key: str) -> None:
        bucket = self.root / f"{zlib.crc32(key.encode())}.bucket"
        bucket.with_suffix(".meta").unlink()
        bucket.unlink()


class TestFilePerKey(Contract):
    engine = FilePerKey

    def test_what_it_takes_of_the_disk_is_counted_in_blocks(self, ring: Mounter) -> None:
        home = new_home(ring, "FilePerKey-blocks", FilePerKey)
        engine = FilePerKey(home)
        engine.store("a", content("a"))
        sync_directory(home)
        taken = engine.path("a").stat().st_blocks * 512
        assert MIB <= taken < 1.1 * MIB


class TestBuckets(Contract):
    engine = Buckets

    def test_what_a_crash_left_is_cleaned_up(self, ring: Mounter) -> None:
        home = new_home(ring, "Buckets-crash", Buckets)
        Buckets(home).store("a", content("a"))
        (home / "7.bucket").write_bytes(b"not whole")
        (home / "7.meta.tmp").write_bytes(b"{")
        ring.kill()
        ring.mount()
        assert Buckets(home).load("a") == content("a")
        assert len(list(home.iterdir())) == 2


class TestOffsetAllocator:
    """`kv_cache.data`: its index is in memory, a new process begins anew."""

    BLOCK = 256 * 1024
    BLOCKS = 64

    def open(self, home: Path) -> int:
        flags = os.O_CLOEXEC | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        fd = os.open(home / "kv_cache.data", flags, 0o644)
        with pytest.raises(OSError, match="not supported") as refused:
            fallocate(fd, 0, 0, self.BLOCKS * self.BLOCK)
        assert refused.value.errno == errno.EOPNOTSUPP
        os.ftruncate(fd, self.BLOCKS * self.BLOCK)
        return fd

    def store(self, fd: int, block: int, data: bytes) -> None:
        assert os.pwritev(fd, [data[:16], data[16:]], block * self.BLOCK) == len(data)

    def load(self, fd: int, block: int) -> bytes:
        into = mmap.mmap(-1, self.BLOCK)
        assert os.preadv(fd, [into], block * self.BLOCK) == self.BLOCK
        return into[:]

    @pytest.mark.parametrize("direct", [0, os.O_DIRECT], ids=["buffered", "O_DIRECT"])
    def test_blocks_are_overwritten_at_random(self, ring: Mounter, direct: int) -> None:
        home = new_home(ring, f"OffsetAllocator-{direct}", Buckets)
        fd = self.open(home)
        if direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | direct)
        newest: dict[int, bytes] = {}
        for turn in range(3 * self.BLOCKS):
            block = turn * 7919 % (self.BLOCKS - 1)
            newest[block] = content(f"{turn}", self.BLOCK)
            self.store(fd, block, newest[block])
            if turn % 50 == 0:
                os.fdatasync(fd)
        assert len(newest) == self.BLOCKS - 1
        for block, data in newest.items():
            assert self.load(fd, block) == data
        assert self.load(fd, self.BLOCKS - 1) == bytes(self.BLOCK)
        os.fsync(fd)
        assert os.fstat(fd).st_blocks * 512 < 1.3 * self.BLOCKS * self.BLOCK
        os.close(fd)

    def test_after_a_restart_of_either_it_begins_anew(self, ring: Mounter) -> None:
        home = new_home(ring, "OffsetAllocator-restart", Buckets)
        fd = self.open(home)
        self.store(fd, 1, content("old", self.BLOCK))
        ring.kill()
        ring.mount()
        with pytest.raises(OSError, match=r"not connected|aborted"):
            self.load(fd, 1)
        os.close(fd)
        fd = self.open(home)
        assert self.load(fd, 1) == bytes(self.BLOCK), "never what was there before"
        self.store(fd, 1, content("new", self.BLOCK))
        assert self.load(fd, 1) == content("new", self.BLOCK)
        os.close(fd)

    def test_it_keeps_its_bytes_while_others_make_room(self, small_ring: Mounter) -> None:
        home = new_home(small_ring, "OffsetAllocator", Buckets)
        fd = self.open(home)
        for block in range(32):
            self.store(fd, block, content(f"{block}", self.BLOCK))
        for number in range(48):
            (small_ring.mountpoint / f"other-{number}").write_bytes(content(f"{number}"))
        others = [path for path in small_ring.mountpoint.iterdir() if path.is_file()]
        assert len(others) < 48
        for block in range(32):
            assert self.load(fd, block) == content(f"{block}", self.BLOCK)
        os.close(fd)
        for path in others:
            path.unlink(missing_ok=True)

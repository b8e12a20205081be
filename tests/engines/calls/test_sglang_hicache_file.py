"""SGLang's HiCacheFile (`SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR`): one flat directory, a file a
page, written by numpy's `tofile`."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import numpy as np

from tests.engines.calls.contract import MIB, Contract, Engine, content, new_home
from tests.support.mounter import Mounter

SUFFIX = "_meta-llama-Llama-3.1-8B_0_1"


class HiCacheFile(Engine):
    """Within `min_free` bytes of the disk, where that is given."""

    is_flat = True

    def __init__(self, root: Path, min_free: int = 0) -> None:
        super().__init__(root)
        self.min_free = min_free
        if not root.exists():
            os.makedirs(root)
        found = []
        for name in os.listdir(root):
            if name.endswith(f"{SUFFIX}.bin"):
                status = os.stat(root / name)
                found.append((status.st_mtime, name, status.st_size))
        self.oldest_first = [name for _, name, _ in sorted(found)]

    def store(self, key: str, data: bytes) -> None:
        if self.path(key).exists():
            return
        self.make_room(len(data))
        temporary = self.root / f".{uuid.uuid4().hex}.tmp"
        # dup, lseek; from 16 MiB fallocate with KEEP_SIZE, which may fail.
        np.frombuffer(data, np.uint8).tofile(temporary)
        os.replace(temporary, self.path(key))
        self.oldest_first.append(self.path(key).name)

    def make_room(self, size: int) -> None:
        while self.min_free and self.available() - size < self.min_free:
            os.remove(self.root / self.oldest_first.pop(0))

    def available(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def load(self, key: str, size: int = MIB) -> bytes | None:
        into = np.empty(size, np.uint8)
        try:
            with self.path(key).open("rb", buffering=0) as file:
                assert file.readinto(memoryview(into)) == size, "a short read leaves generate()"
        except FileNotFoundError:
            return None
        return into.tobytes()

    def remove(self, key: str) -> None:
        os.remove(self.path(key))

    def path(self, key: str) -> Path:
        return self.root / f"{key.encode().hex()}{SUFFIX}.bin"


class TestHiCacheFile(Contract):
    engine = HiCacheFile

    def test_a_large_page_is_written_though_space_cannot_be_reserved(self, ring: Mounter) -> None:
        engine = HiCacheFile(new_home(ring, "HiCacheFile-large", HiCacheFile))
        data = content("large", 20 * MIB)
        engine.store("large", data)
        assert engine.load("large", 20 * MIB) == data

    def test_one_mode_lists_the_directory_for_each_lookup(self, ring: Mounter) -> None:
        engine = HiCacheFile(new_home(ring, "HiCacheFile-list", HiCacheFile))
        for number in range(1000):
            engine.store(f"{number}", b"x" * 4096)
        names = {entry.name for entry in os.scandir(engine.root)}
        assert names == {engine.path(f"{number}").name for number in range(1000)}
        os.remove(engine.path("7"))
        assert engine.path("7").name not in os.listdir(engine.root)

    def test_after_a_restart_the_oldest_go_first(self, ring: Mounter) -> None:
        home = new_home(ring, "HiCacheFile-age", HiCacheFile)
        keys = [f"{number * 7919 % 1000:03}" for number in range(30)]
        for key in keys:
            HiCacheFile(home).store(key, b"x" * 4096)
        ring.kill()
        ring.mount()
        engine = HiCacheFile(home)
        assert engine.oldest_first == [engine.path(key).name for key in keys]

    def test_files_may_be_many_however_small(self, ring: Mounter) -> None:
        """No table of inodes is full long before the disk."""
        home = new_home(ring, "HiCacheFile-inodes", HiCacheFile)
        status = os.statvfs(home)
        assert status.f_favail >= status.f_bavail

    def test_what_it_removes_to_keep_room_is_free_at_once(self, ring: Mounter) -> None:
        home = new_home(ring, "HiCacheFile-room", HiCacheFile)
        for number in range(16):
            HiCacheFile(home).store(f"old-{number}", content(f"{number}", 2 * MIB))
        fd = os.open(home, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        engine = HiCacheFile(home)
        engine.min_free = engine.available() + 4 * MIB
        engine.make_room(MIB)
        assert 2 <= 16 - len(engine.oldest_first) <= 4
        assert engine.available() - MIB >= engine.min_free

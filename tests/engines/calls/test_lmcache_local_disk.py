"""LMCache's local disk (`LMCACHE_LOCAL_DISK=file:///DIR`): a file a chunk, written under its final
name in one write whose result is not looked at.

Its index is in its memory: after a restart what is there is neither used nor removed by it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.engines.calls.contract import MIB, Contract, Engine, aligned, content, new_home
from tests.support.mounter import Mounter


class LocalDisk(Engine):
    is_flat = True
    direct = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        os.makedirs(root, exist_ok=True)
        self.block = os.statvfs(root).f_bsize

    def store(self, key: str, data: bytes) -> None:
        if self.direct and len(data) % self.block == 0:
            fd = os.open(self.path(key), os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
            os.write(fd, aligned(data))
            os.close(fd)
        else:
            with self.path(key).open("wb") as file:
                file.write(data)

    def load(self, key: str, size: int = MIB) -> bytes | None:
        into = mmap.mmap(-1, size)
        try:
            if self.direct and size % self.block == 0:
                fd = os.open(self.path(key), os.O_RDONLY | os.O_DIRECT)
                with os.fdopen(fd, "rb", buffering=0) as raw:
                    raw.readinto(into)
            else:
                with self.path(key).open("rb") as file:
                    file.readinto(into)
        except FileNotFoundError:
            return None
        return into[:]

    def remove(self, key: str) -> None:
        os.remove(self.path(key))

    def path(self, key: str) -> Path:
        return self.root / f"meta-llama-Llama-3.1-8B@1@0@{key}@half.pt"


class DirectLocalDisk(LocalDisk):
    direct = os.O_DIRECT


class TestLocalDisk(Contract):
    engine = LocalDisk


class TestDirectLocalDisk(Contract):
    engine = DirectLocalDisk


@pytest.mark.parametrize("size", [MIB + 512, 777, 4096])
def test_chunks_that_are_no_blocks(ring: Mounter, size: int) -> None:
    disk = DirectLocalDisk(new_home(ring, f"LocalDisk-{size}", DirectLocalDisk))
    disk.store("a", content("a", size))
    assert disk.load("a", size) == content("a", size)


def test_workers_that_keep_a_limit_each_do_not_overrun_the_ring(small_ring: Mounter) -> None:
    """Each may fill more than the disk: it is never told so, and no chunk is ever cut short."""
    workers = [
        LocalDisk(new_home(small_ring, f"LocalDisk-worker-{n}", LocalDisk)) for n in range(3)
    ]
    keys = [f"chunk-{n}" for n in range(16)]
    for key in keys:
        for worker in workers:
            worker.store(key, content(key, 2 * MIB))
    found = [(key, worker.load(key, 2 * MIB)) for worker in workers for key in keys]
    assert {len(data) for _, data in found if data is not None} == {2 * MIB}
    assert all(data in (None, content(key, 2 * MIB)) for key, data in found)
    assert any(data is None for _, data in found)
    status = os.statvfs(small_ring.mountpoint)
    assert status.f_blocks * status.f_frsize <= small_ring.image.stat().st_size

"""vLLM's disk offload (`disk_path`, `disk_capacity_bytes`): one file a rank, its blocks
overwritten at random, O_DIRECT.

Nothing of it outlives the process: a new one unlinks the file and makes another.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
from contextlib import suppress
from pathlib import Path

from tests.conftest import MounterMaker
from tests.engines.calls.contract import MIB, content, reading
from tests.support.calls import errno_of
from tests.support.mounter import Mounter

BLOCK = 256 * 1024
LAYERS = 4


class DiskBackend:
    """A block is written from and read into a buffer a layer."""

    def __init__(self, path: Path, slots: int) -> None:
        self.path, self.slots = path, slots
        os.makedirs(path.parent, exist_ok=True)
        with suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT
        self.fd = os.open(path, flags, 0o600)
        os.ftruncate(self.fd, slots * BLOCK)

    def store(self, slot: int, data: bytes) -> None:
        buffers = [mmap.mmap(-1, BLOCK // LAYERS) for _ in range(LAYERS)]
        for number, buffer in enumerate(buffers):
            buffer[:] = data[number * len(buffer) : (number + 1) * len(buffer)]
        if os.pwritev(self.fd, buffers, slot * BLOCK) < BLOCK:
            raise OSError(errno.EIO, "short write")

    def load(self, slot: int) -> bytes:
        buffers = [mmap.mmap(-1, BLOCK // LAYERS) for _ in range(LAYERS)]
        assert os.preadv(self.fd, buffers, slot * BLOCK) == BLOCK
        return b"".join(buffer[:] for buffer in buffers)

    def shutdown(self) -> None:
        os.unlink(self.path)
        os.close(self.fd)


def test_blocks_are_stored_and_loaded_by_two_threads(ring: Mounter) -> None:
    backend = DiskBackend(ring.mountpoint / "disk-offload" / "rank0.bin", 64)
    assert stat.S_IMODE(backend.path.stat().st_mode) == 0o600
    assert backend.path.stat().st_size == 64 * BLOCK
    assert backend.path.stat().st_blocks == 0, "nothing is taken before it is used"
    for slot in range(0, 64, 2):
        backend.store(slot, content(f"{slot}", BLOCK))

    def load_all():  # type: ignore[no-untyped-def]
        yield
        for slot in range(0, 64, 2):
            assert backend.load(slot) == content(f"{slot}", BLOCK)

    with reading(1, load_all):
        for slot in range(1, 64, 2):
            backend.store(slot, content(f"{slot}", BLOCK))
    newest = {slot: f"{slot}" for slot in range(64)}
    for turn in range(100):
        slot = random.Random(turn).randrange(64)
        newest[slot] = f"{slot}-{turn}"
        backend.store(slot, content(newest[slot], BLOCK))
    for slot, key in newest.items():
        assert backend.load(slot) == content(key, BLOCK)
    backend.shutdown()


def test_after_a_restart_it_begins_anew(ring: Mounter) -> None:
    path = ring.mountpoint / "disk-offload" / "rank1.bin"
    backend = DiskBackend(path, 8)
    backend.store(3, content("old", BLOCK))
    ring.kill()
    ring.mount()
    assert errno_of(backend.load, 3) in (errno.ENOTCONN, errno.ECONNABORTED)
    os.close(backend.fd)
    again = DiskBackend(path, 8)
    assert again.load(3) == bytes(BLOCK)
    again.store(3, content("new", BLOCK))
    assert again.load(3) == content("new", BLOCK)
    again.shutdown()
    assert not path.exists()


def test_a_capacity_beyond_the_disk_is_enospc_and_loses_nothing(
    make_mounter: MounterMaker,
) -> None:
    mounter = make_mounter("32M")
    mounter.mount()
    backend = DiskBackend(mounter.mountpoint / "rank0.bin", 4 * 64 * MIB // BLOCK)
    stored = []
    failure = 0
    for slot in random.Random(1).sample(range(backend.slots), backend.slots):
        try:
            backend.store(slot, content(f"{slot}", BLOCK))
        except OSError as error:
            assert error.errno is not None
            failure = error.errno
            break
        stored.append(slot)
    assert failure == errno.ENOSPC, "never a short write"
    assert len(stored) > 8 * MIB // BLOCK
    for slot in stored:
        assert backend.load(slot) == content(f"{slot}", BLOCK)
    backend.shutdown()


def test_it_is_not_reclaimed_while_it_is_open(small_ring: Mounter) -> None:
    for left in small_ring.mountpoint.iterdir():
        os.rename(left, f"{left}-old")
    backend = DiskBackend(small_ring.mountpoint / "rank0.bin", 32)
    for slot in range(32):
        backend.store(slot, content(f"{slot}", BLOCK))
    others = [small_ring.mountpoint / f"other-{n}" for n in range(48)]
    for path in others:
        path.write_bytes(content(path.name))
    assert not all(path.exists() for path in others)
    for slot in range(32):
        assert backend.load(slot) == content(f"{slot}", BLOCK)
    backend.shutdown()
    for path in others:
        path.unlink(missing_ok=True)

"""NVIDIA Dynamo's KVBM (`DYN_KVBM_DISK_CACHE_DIR`): a file without a name, O_DIRECT by F_SETFL.

Nothing of it outlives the process; what it took is free when that ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.engines.calls.contract import MIB, aligned, content, eventually
from tests.support.calls import errno_of, fallocate
from tests.support.mounter import Mounter

BLOCK = 128 * 1024
BLOCKS = 64


def open_storage(directory: Path) -> int:
    """Its space is taken by zeros where it cannot be reserved."""
    fd, name = tempfile.mkstemp(prefix="dynamo-kvbm-disk-cache-", dir=directory)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    try:
        fallocate(fd, 0, 0, BLOCKS * BLOCK)
    except OSError as failure:
        assert failure.errno == errno.EOPNOTSUPP, "only that has it go on"
        zeros = mmap.mmap(-1, MIB)
        for offset in range(0, BLOCKS * BLOCK, MIB):
            assert os.pwrite(fd, zeros, offset) == MIB
        os.fsync(fd)
    os.unlink(name)
    return fd


def write(fd: int, block: int, data: bytes) -> None:
    assert os.pwrite(fd, aligned(data), block * BLOCK) == BLOCK


def read(fd: int, block: int) -> bytes:
    into = mmap.mmap(-1, BLOCK)
    assert os.preadv(fd, [into], block * BLOCK) == BLOCK
    return into[:]


@pytest.fixture
def directory(ring: Mounter, request: pytest.FixtureRequest) -> Path:
    path: Path = ring.mountpoint / request.node.name
    path.mkdir()
    return path


def test_blocks_of_a_file_without_a_name(directory: Path) -> None:
    fd = open_storage(directory)
    assert list(directory.iterdir()) == []
    newest: dict[int, bytes] = {}
    for turn in range(200):
        block = random.Random(turn).randrange(BLOCKS)
        newest[block] = content(f"{turn}", BLOCK)
        write(fd, block, newest[block])
    for block in range(BLOCKS):
        assert read(fd, block) == newest.get(block, bytes(BLOCK))
    os.close(fd)


def test_what_it_took_is_free_when_it_is_killed(directory: Path) -> None:
    program = (
        "import sys, time, tempfile, os\n"
        "fd, name = tempfile.mkstemp(dir=sys.argv[1])\n"
        "os.unlink(name)\n"
        f"os.write(fd, os.urandom({8 * MIB}))\n"
        "os.fsync(fd)\n"
        "print('written', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "written\n"
            free = os.statvfs(directory).f_bfree
        finally:
            process.kill()
    assert eventually(lambda: os.statvfs(directory).f_bfree - free > 7 * MIB // 4096)


def test_the_end_of_the_daemon_is_an_error_and_leaves_nothing(
    ring: Mounter, directory: Path
) -> None:
    fd = open_storage(directory)
    free = os.statvfs(directory).f_bfree
    write(fd, 3, content("3", BLOCK))
    ring.kill()
    ring.mount()
    assert errno_of(read, fd, 3) in (errno.ENOTCONN, errno.ECONNABORTED)
    os.close(fd)
    assert list(directory.iterdir()) == []
    assert eventually(lambda: os.statvfs(directory).f_bfree - free > 7 * MIB // 4096)
    fd = open_storage(directory)
    assert read(fd, 3) == bytes(BLOCK)
    os.close(fd)


def test_it_keeps_its_bytes_while_others_make_room(small_ring: Mounter) -> None:
    fd = open_storage(small_ring.mountpoint)
    for block in range(BLOCKS):
        write(fd, block, content(f"{block}", BLOCK))
    others = [small_ring.mountpoint / f"other-{n}" for n in range(48)]
    for path in others:
        path.write_bytes(content(path.name))
    assert not all(path.exists() for path in others)
    for block in range(BLOCKS):
        assert read(fd, block) == content(f"{block}", BLOCK)
    os.close(fd)
    for path in others:
        path.unlink(missing_ok=True)

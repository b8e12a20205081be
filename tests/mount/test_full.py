"""A full ring: removing works, and what was removed makes room again, shared or not."""

from __future__ import annotations

import errno
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import MounterMaker


def fill(mountpoint: Path, round_number: int) -> int:
    """Files with large attributes until there is no space; how many were made whole."""
    for number in range(100_000):
        path = mountpoint / f"r{round_number}-{number}"
        try:
            path.write_bytes(b"x" * 2000)
            for name in range(10):
                os.setxattr(path, f"user.x{name}", os.urandom(2000))
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
            return number
    raise AssertionError("the ring is never full")


@pytest.mark.timeout(600)
def test_removing_works_however_the_ring_was_filled(make_mounter: MounterMaker) -> None:
    mounter = make_mounter("32M")
    mounter.mount()
    made = []
    for round_number in range(2):
        made.append(fill(mounter.mountpoint, round_number))
        for path in list(mounter.mountpoint.iterdir()):
            path.unlink()
        mounter.umount()
        mounter.mount()
    assert min(made) > 0.7 * max(made)


def change_until_full(home: Path, seed: int) -> None:
    """Files written, overwritten, renamed over each other, cut, and forked with their session,
    until there was no space several times."""
    rng = random.Random(seed)
    home.mkdir()
    sessions = [home / "first"]
    sessions[0].mkdir()
    number = times_full = 0
    while times_full < 10:
        number += 1
        session = rng.choice(sessions)
        names = os.listdir(session)
        kind = rng.choice(["write"] * 5 + ["overwrite", "rename", "cut", "fork"])
        try:
            if kind == "write" or not names:
                (session / f"{number}").write_bytes(rng.randbytes(rng.randrange(1, 400_000)))
            elif kind == "overwrite":
                with (session / rng.choice(names)).open("r+b") as file:
                    file.seek(rng.randrange(100_000))
                    file.write(rng.randbytes(rng.randrange(1, 60_000)))
            elif kind == "rename":
                (session / rng.choice(names)).rename(session / rng.choice(names))
            elif kind == "cut":
                os.truncate(session / rng.choice(names), rng.randrange(200_000))
            else:
                os.setxattr(session, "user.kvfs.fork", f"fork-{number}".encode())
                sessions.append(home / f"fork-{number}")
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
            times_full += 1


def test_writers_that_fill_a_ring_and_fork_leave_nothing_behind(
    make_mounter: MounterMaker,
) -> None:
    mounter = make_mounter("48M", "--segment-size", "1M")
    mounter.mount("--no-reclaim")
    free = os.statvfs(mounter.mountpoint).f_bfree
    for round_number in range(3):
        homes = [mounter.mountpoint / f"writer-{number}" for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            seeds = range(8 * round_number, 8 * round_number + 8)
            list(pool.map(change_until_full, homes, seeds))
        for home in homes:
            shutil.rmtree(home)
        mounter.umount()
        mounter.mount("--no-reclaim")
        assert free - os.statvfs(mounter.mountpoint).f_bfree <= 64, "256 KiB of metadata"

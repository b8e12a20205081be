"""A full ring: removing works, and what was removed makes room again."""

from __future__ import annotations

import errno
import os
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
    mounter = make_mounter("48M")
    mounter.mount()
    made = []
    for round_number in range(4):
        made.append(fill(mounter.mountpoint, round_number))
        for path in list(mounter.mountpoint.iterdir()):
            path.unlink()
        if round_number % 2:
            mounter.umount()
            mounter.mount()
    assert min(made) > 0.7 * max(made)

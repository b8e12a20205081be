"""Mounts that all modules share; each test has a directory of its own."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import scripts.trials
from tests.support.mounter import Mounter

pytest.register_assert_rewrite("tests.engines.calls.contract")

FAST_CLOCK = Path(scripts.trials.__path__[0]) / "fast_clock.py"
CLOCK_FACTOR = 3000


@pytest.fixture(scope="session")
def ring(fuse: None) -> Iterator[Mounter]:
    """One of 512 MiB, which tests may mount anew."""
    mounter = Mounter()
    try:
        mounter.mount()
        yield mounter
    finally:
        mounter.close()


@pytest.fixture(scope="module", autouse=True)
def emptied(ring: Mounter) -> Iterator[None]:
    """What a module stored is gone after it."""
    yield
    for path in ring.mountpoint.iterdir():
        shutil.rmtree(path)


@pytest.fixture(scope="session")
def small_ring(fuse: None) -> Iterator[Mounter]:
    """One of 48 MiB, where what was not used for a while makes room for what comes."""
    clock = [sys.executable, str(FAST_CLOCK), str(CLOCK_FACTOR), str(time.time_ns())]
    mounter = Mounter("48M", "--segment-size", "1M", program=clock)
    try:
        mounter.mount()
        yield mounter
    finally:
        mounter.close()

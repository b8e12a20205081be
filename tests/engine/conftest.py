"""A store for each test, and where what was done lies before it is looked at."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.kit import Bench

STAGES = ["buffered", "synced", "checkpointed", "reopened", "killed"]


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path(tempfile.mkdtemp(prefix="kvfs-engine-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def bench(tmpfs: Path) -> Bench:
    """A store on an empty ring of 16 segments of 1 MiB."""
    return Bench(tmpfs)


@pytest.fixture(params=STAGES)
def staged(tmpfs: Path, request: pytest.FixtureRequest) -> Bench:
    """The same; `settle` brings what was done so far to one of several places."""
    return Bench(tmpfs, stage=request.param)

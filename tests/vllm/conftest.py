"""A mount, and a directory on it for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounter import mounted

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def shared_mount(fuse: None) -> Iterator[Path]:
    """One mount for all tests here, since mounting takes longer than most of them."""
    with mounted() as mountpoint:
        yield mountpoint


@pytest.fixture
def directory(shared_mount: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=shared_mount))

"""What all tests share: a mounted KVFS, made and removed by the real command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mounter import Mounter

pytest_plugins = ["tests.support.encrypted"]
MounterMaker = Callable[..., Mounter]


@pytest.fixture(scope="session")
def fuse() -> None:
    """Skips where nothing can be mounted."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse is missing or may not be used: nothing can be mounted")


@pytest.fixture
def make_mounter(fuse: None) -> Iterator[MounterMaker]:
    """`make_mounter(size="512M", *mkfs_arguments)`: a formatted image, not mounted yet."""
    made: list[Mounter] = []

    def make(*arguments: str) -> Mounter:
        made.append(Mounter(*arguments))
        return made[-1]

    yield make
    for mounter in made:
        mounter.close()


@pytest.fixture
def mounter(make_mounter: MounterMaker) -> Mounter:
    """One of 512 MiB, not mounted yet."""
    return make_mounter()


@pytest.fixture
def kv_mount(mounter: Mounter) -> Path:
    """The mountpoint of a fresh KVFS of 512 MiB."""
    mounter.mount()
    return mounter.mountpoint

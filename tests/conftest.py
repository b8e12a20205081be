"""What all tests share: a mounted KVFS, made and removed by the real command."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounter import Mounter

pytest_plugins = ["tests.support.encrypted"]
MounterMaker = Callable[..., Mounter]


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """xdist takes no report with a name that is not UTF-8, and loses all others with it."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _encodable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    return value


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

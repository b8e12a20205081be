"""Two mounted rings that differ in what rings may differ in: sessions go from one to the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounter import Mounter

KEY = "the key of the ring that sessions go to"


@pytest.fixture(scope="session")
def rings(fuse: None) -> Iterator[tuple[Path, Path]]:
    """The mountpoints of a plain ring and of an encrypted one with other segments."""
    with tempfile.NamedTemporaryFile("w") as key:
        key.write(KEY)
        key.flush()
        made: list[Mounter] = []
        try:
            made.append(Mounter())
            made[0].mount()
            key_file = ("--key-file", key.name)
            made.append(Mounter("384M", "--segment-size", "4M", "--encrypt", *key_file))
            made[1].mount(*key_file)
            yield made[0].mountpoint, made[1].mountpoint
        finally:
            for mounter in made:
                mounter.close()


@pytest.fixture
def here(rings: tuple[Path, Path]) -> Iterator[Path]:
    """A new directory on the first ring."""
    with tempfile.TemporaryDirectory(dir=rings[0]) as path:
        yield Path(path)


@pytest.fixture
def there(rings: tuple[Path, Path]) -> Iterator[Path]:
    """A new directory on the second ring."""
    with tempfile.TemporaryDirectory(dir=rings[1]) as path:
        yield Path(path)

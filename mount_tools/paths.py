"""Directories at any depth: the kernel takes a path of 4095 bytes at most."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NAMES_AT_ONCE = 15  # of 255 bytes each


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """A descriptor of it; `directory` is absolute."""
    fd = os.open("/", _FLAGS)
    try:
        names = directory.parts[1:]
        for start in range(0, len(names), _NAMES_AT_ONCE):
            piece = os.path.join(*names[start : start + _NAMES_AT_ONCE])
            inner = os.open(piece, _FLAGS, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)

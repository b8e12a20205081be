"""Sessions as an engine leaves them: a directory with a file a layer."""

from __future__ import annotations

import os
from pathlib import Path

LAYER_SIZE = 256 * 1024


def make_session(directory: Path, layers: int = 2, model: str | None = None) -> None:
    """Layers of LAYER_SIZE that no codec makes shorter, and 1000 tokens."""
    directory.mkdir(parents=True)
    for number in range(layers):
        (directory / f"layer.{number:03}").write_bytes(os.urandom(LAYER_SIZE))
    (directory / "tokens").write_bytes(bytes(4 * 1000))
    if model is not None:
        os.setxattr(directory, "user.kvfs.model", model.encode())


def sync(directory: Path) -> None:
    """All that was answered is in the ring."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

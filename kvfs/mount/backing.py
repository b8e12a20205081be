"""A loop device and the image behind it are one ring: who has the one has the other."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from kvfs.engine.device import FileDevice


@contextmanager
def claimed(path: Path, *, read_only: bool = False) -> Iterator[FileDevice]:
    """The device, with a lock on it and on all that lies behind it. Raises DeviceError."""
    with ExitStack() as stack:
        device = stack.enter_context(closing(FileDevice(path, read_only=read_only)))
        behind = backing_file(path)
        while behind is not None:
            stack.enter_context(closing(FileDevice(behind, read_only=read_only)))
            behind = backing_file(behind)
        yield device


def backing_file(path: Path) -> Path | None:
    """Of a loop device. None if it is none, or if its file cannot be seen from here."""
    status = path.stat()
    if not stat.S_ISBLK(status.st_mode):
        return None
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    try:
        name = Path(f"/sys/dev/block/{number}/loop/backing_file").read_bytes()
    except FileNotFoundError:
        return None
    file = Path(os.fsdecode(name.removesuffix(b"\n")))
    return file if file.exists() else None

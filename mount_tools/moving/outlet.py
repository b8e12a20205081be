"""Where an export goes: stdout, or a file that is whole or not there."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mount_tools.common import CommandError
from mount_tools.moving.bytes import widen_pipe
from mount_tools.moving.temporary import temporary
from mount_tools.paths import opened

STANDARD = Path("-")
_PRIVATE = 0o600


@contextmanager
def outlet(path: Path, *, replace: bool) -> Iterator[int]:
    """A descriptor. A file has its name, and is durable, when the work with it ended well."""
    if path == STANDARD:
        with _standard() as fd:
            yield fd
        return
    is_there, real = os.path.exists(path), path.resolve()
    if is_there and path.is_dir():
        raise CommandError(f"{path} is a directory: name a file in it")
    if is_there and not (path.is_file() and real.exists()):
        # A device, a pipe, or what has a name in /proc alone.
        with open(path, "wb", buffering=0) as device:
            yield device.fileno()
        return
    path = real
    if is_there and not replace:
        raise CommandError(f"{path} exists; choose another name, or replace it with --force")
    with temporary(path.parent, _make) as hidden:
        with open(hidden.path, "wb", buffering=0) as file:
            yield file.fileno()
            os.fsync(file)
        try:
            hidden.become(path, replace=replace)
        except FileExistsError:
            raise CommandError(f"{path} exists by now; choose another name") from None
        with opened(path.parent) as parent:
            os.fsync(parent)


@contextmanager
def _standard() -> Iterator[int]:
    fd = sys.stdout.fileno()
    if os.isatty(fd):
        raise CommandError("this would go to the terminal: redirect it, or name a file")
    widen_pipe(fd)
    try:
        yield fd
    except BrokenPipeError:
        raise CommandError("nobody reads any more: the other end of the pipe has ended") from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fsync(fd)


def _make(path: Path) -> None:
    # What agents were told is for their user alone.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE))

"""Sessions to move from, where new ones go, and a session as it is at one moment."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvfs.mount.mounts import find_mount
from mount_tools.common import CommandError
from mount_tools.moving.content import Laid, slices
from mount_tools.moving.entries import Kind, open_below, walk
from mount_tools.moving.temporary import temporary
from mount_tools.paths import opened
from mount_tools.sessions import locate

_CANNOT_FORK = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def session_at(path: Path) -> Path:
    """A directory of a mount, without symlinks. Raises CommandError."""
    mount, session = locate(path)
    if session == mount.mountpoint or not session.is_dir():
        raise CommandError(f"{path} is not a session: name a directory below {mount.mountpoint}")
    return session


def target_at(path: Path, *, force: bool) -> Path:
    """Where a session is to be made. Raises CommandError where one is, unless `force`d, or
    where none may be."""
    path = Path(os.path.abspath(path))
    if find_mount(path) is not None:
        raise CommandError(f"{path} is a mountpoint: name a directory below it")
    mount, parent = locate(path.parent)
    target = parent / path.name
    if (parent, path.name) == (mount.mountpoint, ".kvfs"):
        raise CommandError(f"{path} cannot be a session: name a directory below the mountpoint")
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return target
    if not force:
        raise CommandError(f"{path} exists; choose another name, or replace it with --force")
    if not stat.S_ISDIR(status.st_mode):
        raise CommandError(f"{path} is no directory: it is not replaced")
    return target


def require_unused(session: Path) -> None:
    """Raises CommandError while an agent has it open: what it writes would be gone."""
    with opened(session) as fd:
        locked = [os.dup(fd)]
        try:
            for name in os.listdir(fd):
                if name.startswith("tokens."):
                    locked.append(open_below(fd, os.fsencode(name), os.O_RDONLY | os.O_NONBLOCK))
            for one in locked:
                fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"{session} is open in an agent: close it there, or choose another name"
            ) from None
        finally:
            for one in locked:
                os.close(one)


@contextmanager
def snapshot(session: Path) -> Iterator[Path]:
    """A session as it is now, and stays: a fork beside it that goes at the end. The session
    itself where no fork can be made: on a read-only mount, of another user's, or of one that is
    too large; `require_unchanged` tells whether that was good enough."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(temporary(session.parent, partial(_fork, session))).path
        except OSError as failure:
            if failure.errno not in _CANNOT_FORK:
                raise
            path = session
        yield path


def require_unchanged(session: Laid) -> None:
    """Raises CommandError if it is not what it was: then what was read of it may be a mixture."""
    if session.entries != {entry.path: entry for entry in walk(session.path)}:
        raise CommandError(
            f"{session.path} changed while it was read, and could not be forked: "
            "stop who writes to it, or run as its owner"
        )


def laid(session: Path) -> Laid:
    """What a session that nothing is written to is made of, and where: without reading it."""
    with opened(session) as root:
        entries = {entry.path: entry for entry in walk(session)}
        # Behind the walk: what is written later moves a time that was seen.
        os.fsync(root)
        parts = {}
        for entry in entries.values():
            if entry.kind is Kind.FILE:
                fd = open_below(root, entry.path, os.O_RDONLY)
                try:
                    parts[entry.path] = slices(fd)
                finally:
                    os.close(fd)
    return Laid(session, entries, parts)


def _fork(session: Path, copy: Path) -> None:
    os.setxattr(session, "user.kvfs.fork", os.fsencode(copy.name))

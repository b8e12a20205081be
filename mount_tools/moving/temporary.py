"""What is not whole yet has a hidden name beside what it becomes, and is locked by who makes it.

Whatever of that name nobody has locked was left by a process that was killed: the next one that
works in the directory removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mount_tools.common import CommandError
from mount_tools.paths import opened

_PREFIX = ".kvfs-moving-"
_TRIES = 10
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Temporary:
    """A file or directory of ours with a hidden name; `fd` holds the lock on it."""

    path: Path
    fd: int

    def become(self, target: Path, *, replace: bool) -> None:
        """Take the target's name at once. With `replace`, what has it takes ours, and goes with it.
        Raises FileExistsError where there is something else, CommandError where that is in use."""
        replaced = _lock_used(target) if replace and os.path.lexists(target) else -1
        _rename(self.path, target, _NOREPLACE if replaced < 0 else _EXCHANGE)
        # Who comes next may have the lock.
        os.close(self.fd)
        self.fd = replaced


@contextmanager
def temporary(parent: Path, make: Callable[[Path], None]) -> Iterator[Temporary]:
    """What `make` makes at the path that it is given, in `parent`. At the end what has that name
    then is removed."""
    remove_left(parent)
    one = _made(parent, make)
    try:
        yield one
    finally:
        try:
            if one.fd >= 0:
                _remove(one.path)
        finally:
            if one.fd >= 0:
                os.close(one.fd)


def remove_left(parent: Path) -> None:
    """What others of this user left behind that have ended."""
    for name in os.listdir(parent):
        if name.startswith(_PREFIX):
            with suppress(OSError):
                _remove_if_left(parent / name)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Signals that would end the process at once are as Ctrl-C: nothing is left behind. Raises
    CommandError then."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise CommandError("interrupted; nothing of it was kept") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _made(parent: Path, make: Callable[[Path], None]) -> Temporary:
    for _ in range(_TRIES):
        path = parent / f"{_PREFIX}{secrets.token_hex(8)}"
        try:
            make(path)
            fd = _locked(path)
        except BaseException:
            _remove(path)
            raise
        if fd is not None:
            return Temporary(path, fd)
        # Somebody who cleans up was faster than the lock, and removes it.
    raise CommandError(f"{parent}: new files are removed at once; does somebody clean up there?")


def _lock_used(path: Path) -> int:
    fd = os.open(path, _OPEN)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise CommandError(f"{path} is in use: close it there, or choose another name") from None
    return fd


def _locked(path: Path) -> int | None:
    """A descriptor; None where somebody else has the lock, or has removed it."""
    try:
        fd = os.open(path, _OPEN)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found, named = os.fstat(fd), os.lstat(path)
        if (found.st_dev, found.st_ino) == (named.st_dev, named.st_ino):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _remove_if_left(path: Path) -> None:
    fd = _locked(path)
    if fd is None:
        return
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            _remove(path)
    finally:
        os.close(fd)


def remove_below(directory: int, name: str) -> None:
    """Whatever has that name in a directory, if something has. However deep it is: directories in
    it are moved up until none is left."""
    with suppress(FileNotFoundError):
        if _unlinked(directory, name):
            return
        top = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
            numbers = iter(range(1 << 62))
            while names := os.listdir(top):
                for one in names:
                    if not _unlinked(top, one):
                        _lift(top, one, numbers)
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=directory)


def _remove(path: Path) -> None:
    with opened(path.parent) as directory:
        remove_below(directory, path.name)


def _lift(top: int, name: str, numbers: Iterator[int]) -> None:
    """Remove a directory, what is in it becomes its neighbour."""
    fd = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        for inner in os.listdir(fd):
            if not _unlinked(fd, inner):
                new_name = f"{_PREFIX}{next(numbers)}-{secrets.token_hex(8)}"
                os.rename(inner, new_name, src_dir_fd=fd, dst_dir_fd=top)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=top)


def _unlinked(directory: int, name: str) -> bool:
    """False for a directory, which its owner may then change."""
    if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.chmod(name, 0o700, dir_fd=directory)
        return False
    os.unlink(name, dir_fd=directory)
    return True


def _rename(source: Path, target: Path, flags: int) -> None:
    names = os.fsencode(source), os.fsencode(target)
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags) < 0:
        number = ctypes.get_errno()
        if number == errno.EINVAL and flags == _NOREPLACE:
            # A filesystem without it: between the look and the rename is a moment.
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            os.rename(source, target)
            return
        raise OSError(number, os.strerror(number), str(target))

"""What a session is made of, as it is moved: what may be in it, and under which names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvfs.mount.control import check_settable
from mount_tools.common import CommandError
from mount_tools.paths import opened

# What is known of a session's bytes, and true of this ring alone (see content.py).
KNOWN_CONTENT = b"user.kvfs-content"

_NAME_MAX = 255
_XATTR_MAX = 64 * 1024
_SIZE_MAX = 1 << 62  # as of a file
_TIME_MAX = 1 << 63
_TARGET_MAX = 4095
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW


class RefusedError(CommandError):
    """What comes from outside is not what it should be; nothing of it is kept."""


class Kind(str, Enum):
    """What an entry is. A link is one more name of a file that came before."""

    DIRECTORY = "directory"
    FILE = "file"
    SYMLINK = "symlink"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Entry:
    """`path` is relative to the session, which is itself b"". `size` is of a file, in bytes;
    `target` what a symlink says, or the path of the file that a link is a name of; `names` how
    many names a file has here."""

    path: bytes
    kind: Kind
    mode: int
    mtime_ns: int
    size: int = 0
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    names: int = 1

    def check(self) -> None:
        """Raises RefusedError where it could do harm, or can not be."""
        check_path(self.path)
        if not (0 <= self.mode <= 0o777 and 0 <= self.size <= _SIZE_MAX):
            raise RefusedError(f"{shown(self.path)}: its mode or size is impossible")
        if not -_TIME_MAX <= self.mtime_ns < _TIME_MAX:
            raise RefusedError(f"{shown(self.path)}: its time is impossible")
        if self.kind is Kind.SYMLINK and leads_out(self.path, self.target):
            raise RefusedError(f"{shown(self.path)}: a symlink that leads out of the session")
        if self.kind is Kind.LINK:
            check_path(self.target)
        if not self.path and self.kind is not Kind.DIRECTORY:
            raise RefusedError("a session is a directory, and this is none")
        for name, value in self.xattrs.items():
            _check_xattr(self.path, name, value)


def check_path(path: bytes) -> None:
    """Raises RefusedError for a path that is absolute, leads upwards, or holds a name that no file
    of a session should have."""
    for name in path.split(b"/") if path else ():
        if name in (b"", b".", b"..") or len(name) > _NAME_MAX:
            raise RefusedError(f"{shown(path)} is no path below a session")
        if any(byte < 0x20 or byte == 0x7F for byte in name):
            raise RefusedError(f"{shown(path)}: a name with control characters")


def leads_out(path: bytes, target: bytes) -> bool:
    """Whether a symlink may lead out of the session. Where it goes through other symlinks only its
    leading `..` say where it goes."""
    names = target.split(b"/")
    up = next((number for number, name in enumerate(names) if name != b".."), len(names))
    if not 0 < len(target) <= _TARGET_MAX or target.startswith(b"/") or b"\0" in target:
        return True
    return up > path.count(b"/") or b".." in names[up:]


def shown(path: bytes) -> str:
    return repr(os.fsdecode(path)[:200]) if path else "the session"


def _check_xattr(path: bytes, name: bytes, value: bytes) -> None:
    if not name.startswith(b"user.") or len(name) > _NAME_MAX or b"\0" in name:
        raise RefusedError(f"{shown(path)}: an attribute {shown(name)} that is no user's")
    if name == KNOWN_CONTENT or len(value) > _XATTR_MAX:
        raise RefusedError(f"{shown(path)}: an attribute {shown(name)} that may not be set")
    try:
        check_settable(name, value)
    except OSError:
        raise RefusedError(
            f"{shown(path)}: an attribute {shown(name)} that cannot be set to {shown(value)}"
        ) from None


# -- as it lies on a mount


def walk(session: Path) -> Iterator[Entry]:
    """A session and all below it: each directory, then what is in it, in the order of names. Raises
    RefusedError for what cannot be moved: devices, pipes, other filesystems."""
    with opened(session) as root, _Directory(root) as directory:
        device = os.fstat(root).st_dev
        yield _entry(root, b"", os.fstat(root), {})
        seen: dict[int, bytes] = {}
        waiting = _listed(root, b"")
        while waiting:
            path = waiting.pop()
            above, _, name = path.rpartition(b"/")
            fd = directory.at(above)
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if status.st_dev != device:
                raise RefusedError(f"{shown(path)} is of another filesystem")
            entry = _entry(fd, path, status, seen)
            entry.check()
            yield entry
            if entry.kind is Kind.DIRECTORY:
                waiting += _listed(directory.at(path), path + b"/")


@dataclass(slots=True)
class _Directory:
    """The directory below `root` that was looked at last is kept open."""

    root: int
    path: bytes = b""
    fd: int = -1

    def at(self, path: bytes) -> int:
        if self.fd < 0 or path != self.path:
            self.__exit__()
            self.fd, self.path = open_below(self.root, path, DIRECTORY), path
        return self.fd

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *_: object) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _listed(directory: int, above: bytes) -> list[bytes]:
    """Paths of all that is in a directory, the last one first."""
    return [above + name for name in sorted(map(os.fsencode, os.listdir(directory)), reverse=True)]


def open_below(root: int, path: bytes, flags: int) -> int:
    """A descriptor of what lies at a path below a directory. No symlink is followed."""
    *above, last = path.split(b"/") if path else [b"."]
    directory = os.dup(root)
    try:
        for name in above:
            inner = os.open(name, DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        return os.open(last, flags | _NO_FOLLOW, 0o600, dir_fd=directory)
    finally:
        os.close(directory)


def _entry(directory: int, path: bytes, status: os.stat_result, seen: dict[int, bytes]) -> Entry:
    """`seen`: paths of files of several names, by inode; it grows."""
    mode, mtime_ns = stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime_ns
    name = path.rpartition(b"/")[2]
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(name, dir_fd=directory)
        return Entry(path, Kind.SYMLINK, mode, mtime_ns, target=target)
    if stat.S_ISDIR(status.st_mode):
        return Entry(path, Kind.DIRECTORY, mode, mtime_ns, xattrs=_xattrs(directory, name))
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError(f"{shown(path)} is neither a file nor a directory: it cannot be moved")
    if status.st_nlink > 1:
        first = seen.setdefault(status.st_ino, path)
        if first != path:
            return Entry(path, Kind.LINK, mode, mtime_ns, target=first)
    xattrs = _xattrs(directory, name)
    return Entry(path, Kind.FILE, mode, mtime_ns, status.st_size, b"", xattrs, status.st_nlink)


def _xattrs(directory: int, name: bytes) -> dict[bytes, bytes]:
    """What users have set, by names."""
    # By /proc, since there is no such call that takes a directory and a name.
    place = b"/proc/self/fd/%d" % directory + (b"/" + name if name else b"")
    names = [os.fsencode(one) for one in os.listxattr(place, follow_symlinks=not name)]
    return {
        one: os.getxattr(place, one, follow_symlinks=not name)
        for one in names
        if one.startswith(b"user.") and one != KNOWN_CONTENT
    }

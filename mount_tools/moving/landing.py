"""A session that is being made: hidden until it is whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mount_tools.common import CommandError
from mount_tools.moving.bytes import past_page_cache, read_at, write_at
from mount_tools.moving.content import Content, note_content
from mount_tools.moving.entries import (
    DIRECTORY,
    KNOWN_CONTENT,
    Entry,
    Kind,
    RefusedError,
    open_below,
    shown,
    walk,
)
from mount_tools.moving.places import laid, require_unused
from mount_tools.moving.temporary import Temporary, remove_below, temporary
from mount_tools.paths import opened

# A session that is not whole must not stay for ever.
_LAST = b"user.kvfs.pin"


@contextmanager
def landing(target: Path, *, replace: bool, base: Path | None = None) -> Iterator[Landing]:
    """A session that becomes `target` by `land`, and else is removed. It is empty, or a fork of
    `base` whose entries have to be added again, as they are to be."""
    if replace and os.path.lexists(target):
        require_unused(target)
    make = partial(_fork, base) if base else partial(os.mkdir, mode=0o700)
    with temporary(target.parent, make) as hidden, Landing(hidden, target, replace) as new:
        yield new


def _fork(base: Path, copy: Path) -> None:
    try:
        os.setxattr(base, "user.kvfs.fork", os.fsencode(copy.name))
    except OSError as failure:
        raise CommandError(f"{base} cannot be forked: {failure.strerror}") from None


@dataclass(slots=True)
class Landing:
    """Entries are added, each directory before what is in it. What is there twice or would lie
    outside is refused."""

    hidden: Temporary
    target: Path
    replace: bool
    _seen: dict[bytes, Entry] = field(default_factory=dict)
    _file: Entry | None = None
    _fd: int = -1

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def path(self) -> Path:
        """Where it is for now."""
        return self.hidden.path

    @property
    def entries(self) -> int:
        """How many were added."""
        return len(self._seen)

    def add(self, entry: Entry, *, keeps: bool = False) -> None:
        """Make it. Bytes of a file come next; with `keeps` it has those that it has now. Raises
        RefusedError."""
        entry.check()
        self.end_file()
        if entry.path in self._seen or (not entry.path) != (not self._seen):
            raise RefusedError(f"{shown(entry.path)} is there twice, or before the session itself")
        try:
            with self._directory_of(entry.path) as (directory, name):
                self._make(entry, directory, name, keeps=keeps)
        except (FileNotFoundError, NotADirectoryError, FileExistsError):
            raise RefusedError(f"{shown(entry.path)} lies in nothing that came before") from None
        self._seen[entry.path] = entry

    def write(self, offset: int, data: memoryview) -> None:
        """Bytes of the file that was added last."""
        if self._file is None or not 0 <= offset <= self._file.size - len(data):
            raise RefusedError("bytes that belong to no file")
        write_at(self._fd, data, offset)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Bytes that this file has now."""
        read_at(self._fd, buffer, offset)

    def end_file(self) -> None:
        """No more bytes of it will come."""
        if self._file is None:
            return
        entry, self._file = self._file, None
        os.ftruncate(self._fd, entry.size)
        os.fchmod(self._fd, entry.mode)
        os.utime(self._fd, ns=(entry.mtime_ns, entry.mtime_ns))
        os.close(self._fd)
        self._fd = -1

    def not_added(self) -> list[Entry]:
        """What is there of the base, and will go. Ends the last file. Raises CommandError where
        something that was added is gone."""
        self.end_file()
        there = {entry.path: entry for entry in walk(self.path)}
        if not self._seen.keys() <= there.keys():
            raise CommandError(f"{self.path} lost files while it was made: is the ring too full?")
        return [entry for path, entry in there.items() if path not in self._seen]

    def land(self, content: Content | None = None) -> None:
        """It is whole: make it durable, and the target. Its content is noted, if known. Raises
        CommandError where the target is meanwhile, or is in use."""
        if not self._seen:
            raise RefusedError("there is no session in it")
        for entry in reversed(self.not_added()):
            self._remove(entry.path)
        directories = [one for one in self._seen.values() if one.kind is Kind.DIRECTORY]
        for entry in reversed(directories):
            self._finish(entry)
        os.fsync(self.hidden.fd)
        if content is not None:
            note_content(self.path, content, laid(self.path).place)
            self._finish(self._seen[b""])
        try:
            self.hidden.become(self.target, replace=self.replace)
        except FileExistsError:
            raise CommandError(f"{self.target} exists by now; choose another name") from None
        with opened(self.target.parent) as parent:
            os.fsync(parent)

    # -- one entry

    def _make(self, entry: Entry, directory: int, name: bytes, *, keeps: bool) -> None:
        is_new = not entry.path or not (keeps or _is_kept_directory(entry, directory, name))
        if is_new and entry.path:
            remove_below(directory, os.fsdecode(name))
        match entry.kind:
            case Kind.DIRECTORY:
                if entry.path and is_new:
                    os.mkdir(name, 0o700, dir_fd=directory)
                fd = os.open(name, DIRECTORY, dir_fd=directory)
                try:
                    os.fchmod(fd, 0o700)
                    _set_xattrs(fd, {k: v for k, v in entry.xattrs.items() if k != _LAST})
                finally:
                    os.close(fd)
            case Kind.FILE:
                self._open(entry, directory, name, keeps=keeps)
            case Kind.SYMLINK:
                os.symlink(entry.target, name, dir_fd=directory)
                times = entry.mtime_ns, entry.mtime_ns
                os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)
            case Kind.LINK:
                self._link(entry, directory, name)

    def _open(self, entry: Entry, directory: int, name: bytes, *, keeps: bool) -> None:
        if keeps:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise RefusedError(f"{shown(entry.path)} keeps bytes that the base does not have")
            os.chmod(name, 0o600, dir_fd=directory)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        flags |= 0 if keeps else os.O_CREAT | os.O_EXCL
        opening = partial(os.open, name, mode=0o600, dir_fd=directory)
        self._fd = past_page_cache(opening, flags)
        self._file = entry
        # Before the first byte: they say how bytes are stored.
        _set_xattrs(self._fd, entry.xattrs)

    def _link(self, entry: Entry, directory: int, name: bytes) -> None:
        first = self._seen.get(entry.target)
        if first is None or first.kind is not Kind.FILE:
            raise RefusedError(f"{shown(entry.path)} is a name of no file that came before")
        with self._directory_of(entry.target) as (other, other_name):
            os.link(other_name, name, src_dir_fd=other, dst_dir_fd=directory, follow_symlinks=False)

    def _remove(self, path: bytes) -> None:
        with suppress(FileNotFoundError), self._directory_of(path) as (directory, name):
            remove_below(directory, os.fsdecode(name))

    def _finish(self, entry: Entry) -> None:
        fd = open_below(self.hidden.fd, entry.path, DIRECTORY)
        try:
            _set_xattrs(fd, entry.xattrs)
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    @contextmanager
    def _directory_of(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """A descriptor of the directory that a path lies in, and the path's last name."""
        above, _, name = path.rpartition(b"/")
        fd = open_below(self.hidden.fd, above, DIRECTORY)
        try:
            yield fd, name or b"."
        finally:
            os.close(fd)


def _is_kept_directory(entry: Entry, directory: int, name: bytes) -> bool:
    """Whether it is a directory that is there already."""
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    return entry.kind is Kind.DIRECTORY and stat.S_ISDIR(mode)


def _set_xattrs(fd: int, wanted: dict[bytes, bytes]) -> None:
    """These, and no other that users may set."""
    for name in map(os.fsencode, os.listxattr(fd)):
        if name.startswith(b"user.") and name not in wanted and name != KNOWN_CONTENT:
            os.removexattr(fd, name)
    for name, value in wanted.items():
        try:
            os.setxattr(fd, name, value)
        except OSError as failure:
            raise CommandError(
                f"an attribute {shown(name)} cannot be set: {failure.strerror}"
            ) from None

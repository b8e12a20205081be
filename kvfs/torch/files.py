"""One file of a session: reads past the page cache, appends, cuts."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_VECTORS_MAX = 1024  # IOV_MAX


class LayerFile(Protocol):
    """What a layer needs of its file."""

    @property
    def path(self) -> Path:
        """Its name in errors."""

    def open_direct(self) -> int:
        """A descriptor that reads past the page cache, where that can be; the caller closes it."""

    def append(self, memory: Sequence[memoryview], offset: int) -> None:
        """Write all of `memory`, one behind the other, at byte `offset`."""

    def truncate(self, nbytes: int) -> None:
        """Cut the file to `nbytes`."""


@dataclass(frozen=True)
class SessionFile:
    """A file reached through its directory's descriptor.

    After the filesystem went away the descriptor stays dead, so that a cache never goes
    on by itself on another mount of the same path. All methods raise the OSError of the
    kernel with the file's full name in it.
    """

    directory: int
    path: Path

    def ensure(self, xattrs: Mapping[str, str]) -> None:
        """Create the file with these `user.kvfs.*` attributes, unless it exists."""
        try:
            fd = self._open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        with _closing(fd, self.path):
            for name, value in xattrs.items():
                set_xattr(fd, name, value)

    def size(self) -> int:
        """Length in bytes."""
        with named(self.path):
            return os.stat(self.path.name, dir_fd=self.directory).st_size

    def append(self, memory: Sequence[memoryview], offset: int) -> None:
        """Write all of `memory`, one behind the other, at byte `offset`."""
        with _closing(self._open(os.O_WRONLY), self.path) as fd:
            write_all(fd, memory, offset)

    def truncate(self, nbytes: int) -> None:
        """Cut the file to `nbytes`."""
        with _closing(self._open(os.O_WRONLY), self.path) as fd:
            os.ftruncate(fd, nbytes)

    def read(self) -> bytes:
        """The whole content of a small file."""
        with named(self.path), open(self._open(os.O_RDONLY), "rb") as file:
            return file.read()

    def replace(self, content: bytes, tag: str = "") -> None:
        """Put `content` in the file's place at once: a reader sees the old or the new.

        Who may do that at the same time needs a `tag` of its own.
        """
        temporary = SessionFile(self.directory, temporary_of(self.path, tag))
        fd = temporary._open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with named(temporary.path), open(fd, "wb") as file:
            file.write(content)
        with named(self.path):
            os.rename(
                temporary.path.name,
                self.path.name,
                src_dir_fd=self.directory,
                dst_dir_fd=self.directory,
            )

    def lease(self) -> int:
        """A descriptor that keeps the file open; the caller closes it."""
        return self._open(os.O_RDWR)

    def open_direct(self) -> int:
        """A descriptor that reads past the page cache, where that can be; the caller closes it."""
        try:
            return self._open(os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._open(os.O_RDONLY)

    def _open(self, flags: int) -> int:
        with named(self.path):
            return os.open(self.path.name, flags, 0o600, dir_fd=self.directory)


class ScratchFile:
    """A file without a name: made when it is first written, gone with its last descriptor."""

    def __init__(self, directory: Path, what: str) -> None:
        """In `directory`; `what` names it in errors."""
        self.path = directory / what
        self._fd = -1

    def open_direct(self) -> int:
        """A descriptor that reads past the page cache, where that can be; the caller closes it."""
        with named(self.path):
            name = f"/proc/self/fd/{self._writable()}"
            try:
                return os.open(name, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return os.open(name, os.O_RDONLY)

    def append(self, memory: Sequence[memoryview], offset: int) -> None:
        """Write all of `memory`, one behind the other, at byte `offset`."""
        with named(self.path):
            write_all(self._writable(), memory, offset)

    def truncate(self, nbytes: int) -> None:
        """Cut the file to `nbytes`."""
        with named(self.path):
            os.ftruncate(self._writable(), nbytes)

    def close(self) -> None:
        """Give its bytes back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _writable(self) -> int:
        if self._fd < 0:
            self._fd, name = tempfile.mkstemp(prefix=".scratch-", dir=self.path.parent)
            os.unlink(name)
        return self._fd


def temporary_of(path: Path, tag: str = "") -> Path:
    """The name under which a replacement of `path` is written."""
    return path.with_name(f".{path.name}{tag}.tmp")


def set_xattr(fd: int, name: str, value: str) -> None:
    """Set `user.kvfs.<name>` where the filesystem has such attributes."""
    try:
        os.setxattr(fd, f"user.kvfs.{name}", value.encode())
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an OSError, which knows a descriptor or the last part, the file's full name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def _closing(fd: int, path: Path) -> Iterator[int]:
    with named(path):
        try:
            yield fd
        finally:
            os.close(fd)


def part_of(memory: Sequence[memoryview], start: int, length: int) -> list[memoryview]:
    """Bytes start..start+length-1 of what lies one behind the other, as far as one system call
    takes them."""
    left = []
    for piece in memory:
        if start < len(piece) and length > 0:
            left.append(piece[start : start + length])
            length -= len(left[-1])
        start = max(0, start - len(piece))
    return left[:_VECTORS_MAX]


def write_all(fd: int, memory: Sequence[memoryview], offset: int) -> None:
    """Write all of `memory`, one behind the other, at byte `offset`."""
    done, length = 0, sum(map(len, memory))
    while done < length:
        done += os.pwritev(fd, part_of(memory, done, length - done), offset + done)

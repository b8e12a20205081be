"""One file of a session: reads past the page cache, appends, cuts."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


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

    def stream(self, memory: memoryview, nbytes: int) -> Iterator[memoryview]:
        """The first `nbytes` bytes, past the page cache, in pieces of `len(memory)`.

        `memory` starts on a page and is a whole number of pages long. Each piece is a part
        of it, valid until the next one is asked for.

        Raises:
            OSError: EIO if the file ends before `nbytes`, or what the kernel reports.
        """
        with _closing(self._open_direct(), self.path) as fd:
            for offset in range(0, nbytes, len(memory)):
                length = min(len(memory), nbytes - offset)
                _read_exactly(fd, memory, offset, length)
                yield memory[:length]

    def append(self, memory: memoryview, offset: int) -> None:
        """Write all of `memory` at byte `offset`."""
        with _closing(self._open(os.O_WRONLY), self.path) as fd:
            done = 0
            while done < len(memory):
                done += os.pwrite(fd, memory[done:], offset + done)

    def truncate(self, nbytes: int) -> None:
        """Cut the file to `nbytes`."""
        with _closing(self._open(os.O_WRONLY), self.path) as fd:
            os.ftruncate(fd, nbytes)

    def read(self) -> bytes:
        """The whole content of a small file."""
        with named(self.path), open(self._open(os.O_RDONLY), "rb") as file:
            return file.read()

    def replace(self, content: bytes) -> None:
        """Put `content` in the file's place at once: a reader sees the old or the new."""
        temporary = SessionFile(self.directory, temporary_of(self.path))
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

    def _open_direct(self) -> int:
        try:
            return self._open(os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._open(os.O_RDONLY)

    def _open(self, flags: int) -> int:
        with named(self.path):
            return os.open(self.path.name, flags, 0o600, dir_fd=self.directory)


def temporary_of(path: Path) -> Path:
    """The name under which a replacement of `path` is written."""
    return path.with_name(f".{path.name}.tmp")


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


def _read_exactly(fd: int, memory: memoryview, offset: int, length: int) -> None:
    request = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    done = 0
    while done < length:
        got = os.preadv(fd, [memory[done:request]], offset + done)
        if got == 0:
            raise OSError(errno.EIO, f"file ends at {offset + done}, {length - done} bytes early")
        done += got

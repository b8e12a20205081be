"""A block device or an image file: aligned vectored I/O, flush, one owner at a time.

Nothing here is asynchronous: a pool of threads (io.py) calls it, and direct I/O
releases the interpreter while the device works.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvfs.engine.buffers import aligned
from kvfs.engine.format import BLOCK

_BLKGETSIZE64 = 0x8008_1272
_IOV_MAX = 1024


class DeviceError(Exception):
    """The device cannot be used; the message says why and what to do."""


class Device(Protocol):
    """What the engine needs of a device. Addresses and lengths are multiples of BLOCK."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def read_only(self) -> bool: ...

    def read(self, address: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers from `address` on. Raises OSError; EIO at the device's end."""

    def write(self, address: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers one after the other. Raises OSError."""

    def flush(self) -> None:
        """Return when every completed write is on stable storage. Raises OSError."""

    def reopen(self, *, anyway: bool) -> None:
        """Be what its name stands for now, if that is another device than before, or `anyway`.
        Not while a write is under way. Raises OSError, DeviceError."""

    def close(self) -> None: ...


class FileDevice:
    """A block device or an image file, opened for direct I/O where that is possible: `direct`.

    Raises DeviceError when it is missing, of the wrong kind, or in use.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.fd, self.direct = _open(self.path, read_only)
        try:
            _lock(self.fd, self.path, shared=read_only)
            self.size = _size(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def read(self, address: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(map(len, buffers))
        done = _transfer(os.preadv, self.fd, address, buffers)
        if done != wanted:
            raise OSError(errno.EIO, f"{self.path} ends at byte {address + done}")
        if not self.direct:
            os.posix_fadvise(self.fd, address, wanted, os.POSIX_FADV_DONTNEED)

    def write(self, address: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(map(len, buffers))
        if _transfer(os.pwritev, self.fd, address, buffers) != wanted:
            raise OSError(errno.EIO, f"{self.path}: short write at byte {address}")

    def flush(self) -> None:
        os.fdatasync(self.fd)

    def reopen(self, *, anyway: bool) -> None:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return  # the one that is open may work again
        if not anyway and _is_open(self.fd, there):
            return
        # A block device is claimed once only. The descriptor keeps its number meanwhile: a thread
        # that reads must not find another file there.
        _replace(self.fd, os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        fd, self.direct = _open(self.path, self.read_only)
        try:
            _lock(fd, self.path, shared=self.read_only)
            if _size(fd) < self.size:
                raise DeviceError(f"{self.path} is smaller than it was")
        except BaseException:
            os.close(fd)
            raise
        _replace(self.fd, fd)

    def close(self) -> None:
        os.close(self.fd)


def read_bytes(device: Device, address: int, length: int) -> memoryview:
    """`length` bytes, a multiple of BLOCK, in a fresh aligned buffer. Raises OSError."""
    buffer = aligned(length)
    device.read(address, [buffer])
    return buffer


def create_image(path: Path, size: int) -> None:
    """Make an image file of `size` bytes, its space allocated. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _open(path: Path, read_only: bool) -> tuple[int, bool]:
    access = os.O_RDONLY if read_only else os.O_RDWR
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
            raise DeviceError(f"{path} is neither a block device nor an image file")
        # On a block device O_EXCL claims it from the kernel: mounted ones are refused.
        exclusive = os.O_EXCL if stat.S_ISBLK(mode) and not read_only else 0
        flags = access | exclusive | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, flags), False
    except FileNotFoundError:
        raise DeviceError(f"{path} does not exist; make it with: kvfs mkfs {path}") from None
    except PermissionError:
        raise DeviceError(f"{path}: permission denied; run as its owner or as root") from None
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise DeviceError(f"{path} is in use: mounted, or claimed by the kernel") from None
        raise DeviceError(f"{path}: {os.strerror(error.errno or errno.EIO)}") from None


def _lock(fd: int, path: Path, *, shared: bool) -> None:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DeviceError(
            f"{path} is in use by another KVFS process; unmount it first (kvfs umount)"
        ) from None


def _size(fd: int) -> int:
    status = os.fstat(fd)
    if stat.S_ISBLK(status.st_mode):
        size = struct.unpack("Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))[0]
    else:
        size = status.st_size
    return int(size) // BLOCK * BLOCK


def _is_open(fd: int, there: os.stat_result) -> bool:
    """Whether it is the device or file that is open."""
    try:
        return _identity(os.fstat(fd)) == _identity(there)
    except OSError:
        return False  # what is open is gone


def _identity(status: os.stat_result) -> tuple[int, int]:
    return (0, status.st_rdev) if stat.S_ISBLK(status.st_mode) else (status.st_dev, status.st_ino)


def _replace(fd: int, by: int) -> None:
    os.dup2(by, fd, inheritable=False)
    os.close(by)


def _transfer(call: object, fd: int, address: int, buffers: Sequence[memoryview]) -> int:
    """Repeat a vectored call until all is transferred or it returns 0."""
    assert callable(call)
    left = [buffer for buffer in buffers if len(buffer)]
    done = 0
    while left:
        count = call(fd, left[:_IOV_MAX], address + done)
        if count == 0:
            break
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return done

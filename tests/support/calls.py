"""System calls that Python does not offer, and what a call fails with."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
AT_FDCWD = -100
_HANDLE_BYTES = 128
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
_libc = ctypes.CDLL(None, use_errno=True)


class FileHandle(ctypes.Structure):
    """The kernel's name for a file that needs no path."""

    _fields_ = (
        ("length", ctypes.c_uint),
        ("type", ctypes.c_int),
        ("bytes", ctypes.c_char * _HANDLE_BYTES),
    )


def errno_of(call: Callable[..., object], *arguments: object) -> int:
    with pytest.raises(OSError) as failure:  # noqa: PT011 - the errno is what is tested
        call(*arguments)
    assert failure.value.errno is not None
    return failure.value.errno


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def renameat2(source: Path, target: Path, flags: int) -> None:
    _checked(_libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    _checked(_libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)))


def set_access_time_to_now(path: Path) -> None:
    """`utimensat` with UTIME_NOW and UTIME_OMIT."""
    times = (ctypes.c_long * 4)(0, _UTIME_NOW, 0, _UTIME_OMIT)
    _checked(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, 0))


def syncfs(fd: int) -> None:
    _checked(_libc.syncfs(fd))


def name_to_handle(path: Path) -> FileHandle:
    handle, mount = FileHandle(_HANDLE_BYTES), ctypes.c_int()
    _checked(
        _libc.name_to_handle_at(
            AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0
        )
    )
    return handle


def open_by_handle(mountpoint: Path, handle: FileHandle, flags: int) -> int:
    """Needs root."""
    fd = os.open(mountpoint, os.O_RDONLY)
    try:
        return _checked(_libc.open_by_handle_at(fd, ctypes.byref(handle), flags))
    finally:
        os.close(fd)

"""Shared mappings of files, as memoryviews.

The standard library's keep a descriptor open each, and hold the interpreter's lock while
the kernel fills page tables.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_shared(path: Path, offset: int, length: int, *, populate: bool = False) -> memoryview:
    """Bytes [offset, offset + length) of a file, writable, mapped as long as a view of them is
    in use; `offset` is a multiple of the page. With `populate` no page faults later. The file
    must be that long. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = mmap.MAP_SHARED | (_MAP_POPULATE if populate else 0)
        address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    finally:
        os.close(fd)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    # Not at the end of the ctypes object: the collector, which an array is nothing to, would
    # tell of that before it lets generators in the same garbage end, which may look once more.
    mapped = memoryview((ctypes.c_ubyte * length).from_address(address))
    memory = np.frombuffer(mapped, np.uint8)
    weakref.finalize(memory, _libc.munmap, address, length).atexit = False
    return memory.data


def make_span(path: Path, base: int, length: int) -> memoryview:
    """The same, with its memory made and its pages mapped. Space is taken before it is mapped:
    a full tmpfs is an errno, never SIGBUS."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, base, length)
    finally:
        os.close(fd)
    return map_shared(path, base, length, populate=True)


def watch(view: memoryview) -> weakref.ref[object]:
    """Dead when nobody looks at a mapping any longer."""
    return weakref.ref(view.obj)

"""Host memory: page-aligned, touched when it is taken, and the pieces that files go through."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from kvfs.torch.layout import RowLayout

# Large enough for long requests, small enough to stay in the cache between read and copy.
_PIECE_BYTES = 2 << 20
_IDLE_PIECES = 4
_LARGE_PAGE = 2 << 20


class _Arena:
    """Memory in large pages, where the kernel has them, handed out piece by piece. It goes back
    with the last of its pieces."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        if nbytes > _LARGE_PAGE // 2:
            return _touched(nbytes)
        if nbytes > len(self._rest):
            self._rest = _touched(_LARGE_PAGE)
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return piece


_lock = threading.Lock()
_idle: list[memoryview] = []
_arena = _Arena()


def page_aligned(nbytes: int) -> memoryview:
    """Fresh memory of at least `nbytes`, whole pages, already touched.

    Touching memory costs more than reading a file into it, so this is for memory that is
    used again and again. Safe to use from several threads.
    """
    with _lock:
        return _arena.take(whole_pages(max(1, nbytes)))


def _touched(nbytes: int) -> memoryview:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + _LARGE_PAGE, flags=flags)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    every_byte = np.frombuffer(memory, np.uint8)
    start = -every_byte.ctypes.data % _LARGE_PAGE
    every_byte[start : start + nbytes : mmap.PAGESIZE] = 0
    return memoryview(memory)[start : start + nbytes]


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@contextmanager
def staging(layout: RowLayout) -> Iterator[memoryview]:
    """A piece of memory through which rows go between a file and hot memory.

    It starts on a page, and its length is a whole number of rows and of pages, so that
    requests of that length stay aligned in a file of rows. Safe to use from several threads.
    """
    length = piece_bytes(layout)
    piece = _take(length)
    try:
        yield piece[:length]
    finally:
        with _lock:
            if len(_idle) < _IDLE_PIECES:
                # First in line again: what was used last is still in the processor's cache.
                _idle.insert(0, piece)


def piece_bytes(layout: RowLayout) -> int:
    """Whole rows and whole pages."""
    step = math.lcm(layout.row_bytes, mmap.PAGESIZE)
    return max(1, _PIECE_BYTES // step) * step


def _take(length: int) -> memoryview:
    with _lock:
        for index, piece in enumerate(_idle):
            if length <= len(piece):
                return _idle.pop(index)
    return page_aligned(length)

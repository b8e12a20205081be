"""Page-aligned buffers that are touched once and used again.

The first touch of fresh memory costs a page fault each 4 KiB, several times the
price of the copy into it; direct I/O needs the alignment. Large pages where the
kernel gives them: the device takes a buffer of 1 MiB as one piece instead of 256.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvfs.engine.format import BLOCK

_LARGE_PAGE = 2 * 1024 * 1024


@dataclass(slots=True)
class BufferPool:
    """Buffers of one size, last in first out, for any thread. `kept_max` idle ones stay allocated,
    and those that came with others in a large page."""

    size: int
    kept_max: int
    _idle: list[memoryview] = field(default_factory=list)

    def take(self) -> memoryview:
        with suppress(IndexError):
            return self._idle.pop()
        first, *others = _touched(self.size)
        self._idle += others
        return first

    def stock(self, count: int) -> None:
        """Have so many idle ones: for a thread, before somebody waits for them."""
        while len(self._idle) < count:
            self._idle += _touched(self.size)

    def give(self, buffer: memoryview) -> None:
        """Hand a buffer back; nobody may use it, or a view of it, any longer."""
        assert len(buffer) == self.size
        if len(self._idle) < self.kept_max:
            self._idle.append(buffer)


def _touched(size: int) -> list[memoryview]:
    """As many buffers as a large page has room for."""
    whole = max(size, _LARGE_PAGE // size * size)
    memory = mmap.mmap(-1, whole + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    start = -pages.ctypes.data % _LARGE_PAGE
    pages[start : start + whole : BLOCK] = 0
    return [memoryview(memory)[at : at + size] for at in range(start, start + whole, size)]


def aligned(size: int) -> memoryview:
    """A zeroed page-aligned buffer for one use. Small ones do not cost a mapping."""
    raw = np.zeros(size + BLOCK, np.uint8)
    skip = -raw.ctypes.data % BLOCK
    return raw.data[skip : skip + size]


_COPY_UNLOCKED_MIN = 64 * 1024


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes of equal length; large ones with the interpreter's lock released."""
    if len(source) < _COPY_UNLOCKED_MIN:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def is_aligned(buffer: memoryview) -> bool:
    """Whether direct I/O can take the buffer as it is: whole blocks, block-aligned."""
    return len(buffer) % BLOCK == 0 and np.frombuffer(buffer, np.uint8).ctypes.data % BLOCK == 0

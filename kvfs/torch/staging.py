"""Host memory for KV: page-aligned buffers that are touched once and reused."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.torch.layout import RowLayout

SLAB_BYTES = 1 << 20
"""The unit in which slabs grow and layers are written: the largest FUSE request."""

# Large enough for long requests, small enough to stay in the cache between read and copy.
_PIECE_BYTES = 2 << 20
_IDLE_LIMIT = 128 << 20


class BufferPool:
    """Keeps buffers for the next user, because touching fresh memory costs more than the read.

    At most 128 MiB lie idle; beyond that a returned buffer goes back to the system. Safe
    to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """Page-aligned, touched memory of at least `nbytes`, a multiple of SLAB_BYTES long.

        Its content is undefined.
        """
        with self._lock:
            fitting = [buffer for buffer in self._idle if nbytes <= len(buffer) <= 2 * nbytes]
            if fitting:
                best = min(fitting, key=len)
                self._idle.remove(best)
                return best
        return _fresh(nbytes)

    def give(self, buffer: mmap.mmap) -> None:
        """Take a buffer back. Whoever still looks at it sees the next user's bytes."""
        with self._lock:
            if sum(map(len, self._idle)) + len(buffer) <= _IDLE_LIMIT:
                self._idle.append(buffer)


POOL = BufferPool()
"""One pool a process: what one session gives back serves the next."""


@contextmanager
def staging(layout: RowLayout) -> Iterator[memoryview]:
    """A piece of memory through which rows go between a file and a slab.

    It starts on a page, and its length is a whole number of rows and of pages, so that
    requests of that length stay aligned in a file of rows.
    """
    step = math.lcm(layout.row_bytes, mmap.PAGESIZE)
    length = max(1, _PIECE_BYTES // step) * step
    buffer = POOL.take(length)
    try:
        yield memoryview(buffer)[:length]
    finally:
        POOL.give(buffer)


def _fresh(nbytes: int) -> mmap.mmap:
    length = -(-nbytes // SLAB_BYTES) * SLAB_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, length, flags=flags)

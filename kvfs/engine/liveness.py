"""Which blocks of the ring are live: one bit for each 4 KiB, and a count a segment.

Deletion is logical: it clears bits. Marking a live block or clearing a dead one is
a fault of ours, and is refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvfs.engine.format import BLOCK, DATA_START, round_up


class Liveness:
    def __init__(self, segment_count: int, segment_size: int) -> None:
        self._segment_size = segment_size
        blocks = segment_count * segment_size // BLOCK
        self._bits = np.zeros(-(-blocks // 8), np.uint8)
        self.live_blocks: npt.NDArray[np.int64] = np.zeros(segment_count, np.int64)

    def mark(self, address: int, stored: int) -> None:
        """`stored` bytes at `address` are in use. They lie within one segment."""
        self._change(address, stored, live=True)

    def clear(self, address: int, stored: int) -> bool:
        """They are no longer; True when their segment has no live block left."""
        return self._change(address, stored, live=False) == 0

    def is_live(self, address: int) -> bool:
        block = (address - DATA_START) // BLOCK
        return bool(self._bits[block >> 3] >> (block & 7) & 1)

    @property
    def live_bytes(self) -> int:
        return int(self.live_blocks.sum()) * BLOCK

    def _change(self, address: int, stored: int, *, live: bool) -> int:
        start = (address - DATA_START) // BLOCK
        count = round_up(stored) // BLOCK
        first, last = start >> 3, (start + count - 1) >> 3
        mask = np.full(last - first + 1, 0xFF, np.uint8)
        mask[0] &= 0xFF << (start & 7) & 0xFF
        mask[-1] &= 0xFF >> (7 - ((start + count - 1) & 7))
        window = self._bits[first : last + 1]
        expected = 0 if live else mask
        if np.any((window & mask) != expected):
            state = "live" if live else "dead"
            raise AssertionError(f"blocks at {address} are already {state}")
        window ^= mask
        segment = (address - DATA_START) // self._segment_size
        self.live_blocks[segment] += count if live else -count
        return int(self.live_blocks[segment])

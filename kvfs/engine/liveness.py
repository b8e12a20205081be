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
        self._bits = bytearray(-(-blocks // 8))
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
        # The range as one number: short ranges are the rule, and cost little this way.
        mask = ((1 << count) - 1) << (start & 7)
        window = int.from_bytes(self._bits[first : last + 1], "little")
        if window & mask != (0 if live else mask):
            state = "live" if live else "dead"
            raise AssertionError(f"blocks at {address} are already {state}")
        self._bits[first : last + 1] = (window ^ mask).to_bytes(last + 1 - first, "little")
        segment = (address - DATA_START) // self._segment_size
        self.live_blocks[segment] += count if live else -count
        return int(self.live_blocks[segment])

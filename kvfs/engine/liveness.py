"""Which blocks of the ring are live: one bit for each 4 KiB, and a count a segment.

Deletion is logical: it clears bits. Marking a live block or clearing a dead one is
a fault of ours, and is refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvfs.engine.format import BITMAP_PART, BLOCK, DATA_START, FormatError, round_up


class Liveness:
    """`changed` names the parts of the bitmap that are not as they were stored."""

    def __init__(self, segment_count: int, segment_size: int) -> None:
        self._segment_size = segment_size
        self._segments_per_part = max(1, BITMAP_PART // segment_size)
        self.part_count = -(-segment_count // self._segments_per_part)
        self.changed: set[int] = set()
        blocks = segment_count * segment_size // BLOCK
        self._bits = bytearray(-(-blocks // 8))
        self.live_blocks: npt.NDArray[np.int64] = np.zeros(segment_count, np.int64)
        self._live_total = 0  # their sum, which each operation asks for

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
        return self._live_total * BLOCK

    def part_of(self, address: int) -> int:
        """The part of the bitmap that tells of an address."""
        return (address - DATA_START) // self._segment_size // self._segments_per_part

    def pack_part(self, part: int) -> bytes:
        return bytes(self._bits[self._span(part)])

    def load_part(self, part: int, bits: bytes) -> None:
        """Raises FormatError on a wrong length."""
        span = self._span(part)
        if len(bits) != span.stop - span.start:
            raise FormatError("a part of the bitmap has a wrong length")
        self._bits[span] = bits
        per_segment = self._segment_size // BLOCK // 8
        counts = np.unpackbits(np.frombuffer(bits, np.uint8)).reshape(-1, 8 * per_segment)
        first = part * self._segments_per_part
        self.live_blocks[first : first + len(counts)] = counts.sum(axis=1, dtype=np.int64)
        self._live_total = int(self.live_blocks.sum())

    @property
    def stored_max(self) -> int:
        """What all parts take where they are stored, each in a frame of its own, in bytes."""
        return round_up(len(self._bits)) + 2 * self.part_count * BLOCK

    def _span(self, part: int) -> slice:
        length = self._segments_per_part * self._segment_size // BLOCK // 8
        return slice(part * length, min((part + 1) * length, len(self._bits)))

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
        self.changed.add(self.part_of(address))
        segment = (address - DATA_START) // self._segment_size
        change = count if live else -count
        self.live_blocks[segment] += change
        self._live_total += change
        return int(self.live_blocks[segment])

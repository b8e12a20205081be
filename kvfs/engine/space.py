"""How much of the ring may still be promised, and what an operation may take of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.engine import ops
from kvfs.engine.format import BLOCK, NO_SEGMENT, round_up
from kvfs.engine.index import Index
from kvfs.engine.ring import RESERVED_SEGMENTS, Ring

_OPERATION_COST = 4096
# The record that the superblock points to, in a frame of its own.
_EMPTY_CHECKPOINT = 16 * BLOCK
# Frames are long where much is written: one block of head for so many of payload.
_FRAME_SHARE = 64


def cost(op: ops.Operation) -> int:
    """The bytes of the ring that an operation may take in its own frame, at most. What it
    frees is not counted, nor what it adds to the next checkpoint."""
    match op:
        case ops.Write():
            return _OPERATION_COST + round_up(op.length) + 2 * BLOCK
        case ops.SetXattr():
            return _OPERATION_COST + len(op.value)
        case ops.Create():
            return _OPERATION_COST + len(op.target)
        case ops.Rename():
            return 2 * _OPERATION_COST
    return _OPERATION_COST


@dataclass(slots=True)
class Space:
    """The ring's bytes as they can be promised. `extent_max` is the longest extent."""

    ring: Ring
    index: Index
    extent_max: int

    @property
    def usable_segment(self) -> int:
        """What a segment surely takes: the rest may be too short for the next extent."""
        return self.ring.geometry.segment_size - self.extent_max - 4 * BLOCK

    @property
    def total(self) -> int:
        """What an empty ring can take."""
        geometry = self.ring.geometry
        others = geometry.segment_count - RESERVED_SEGMENTS - 1
        return others * self.usable_segment + geometry.segment_size - BLOCK

    def left(self, promised: int, *, frees: bool) -> int:
        """Bytes that operations may still be promised without cleaning. What makes room
        may use the reserve."""
        ring = self.ring
        segments = ring.free_segments + (ring.position.next_segment != NO_SEGMENT)
        reserve = self._reserve + (0 if frees else RESERVED_SEGMENTS * self.usable_segment)
        return max(0, ring.room) + segments * self.usable_segment - promised - reserve

    def left_after_cleaning(self, promised: int) -> int:
        """Bytes that could be promised if all live blocks lay side by side."""
        live = self.ring.liveness.live_bytes
        return self.total - live - live // _FRAME_SHARE - promised - self._reserve

    @property
    def _reserve(self) -> int:
        """The next checkpoint, and two without changes: what is dead becomes free when
        both superblock slots have moved on."""
        unchanged = self.ring.liveness.stored_max + _EMPTY_CHECKPOINT
        return self.index.checkpoint_size_max + 2 * unchanged

    @property
    def reclaimable(self) -> int:
        """Bytes of segments that are dead, and free once both superblocks have moved on."""
        return (self.ring.dead_segments - self.ring.free_segments) * self.usable_segment

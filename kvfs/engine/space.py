"""How much of the ring may still be promised, and what an operation may take of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.engine import ops
from kvfs.engine.format import BLOCK, NO_SEGMENT, round_up
from kvfs.engine.index import Index
from kvfs.engine.ring import RESERVED_SEGMENTS, Ring

_OPERATION_COST = 4096
# Whole checkpoints: those of both superblock slots, and a new one.
_CHECKPOINTS = 3


def cost(op: ops.Operation) -> int:
    """The bytes of the ring that an operation may take, at most: in its own frame, and
    its items in the checkpoints. What it frees is not counted."""
    match op:
        case ops.Write():
            return _OPERATION_COST + round_up(op.length) + 2 * BLOCK
        case ops.SetXattr():
            return _OPERATION_COST + (1 + _CHECKPOINTS) * len(op.value)
        case ops.Create():
            return _OPERATION_COST + (1 + _CHECKPOINTS) * len(op.target)
        case ops.Rename():
            return 2 * _OPERATION_COST
    return _OPERATION_COST


@dataclass(slots=True)
class Space:
    """The ring's bytes as they can be promised. `extent_max` is the longest extent,
    `held` what the checkpoints of both superblock slots take: their part of the reserve."""

    ring: Ring
    index: Index
    extent_max: int
    held: int = 0

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
        """Bytes that operations may still be promised. What makes room may use the reserve."""
        ring = self.ring
        segments = ring.free_segments + (ring.position.next_segment != NO_SEGMENT)
        checkpoint = self._checkpoint_size
        reserve = max(checkpoint, _CHECKPOINTS * checkpoint - self.held)
        if not frees:
            reserve += RESERVED_SEGMENTS * self.usable_segment
        return max(0, ring.room) + segments * self.usable_segment - promised - reserve

    @property
    def _checkpoint_size(self) -> int:
        """What a checkpoint takes, at most: its chunks are rounded up to whole blocks."""
        return self.index.size * 17 // 16 + 2 * BLOCK

    @property
    def reclaimable(self) -> int:
        """Bytes of segments that are dead, and free once both superblocks have moved on."""
        return (self.ring.dead_segments - self.ring.free_segments) * self.usable_segment

"""How much of the ring may still be promised, and what an operation may take of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvfs.engine import ops
from kvfs.engine.format import (
    BLOCK,
    EXTENT_SIZE_MAX,
    EXTENT_SIZE_MIN,
    ITEM_OVERHEAD,
    NO_SEGMENT,
    SEAL_OVERHEAD,
    SECRET_SIZE,
    round_up,
)
from kvfs.engine.index import Index
from kvfs.engine.ring import Geometry, Ring

_OPERATION_COST = 4096
_OPERATION_CHANGES = 8
# The record that the superblock points to, in a frame of its own.
_EMPTY_CHECKPOINT = 16 * BLOCK
_FREE_SHARE = 32
# Of so many parts of the ring, one more is kept for cleaning.
_OVERPROVISION_OF = 15
_FRACTION_OF_SEGMENT = 8  # an extent is at most this part of a segment


class Purpose(IntEnum):
    """What space is wanted for, and how many segments that leaves alone: for rm, for
    cleaning and the checkpoints that make room, for the log to go on."""

    STORE = 4
    REMOVE = 2
    CLEAN = 0


def longest_extent(segment_size: int, *, encrypted: bool) -> int:
    """In bytes. Encrypted it is a little longer, and is still read into one buffer."""
    limit = EXTENT_SIZE_MAX // 2 if encrypted else EXTENT_SIZE_MAX
    return min(limit, segment_size // _FRACTION_OF_SEGMENT)


def capacity(geometry: Geometry, extent_max: int) -> int:
    """What a ring is meant to take, in bytes: less than it could, so that cleaning always finds
    segments that are partly dead."""
    segments = geometry.segment_count - Purpose.STORE
    usable = segments * usable_of_segment(geometry.segment_size, extent_max)
    return usable * _OVERPROVISION_OF // (_OVERPROVISION_OF + 1)


def usable_of_segment(segment_size: int, extent_max: int) -> int:
    """What a segment surely takes: the rest may be too short for the next extent."""
    return segment_size - extent_max - 4 * BLOCK


def cost(op: ops.Operation) -> int:
    """The bytes of the ring that an operation may take in its own frame, at most. What it
    frees is not counted, nor what it adds to the next checkpoint."""
    match op:
        case ops.Write():
            # Encrypted, each of its extents may take a block more.
            extents = 2 + op.length // EXTENT_SIZE_MIN
            return _OPERATION_COST + round_up(op.length) + extents * BLOCK
        case ops.SetXattr():
            return _OPERATION_COST + len(op.value)
        case ops.Create():
            return _OPERATION_COST + len(op.target)
        case ops.Rename():
            return 2 * _OPERATION_COST
        case ops.Drop():
            return len(op.inos) * _OPERATION_COST
        case ops.Fork():
            keys = op.serials * (ITEM_OVERHEAD + SECRET_SIZE + SEAL_OVERHEAD)
            items = op.items * (ITEM_OVERHEAD + SEAL_OVERHEAD) + op.item_bytes
            return _OPERATION_COST + items + keys
        case ops.Reclaim():
            return _OPERATION_COST + op.items * ITEM_OVERHEAD
    return _OPERATION_COST


def changes(op: ops.Operation) -> int:
    """Items of the index that an operation may change."""
    match op:
        case ops.Fork() | ops.Reclaim():
            return op.items
        case ops.Drop():
            return len(op.inos) * _OPERATION_CHANGES
    return _OPERATION_CHANGES


@dataclass(slots=True)
class Space:
    """The ring's bytes as they can be promised. `extent_max` is the longest extent."""

    ring: Ring
    index: Index
    extent_max: int

    @property
    def usable_segment(self) -> int:
        return usable_of_segment(self.ring.geometry.segment_size, self.extent_max)

    @property
    def total(self) -> int:
        return capacity(self.ring.geometry, self.extent_max)

    def has_room(self, charge: int, promised: int, purpose: Purpose) -> bool:
        """Whether so many bytes can be promised now."""
        # What it is seen by costs more than the comparison, and each operation asks.
        wanted = charge + promised + self._reserve
        is_enough = purpose != Purpose.STORE or self._left_after_cleaning >= wanted
        return is_enough and self._left(purpose) >= wanted

    def is_enough(self, charge: int, promised: int, purpose: Purpose) -> bool:
        """Whether cleaning makes room for so much. What makes room itself is always tried."""
        return purpose != Purpose.STORE or self.left_after_cleaning(promised) >= charge

    def left(self, promised: int, purpose: Purpose) -> int:
        """Bytes of free segments, less what is promised and reserved."""
        return self._left(purpose) - promised - self._reserve

    def _left(self, purpose: Purpose) -> int:
        ring = self.ring
        segments = ring.free_segments + (ring.position.next_segment != NO_SEGMENT) - purpose
        return max(0, ring.room) + segments * self.usable_segment

    def left_after_cleaning(self, promised: int) -> int:
        """Bytes that could be promised if all live blocks lay side by side."""
        return self._left_after_cleaning - promised - self._reserve

    @property
    def _left_after_cleaning(self) -> int:
        return self.total - self.ring.liveness.live_bytes

    @property
    def is_short(self) -> bool:
        """Whether so few segments are free that cleaning should not wait until none is."""
        segments = self.ring.geometry.segment_count
        return self.ring.free_segments < Purpose.STORE + max(2, segments // _FREE_SHARE)

    @property
    def is_worth_cleaning(self) -> bool:
        """Whether some segment is mostly dead."""
        victim = self.ring.victim()
        return victim is not None and self.ring.live_bytes(victim) < self.usable_segment * 3 // 4

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

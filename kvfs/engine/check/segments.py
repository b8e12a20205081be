"""Segments whose frames cannot be read: cleaning would never free them.

What lies there is not lost, the index knows where. A repair carries it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvfs.engine.check.findings import Finding
from kvfs.engine.check.frames import new_ring
from kvfs.engine.check.load import Base, mark_disjoint
from kvfs.engine.check.tables import Tables
from kvfs.engine.cleaner import survey
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import Extent, Pointer, RecordHeader, RecordKind, round_up
from kvfs.engine.ring import Ring
from kvfs.engine.writeback import Payload

_EXTENTS_AT_ONCE = 16


def unreadable(device: Device, base: Base, tables: Tables) -> list[int]:
    """Segments in which something live is not named by a frame."""
    ring = new_ring(base.superblock)
    places: list[Extent | Pointer] = [*base.places, *tables.extents.values()]
    mark_disjoint(ring.liveness, ring.geometry, places)
    live = [int(segment) for segment in ring.liveness.live_blocks.nonzero()[0]]
    return [segment for segment in live if not _is_readable(device, ring, segment)]


def _is_readable(device: Device, ring: Ring, segment: int) -> bool:
    try:
        return survey(device, ring, segment).taken == ring.live_bytes(segment)
    except OSError:
        return False


def findings_of(base: Base, segments: list[int]) -> list[Finding]:
    return [
        Finding(
            "segment",
            f"the frames of segment {segment} cannot be read, so that it cannot be cleaned",
            address=base.geometry.address(segment),
        )
        for segment in segments
    ]


@dataclass(frozen=True, slots=True)
class Move:
    """Extents that are to be stored elsewhere, as they are."""

    device: Device
    tables: Tables
    extents: list[Extent]

    def payloads(self) -> Iterator[list[Payload]]:
        """In parts that fit in memory. What the device refuses to read stays where it is."""
        places: dict[int, tuple[int, int]] = {}
        for ino, slices in self.tables.slices.items():
            places.update((part.extent_id, (ino, part.offset - part.skew)) for part in slices)
        for start in range(0, len(self.extents), _EXTENTS_AT_ONCE):
            group = []
            for extent in self.extents[start : start + _EXTENTS_AT_ONCE]:
                with suppress(OSError):
                    group.append(self._payload(extent, *places[extent.extent_id]))
            yield group

    def _payload(self, extent: Extent, ino: int, offset: int) -> Payload:
        record = RecordHeader(
            RecordKind.DATA, extent.codec, extent.item_size, self.tables.inodes[ino].parent, ino,
            extent.extent_id, max(0, offset), extent.size, extent.stored, 0, extent.checksum,
            extent.cipher, extent.key_id,
        )  # fmt: skip
        stored = read_bytes(self.device, extent.address, round_up(extent.stored))
        return Payload(record, [stored])

"""Checkpoint and replay: the state of the index on the device, and what came after.

A checkpoint is the roots of the index's trees and the bitmap of live blocks, in a
record that the superblock points to. Replay applies the frames behind it, one commit
unit after the other, and ends at the first frame that is not whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvfs.engine import metadata
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import (
    BLOCK,
    KEY,
    NO_SEGMENT,
    TABLE_SUMMARIES,
    Checkpoint,
    Extent,
    FormatError,
    FrameFlag,
    FrameHeader,
    Item,
    ItemKind,
    Pointer,
    Position,
    RecordHeader,
    RecordKind,
    Superblock,
    SuperblockFlag,
    extent_key,
    key_owner,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Step, run
from kvfs.engine.ring import Frame, Geometry, Ring, read_frame, read_header

# -- what a commit unit does -----------------------------------------------------


def extent_of(header: FrameHeader, record: RecordHeader) -> Extent:
    """The extent that a DATA record of a frame stores."""
    return Extent(
        record.extent_id,
        header.address + record.payload,
        record.stored,
        record.size,
        record.codec,
        record.item_size,
        record.checksum,
        record.cipher,
        record.key_id,
    )


def apply_unit(
    index: Index, ring: Ring, extents: list[Extent], items: list[Item], dead: list[Extent]
) -> None:
    """Make a commit unit part of the committed state: live, and after a crash. `dead` are
    the extents as they lay before it moved or removed them."""
    for extent in dead:
        ring.release(extent.address, extent.stored, ring.position.sequence)
    for extent in extents:
        ring.liveness.mark(extent.address, extent.stored)
        index.apply([(extent_key(extent.extent_id), extent.pack())])
    if index.vault.is_on:
        index.vault.keys.apply(extents, items, dead)
    index.apply([item for item in items if item[0][0] != TABLE_SUMMARIES])


def _dead_by(index: Index, extents: list[Extent], items: list[Item]) -> Step[list[Extent]]:
    """What a unit moves or removes, as the index has it."""
    keys = [extent_key(extent.extent_id) for extent in extents]
    keys += [key for key, value in items if value is None and KEY.unpack(key)[2] == ItemKind.EXTENT]
    dead = []
    for key in keys:
        value = yield from index.committed(key)
        if value is not None:
            dead.append(Extent.unpack(key_owner(key), value))
    return dead


# -- checkpoint ------------------------------------------------------------------


def read_checkpoint(device: Device, pointer: Pointer, ring: Ring) -> Checkpoint:
    """Also loads the bitmap of live blocks. Raises FormatError, OSError."""
    if pointer.stored == 0:
        return Checkpoint()
    checkpoint = Checkpoint.unpack(metadata.read(device, pointer))
    liveness = ring.liveness
    for part, place in enumerate(checkpoint.bitmap):
        if place.stored:
            liveness.load_part(part, metadata.read(device, place))
    liveness.changed.clear()
    # They were written after the parts of the bitmap that tell of them.
    for place in (pointer, *checkpoint.bitmap):
        if place.stored and not liveness.is_live(place.address):
            liveness.mark(place.address, place.stored)
    return checkpoint


# -- replay ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replayed:
    """Where the log ended. `damage` says what was found behind a frame that is not
    whole although it had been flushed; the state is then that of the whole prefix."""

    operation: int
    frames: int
    damage: str | None


def replay(
    device: Device, ring: Ring, index: Index, superblock: Superblock, durable: int
) -> Replayed:
    """Apply all whole commit units from the ring's position on, and leave the ring's
    head behind the last. A unit without its end never happened. Frames before the
    sequence `durable` were flushed. Raises OSError."""
    operation, frames = superblock.operation, 0
    unit: list[Frame] = []
    end = ring.position
    for frame in frames_behind(device, ring, superblock, durable):
        unit.append(frame)
        end = ring.position_after(frame.header)
        if not frame.header.flags & FrameFlag.CONTINUES:
            run(_redo(index, ring, unit))
            operation = frame.header.operation
            frames += len(unit)
            unit = []
    clean = superblock.flags & SuperblockFlag.CLEAN
    damage = None if clean else damage_behind(device, ring, superblock, end)
    return Replayed(operation, frames, damage)


def _redo(index: Index, ring: Ring, unit: list[Frame]) -> Step[None]:
    for frame in unit:
        ring.passed(frame.header)
    extents = [
        extent_of(frame.header, record)
        for frame in unit
        for record in frame.records
        if record.kind == RecordKind.DATA
    ]
    stored = index.vault.learn([item for frame in unit for item in frame.items])
    items = index.vault.opened(stored)
    dead = yield from _dead_by(index, extents, items)
    apply_unit(index, ring, extents, items, dead)


def frames_behind(
    device: Device, ring: Ring, superblock: Superblock, durable: int
) -> Iterator[Frame]:
    """The whole frames from the ring's position on, each behind the one before. Of those
    before the sequence `durable` the payloads are not looked at."""
    position: Position | None = ring.position
    while position is not None:
        frame = _frame_at(device, ring, position, superblock, durable)
        position = None
        if frame is not None:
            position = ring.position_after(frame.header)
            yield frame


def _frame_at(
    device: Device, ring: Ring, position: Position, superblock: Superblock, durable: int
) -> Frame | None:
    """The frame that follows, in this segment or at the start of the next. An older
    epoch's frame, once found torn, must not come back by what was written over it."""
    for segment, offset in _places(position):
        try:
            header = read_header(ring, device, segment, offset)
            follows = (header.sequence, header.previous_checksum) == (
                position.sequence,
                position.previous_checksum,
            )
            if follows and not is_stale(header, superblock):
                return read_frame(device, header, is_durable=header.sequence < durable)
        except FormatError:
            continue
    return None


def is_stale(header: FrameHeader, superblock: Superblock) -> bool:
    """Whether a later mount began without this frame."""
    return header.sequence >= superblock.epoch_start and header.epoch < superblock.epoch


def _places(position: Position) -> list[tuple[int, int]]:
    places = [(position.segment, position.offset)]
    if position.next_segment != NO_SEGMENT:
        places.append((position.next_segment, 0))
    return places


def damage_behind(device: Device, ring: Ring, superblock: Superblock, end: Position) -> str | None:
    """A frame behind the end of the log that says the log went on, durably. It may be in
    any segment whose first frame is of a later sequence."""
    places = _places(end)
    for segment in range(ring.geometry.segment_count):
        header = header_at(device, ring, segment, 0)
        if header is not None and header.sequence >= end.sequence:
            places.append((segment, 0))
    for segment, offset in dict.fromkeys(places):
        for start in frame_starts(device, ring.geometry, segment, offset):
            header = header_at(device, ring, segment, start)
            if header is None or is_stale(header, superblock):
                continue
            if header.flushed >= end.sequence:
                return (
                    f"frame {end.sequence} had been flushed and is not whole (segment "
                    f"{end.segment}, byte {end.offset}): frame {header.sequence} says so"
                )
    return None


def header_at(device: Device, ring: Ring, segment: int, offset: int) -> FrameHeader | None:
    try:
        return read_header(ring, device, segment, offset)
    except FormatError:
        return None


def frame_starts(device: Device, geometry: Geometry, segment: int, offset: int) -> Iterator[int]:
    step = 4 * 1024 * 1024
    magic = np.frombuffer(FrameHeader.MAGIC, np.uint8)
    for start in range(offset, geometry.segment_size, step):
        length = min(step, geometry.segment_size - start)
        data = read_bytes(device, geometry.address(segment, start), length)
        heads = np.frombuffer(data, np.uint8).reshape(-1, BLOCK)[:, : len(magic)]
        for block in np.flatnonzero((heads == magic).all(axis=1)):
            yield start + int(block) * BLOCK

"""Checkpoint and replay: the state of the index on the device, and what came after.

A checkpoint is all items in key order, in chunks that are records of ordinary
frames; one more record lists the chunks, and the superblock points to that one.
Replay applies the frames behind it, one commit unit after the other, and ends at
the first frame that is not whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvfs.engine import codec
from kvfs.engine.buffers import aligned
from kvfs.engine.codec import Codec, Layout
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import (
    BLOCK,
    ITEM_OVERHEAD,
    KEY,
    NO_SEGMENT,
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
    checksum,
    extent_key,
    key_owner,
    pack_items,
    round_up,
    unpack_items,
)
from kvfs.engine.index import Index
from kvfs.engine.ring import Frame, Geometry, Ring, read_frame, read_header

CHUNK_SIZE_MAX = 256 * 1024
_COUNT = struct.Struct("<I")


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


def apply_unit(index: Index, ring: Ring, extents: list[Extent], items: list[Item]) -> None:
    """Make a commit unit part of the committed state: live, and after a crash."""
    for extent in extents:
        _release(index, ring, extent_key(extent.extent_id))
        ring.liveness.mark(extent.address, extent.stored)
        index.apply([(extent_key(extent.extent_id), extent.pack())])
    for key, value in items:
        if value is None and KEY.unpack(key)[2] == ItemKind.EXTENT:
            _release(index, ring, key)
    index.apply(items)


def _release(index: Index, ring: Ring, key: bytes) -> None:
    value = index.committed(key)
    if value is not None:
        extent = Extent.unpack(key_owner(key), value)
        ring.release(extent.address, extent.stored, ring.position.sequence)


# -- checkpoint ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's record, not placed yet, and its stored bytes in whole aligned blocks."""

    record: RecordHeader
    stored: memoryview


def encode_chunks(items: list[tuple[bytes, bytes]], limit: int) -> list[EncodedChunk]:
    """All items in key order as chunks of at most `limit` bytes, or of one item. Runs in
    a thread."""
    chunks: list[EncodedChunk] = []
    group: list[Item] = []
    size = 0
    for key, value in items:
        taken = ITEM_OVERHEAD + len(value)
        if group and size + taken > limit:
            chunks.append(_encode(RecordKind.INDEX, pack_items(group)))
            group, size = [], 0
        group.append((key, value))
        size += taken
    if group:
        chunks.append(_encode(RecordKind.INDEX, pack_items(group)))
    return chunks


def encode_root(pointers: list[Pointer]) -> EncodedChunk:
    """The record that lists the chunks."""
    body = _COUNT.pack(len(pointers)) + b"".join(pointer.pack() for pointer in pointers)
    return _encode(RecordKind.CHECKPOINT, body)


def pointer_to(header: FrameHeader, record: RecordHeader) -> Pointer:
    return Pointer(
        header.address + record.payload, record.stored, record.size, record.codec, record.checksum
    )


def _encode(kind: RecordKind, body: bytes) -> EncodedChunk:
    packed = codec.encode(Codec.ZSTD, Layout(), memoryview(body))
    used, stored = (Codec.NONE, body) if packed is None else (Codec.ZSTD, packed)
    record = RecordHeader(
        kind, used, 1, 0, 0, 0, 0, len(body), len(stored), 0, checksum(stored)
    )  # fmt: skip
    padded = aligned(round_up(len(stored)))
    padded[: len(stored)] = stored
    return EncodedChunk(record, padded)


def read_checkpoint(device: Device, pointer: Pointer) -> tuple[list[Item], list[Pointer]]:
    """Its items and the places it takes. Raises FormatError, OSError."""
    if pointer.stored == 0:
        return [], []
    root = _read_pointer(device, pointer)
    count = int.from_bytes(root[: _COUNT.size], "little")
    size = Pointer.STRUCT.size
    if len(root) != _COUNT.size + count * size:
        raise FormatError("the checkpoint's list of chunks is cut")
    pointers = [Pointer.unpack(root[at : at + size]) for at in range(_COUNT.size, len(root), size)]
    items = [item for chunk in pointers for item in unpack_items(_read_pointer(device, chunk))]
    return items, [pointer, *pointers]


def _read_pointer(device: Device, pointer: Pointer) -> bytes:
    stored = read_bytes(device, pointer.address, round_up(pointer.stored))[: pointer.stored]
    if checksum(stored) != pointer.checksum:
        raise FormatError(f"checkpoint checksum mismatch at byte {pointer.address}")
    out = bytearray(pointer.size)
    codec.decode(pointer.codec, 1, stored, memoryview(out))
    return bytes(out)


# -- replay ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replayed:
    """Where the log ended. `damage` says what was found behind a frame that is not
    whole although it had been flushed; the state is then that of the whole prefix."""

    operation: int
    frames: int
    damage: str | None


def replay(device: Device, ring: Ring, index: Index, superblock: Superblock) -> Replayed:
    """Apply all whole commit units from the ring's position on, and leave the ring's
    head behind the last. A unit without its end never happened. Raises OSError."""
    operation, frames = superblock.operation, 0
    unit: list[Frame] = []
    end = ring.position
    for frame in _frames(device, ring, superblock):
        unit.append(frame)
        end = ring.position_after(frame.header)
        if not frame.header.flags & FrameFlag.CONTINUES:
            _redo(index, ring, unit)
            operation = frame.header.operation
            frames += len(unit)
            unit = []
    clean = superblock.flags & SuperblockFlag.CLEAN
    damage = None if clean else _damage(device, ring, end)
    return Replayed(operation, frames, damage)


def _redo(index: Index, ring: Ring, unit: list[Frame]) -> None:
    for frame in unit:
        ring.passed(frame.header)
    extents = [
        extent_of(frame.header, record)
        for frame in unit
        for record in frame.records
        if record.kind == RecordKind.DATA
    ]
    apply_unit(index, ring, extents, [item for frame in unit for item in frame.items])


def _frames(device: Device, ring: Ring, superblock: Superblock) -> Iterator[Frame]:
    position: Position | None = ring.position
    while position is not None:
        frame = _frame_at(device, ring, position, superblock)
        position = None
        if frame is not None:
            position = ring.position_after(frame.header)
            yield frame


def _frame_at(
    device: Device, ring: Ring, position: Position, superblock: Superblock
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
            is_stale = header.sequence >= superblock.epoch_start and header.epoch < superblock.epoch
            if follows and not is_stale:
                return read_frame(device, header)
        except FormatError:
            continue
    return None


def _places(position: Position) -> list[tuple[int, int]]:
    places = [(position.segment, position.offset)]
    if position.next_segment != NO_SEGMENT:
        places.append((position.next_segment, 0))
    return places


def _damage(device: Device, ring: Ring, end: Position) -> str | None:
    """A frame behind the end of the log that says the log went on, durably. It may be in
    any segment whose first frame is of a later sequence."""
    places = _places(end)
    for segment in range(ring.geometry.segment_count):
        header = _header_at(device, ring, segment, 0)
        if header is not None and header.sequence >= end.sequence:
            places.append((segment, 0))
    for segment, offset in dict.fromkeys(places):
        for start in _frame_starts(device, ring.geometry, segment, offset):
            header = _header_at(device, ring, segment, start)
            if header is not None and header.flushed >= end.sequence:
                return (
                    f"frame {end.sequence} had been flushed and is not whole (segment "
                    f"{end.segment}, byte {end.offset}): frame {header.sequence} says so"
                )
    return None


def _header_at(device: Device, ring: Ring, segment: int, offset: int) -> FrameHeader | None:
    try:
        return read_header(ring, device, segment, offset)
    except FormatError:
        return None


def _frame_starts(device: Device, geometry: Geometry, segment: int, offset: int) -> Iterator[int]:
    step = 4 * 1024 * 1024
    magic = np.frombuffer(FrameHeader.MAGIC, np.uint8)
    for start in range(offset, geometry.segment_size, step):
        length = min(step, geometry.segment_size - start)
        data = read_bytes(device, geometry.address(segment, start), length)
        heads = np.frombuffer(data, np.uint8).reshape(-1, BLOCK)[:, : len(magic)]
        for block in np.flatnonzero((heads == magic).all(axis=1)):
            yield start + int(block) * BLOCK

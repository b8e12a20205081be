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
from kvfs.engine.codec import Codec
from kvfs.engine.device import Device, DeviceError
from kvfs.engine.format import (
    BLOCK,
    KEY,
    NO_SEGMENT,
    SUPERBLOCK_ADDRESSES,
    Extent,
    FormatError,
    FrameFlag,
    FrameHeader,
    Item,
    ItemKind,
    Pointer,
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
from kvfs.engine.ring import Frame, Geometry, Ring, read_bytes, read_frame, read_header

CHUNK_SIZE = 256 * 1024
_COUNT = struct.Struct("<I")


# -- superblocks -----------------------------------------------------------------


def read_superblock(device: Device, name: str) -> Superblock:
    """The newest valid superblock. Raises DeviceError, with what to do."""
    found: list[Superblock] = []
    reasons: list[str] = []
    if device.size < SUPERBLOCK_ADDRESSES[-1] + BLOCK:
        raise DeviceError(f"{name} is too small to be a KVFS ring; make one with: kvfs mkfs {name}")
    for address in SUPERBLOCK_ADDRESSES:
        try:
            found.append(Superblock.unpack(read_bytes(device, address, BLOCK)))
        except FormatError as error:
            reasons.append(str(error))
    if not found:
        reason = next((r for r in reasons if "no KVFS" not in r), reasons[0])
        raise DeviceError(
            f"{name}: {reason}; if nothing on it is needed, format it with: "
            f"kvfs mkfs {name} --force"
        )
    newest = max(found, key=lambda superblock: superblock.generation)
    if newest.device_size > device.size:
        raise DeviceError(
            f"{name} is cut: it was formatted with {newest.device_size} bytes and has "
            f"{device.size}; restore its full size before mounting"
        )
    return newest


def write_superblock(device: Device, superblock: Superblock) -> None:
    """To its slot, durable on return. Raises OSError."""
    block = aligned(BLOCK)
    block[:] = superblock.pack()
    device.write(superblock.address, [block])
    device.flush()


def open_ring(superblock: Superblock) -> Ring:
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    return Ring(geometry, superblock.uuid, superblock.epoch, superblock.replay)


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
        ring.release(extent.address, extent.stored)


# -- checkpoint ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's record, not placed yet, and its stored bytes in whole aligned blocks."""

    record: RecordHeader
    stored: memoryview


def encode_chunks(items: list[tuple[bytes, bytes]]) -> list[EncodedChunk]:
    """All items in key order as chunks. Runs in a thread."""
    chunks: list[EncodedChunk] = []
    group: list[Item] = []
    size = 0
    for key, value in items:
        group.append((key, value))
        size += len(key) + len(value)
        if size >= CHUNK_SIZE:
            chunks.append(_encode(RecordKind.INDEX, pack_items(group)))
            group, size = [], 0
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
    packed = codec.encode(Codec.ZSTD, 1, memoryview(body))
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
    (count,) = _COUNT.unpack_from(root)
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
    head behind the last. Raises OSError."""
    operation = superblock.operation
    frames = 0
    extents: list[Extent] = []
    items: list[Item] = []
    unit_start = ring.position
    for frame in _frames(device, ring):
        frames += 1
        extents += [extent_of(frame.header, r) for r in frame.records if r.kind == RecordKind.DATA]
        items += frame.items
        ring.passed(frame.header)
        if not frame.header.flags & FrameFlag.CONTINUES:
            apply_unit(index, ring, extents, items)
            extents, items = [], []
            operation = frame.header.operation
            unit_start = ring.position
    clean = superblock.flags & SuperblockFlag.CLEAN
    damage = None if clean else _damage(device, ring)
    # A unit without its end never happened: its frames are overwritten.
    ring.position = unit_start
    return Replayed(operation, frames, damage)


def _frames(device: Device, ring: Ring) -> Iterator[Frame]:
    while True:
        frame = _next_frame(device, ring)
        if frame is None:
            return
        yield frame


def _next_frame(device: Device, ring: Ring) -> Frame | None:
    position = ring.position
    places = [(position.segment, position.offset)]
    if position.next_segment != NO_SEGMENT:
        places.append((position.next_segment, 0))
    for segment, offset in places:
        try:
            header = read_header(ring, device, segment, offset)
            if (
                header.sequence == position.sequence
                and header.previous_checksum == position.previous_checksum
            ):
                return read_frame(device, header)
        except FormatError:
            continue
    return None


def _damage(device: Device, ring: Ring) -> str | None:
    """A frame behind the end of the log that says the log went on, durably."""
    position, geometry = ring.position, ring.geometry
    wanted = position.sequence
    places = [(position.segment, position.offset)]
    if position.next_segment != NO_SEGMENT:
        places.append((position.next_segment, 0))
    for segment, offset in places:
        for at in _frame_starts(device, geometry, segment, offset):
            try:
                header = read_header(ring, device, segment, at)
            except FormatError:
                continue
            if header.flushed >= wanted:
                return (
                    f"frame {wanted} had been flushed and is not whole (segment "
                    f"{position.segment}, byte {position.offset}); frame {header.sequence} "
                    f"behind it says so"
                )
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

"""From sealed changes to frames: gather dirty bytes, encode them, place them.

Gathering, encoding and checksums run in a thread and touch only buffers; placing is
synchronous, in the order of the operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvfs.engine import codec
from kvfs.engine.buffers import BufferPool, copy
from kvfs.engine.codec import AutoCodec, Codec
from kvfs.engine.format import (
    ITEM_OVERHEAD,
    Extent,
    Item,
    RecordHeader,
    RecordKind,
    checksum,
    pack_items,
    round_up,
)
from kvfs.engine.io import Completion
from kvfs.engine.journal import extent_of
from kvfs.engine.ring import FRAME_SIZE_MAX, PlacedFrame, Ring, head_size
from kvfs.engine.state import NewExtent, Sealed, State

BATCH_SIZE = 8 * 1024 * 1024
BATCH_OPERATIONS = 4096
_ITEMS_CHUNK_MAX = 1024 * 1024


@dataclass(slots=True)
class Batch:
    """A sealed set of changes on its way to the ring.

    `operation` is the last that it contains, `charge` the space that was promised for it,
    `data_bytes` what was written to files.
    """

    sealed: Sealed
    operation: int
    charge: int
    data_bytes: int
    arena: Arena | None = None
    encoding: Completion[Encoded] | None = None
    committed: Completion[None] = field(default_factory=Completion)


@dataclass(slots=True)
class Arena:
    """Memory for the payloads of one batch, block-aligned, from a pool if it fits."""

    buffer: memoryview
    pool: BufferPool

    @classmethod
    def for_extents(cls, extents: list[NewExtent], pool: BufferPool) -> Arena:
        size = sum(round_up(extent.size) for extent in extents)
        if size <= pool.size:
            return cls(pool.take(), pool)
        return cls(BufferPool(round_up(size), 0).take(), pool)

    def give_back(self) -> None:
        if len(self.buffer) == self.pool.size:
            self.pool.give(self.buffer)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The records of a batch, and their payloads one behind the other from `payload`'s
    start, each padded to whole blocks. `payload` offsets in the records are not set."""

    records: list[RecordHeader]
    payload: memoryview
    encoded_bytes: int
    encoded_into: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A commit unit with its place: frames to write, then what it makes true."""

    frames: list[PlacedFrame]
    extents: list[Extent]
    items: list[Item]
    changed_inodes: list[int]


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """Runs in a thread."""

    extents: list[NewExtent]
    codecs: list[Codec]
    arena: memoryview

    def __call__(self) -> Encoded:
        started = time.perf_counter()
        records = []
        at = encoded_bytes = encoded_into = 0
        for extent, used in zip(self.extents, self.codecs, strict=True):
            record, taken = self._encode(extent, used, at)
            records.append(record)
            at += taken
            if used != Codec.NONE:
                encoded_bytes += extent.size
                encoded_into += taken
        seconds = time.perf_counter() - started
        return Encoded(records, self.arena[:at], encoded_bytes, encoded_into, seconds)

    def _encode(self, extent: NewExtent, used: Codec, at: int) -> tuple[RecordHeader, int]:
        raw = self.arena[at : at + extent.size]
        _gather(extent.pieces, raw)
        encoded = codec.encode(used, extent.item_size, raw)
        if encoded is None:
            used, stored = Codec.NONE, extent.size
        else:
            stored = len(encoded)
            self.arena[at : at + stored] = encoded
        taken = round_up(stored)
        self.arena[at + stored : at + taken] = bytes(taken - stored)
        record = RecordHeader(
            RecordKind.DATA, used, extent.item_size, extent.session_id, extent.ino,
            extent.extent_id, extent.offset, extent.size, stored, 0,
            checksum(self.arena[at : at + stored]),
        )  # fmt: skip
        return record, taken


def _gather(pieces: list[memoryview], out: memoryview) -> None:
    at = 0
    for piece in pieces:
        end = at + len(piece)
        copy(piece, out[at:end])
        at = end


def start_encoding(
    batch: Batch,
    auto: AutoCodec,
    pool: BufferPool,
    submit: Callable[[EncodeBatch], Completion[Encoded]],
) -> None:
    """Have a batch encoded in a thread, unless that was already begun."""
    if batch.encoding is not None:
        return
    extents = batch.sealed.extents
    batch.arena = Arena.for_extents(extents, pool)
    auto_compresses = bool(extents) and auto.next_batch()
    codecs = [
        codec.resolve(extent.choice, extent.item_size, auto_compresses=auto_compresses)
        for extent in extents
    ]
    batch.encoding = submit(EncodeBatch(extents, codecs, batch.arena.buffer))


def place(batch: Batch, encoded: Encoded, ring: Ring, state: State) -> Placed:
    """Give a batch its frames. Raises RingFull."""
    stored = state.placed(batch.sealed, encoded.records)
    items = sorted([*batch.sealed.items, *state.inode_items(batch.sealed)])
    frames = place_unit(ring, encoded.records, encoded.payload, items, batch.operation)
    extents = [extent_of(frame.header, record) for frame, group in frames for record in group]
    return Placed([frame for frame, _ in frames], extents, items, list(stored))


def place_unit(
    ring: Ring,
    records: list[RecordHeader],
    payload: memoryview,
    items: list[Item],
    operation: int,
) -> list[tuple[PlacedFrame, list[RecordHeader]]]:
    """The frames of one commit unit: records as far as a segment has room for them, in
    order, and the items with the last. Raises RingFull."""
    frames: list[tuple[PlacedFrame, list[RecordHeader]]] = []
    chunks = _item_chunks(items, min(_ITEMS_CHUNK_MAX, ring.geometry.segment_size // 8))
    at = 0
    while records or chunks:
        room = min(ring.room, FRAME_SIZE_MAX)
        group = _fitting(records, room)
        length = sum(round_up(record.stored) for record in group)
        records = records[len(group) :]
        chunk = None
        if not records and head_size(len(group), len(chunks[0])) + length <= room:
            chunk = chunks.pop(0)
        if not group and chunk is None:
            frames += [(link, []) for link in ring.advance(operation)]
            continue
        _lay_out(group)
        frame = ring.append(
            group, payload[at : at + length], chunk or b"", operation=operation,
            continues=bool(records or chunks),
        )  # fmt: skip
        frames.append((frame, group))
        at += length
    return frames


def _fitting(records: list[RecordHeader], room: int) -> list[RecordHeader]:
    length = 0
    for count, record in enumerate(records):
        length += round_up(record.stored)
        if head_size(count + 1, 0) + length > room:
            return records[:count]
    return records


def _lay_out(group: list[RecordHeader]) -> None:
    at = 0
    for record in group:
        record.payload = at
        at += round_up(record.stored)


def _item_chunks(items: list[Item], limit: int) -> list[bytes]:
    """The packed items in parts of about `limit` bytes; one empty part if there are none."""
    groups: list[list[Item]] = [[]]
    size = 0
    for key, value in items:
        taken = ITEM_OVERHEAD + len(value or b"")
        if size + taken > limit and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append((key, value))
        size += taken
    return [pack_items(group) for group in groups]

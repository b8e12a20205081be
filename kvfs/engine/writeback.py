"""From sealed changes to frames: gather dirty bytes, encode them, place them.

Gathering, encoding and checksums run in a thread and touch only buffers; placing is
synchronous, in the order of the operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from kvfs.engine import codec
from kvfs.engine.buffer import InRing, Kept
from kvfs.engine.buffers import BufferPool, copy, is_aligned
from kvfs.engine.codec import AutoCodec, Codec, CodecChoice, Share
from kvfs.engine.extents import NewExtent
from kvfs.engine.format import (
    ITEM_OVERHEAD,
    SEAL_OVERHEAD,
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
from kvfs.engine.state import Sealed, State
from kvfs.engine.vault import Vault

BATCH_SIZE = 8 * 1024 * 1024
BATCH_OPERATIONS = 4096
_ITEMS_CHUNK_MAX = 1024 * 1024


@dataclass(slots=True, eq=False)
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
    def for_extents(cls, extents: list[NewExtent], pool: BufferPool) -> Arena | None:
        """None where there are none: to touch memory takes longer than the rest of a batch."""
        if not extents:
            return None
        size = sum(round_up(extent.size + SEAL_OVERHEAD) for extent in extents)
        if size <= pool.size:
            return cls(pool.take(), pool)
        return cls(BufferPool(round_up(size), 0).take(), pool)

    def give_back(self) -> None:
        if len(self.buffer) == self.pool.size:
            self.pool.give(self.buffer)


@dataclass(frozen=True, slots=True)
class Payload:
    """A record and its stored bytes, as buffers that direct I/O takes, padded to whole
    blocks. The record's place in a frame is not set yet."""

    record: RecordHeader
    buffers: list[memoryview]

    @property
    def size(self) -> int:
        return round_up(self.record.stored)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payloads of a batch, and the memory of those that do not go to the ring as they lie;
    how many bytes a codec took, made of them, in how long."""

    payloads: list[Payload]
    arena: Arena | None
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
    pool: BufferPool
    vault: Vault
    secrets: list[bytes]

    @property
    def costs_nothing(self) -> bool:
        """Everything goes to the ring as it lies, and its checksums are known."""
        return (
            not self.secrets
            and not any(self.codecs)
            and all(
                len(extent.pieces) == 1
                and extent.pieces[0].digest is not None
                and is_aligned(extent.pieces[0].data)
                for extent in self.extents
            )
        )

    def __call__(self) -> Encoded:
        as_they_lie = [self._goes_as_it_lies(number) for number in range(len(self.extents))]
        arena = Arena.for_extents(
            [extent for extent, lies in zip(self.extents, as_they_lie, strict=True) if not lies],
            self.pool,
        )
        started = time.perf_counter()
        payloads = []
        at = encoded_bytes = encoded_into = 0
        for number, extent in enumerate(self.extents):
            if as_they_lie[number]:
                payloads.append(_as_it_lies(extent))
                continue
            assert arena is not None
            payload = self._encode(number, arena.buffer[at:])
            payloads.append(payload)
            at += payload.size
            if self.codecs[number] != Codec.NONE:
                encoded_bytes += extent.size
                encoded_into += payload.size
        seconds = time.perf_counter() - started
        return Encoded(payloads, arena, encoded_bytes, encoded_into, seconds)

    def _goes_as_it_lies(self, number: int) -> bool:
        pieces = self.extents[number].pieces
        is_raw = self.codecs[number] == Codec.NONE and not self.secrets
        return is_raw and all(is_aligned(piece.data) for piece in pieces)

    def _encode(self, number: int, out: memoryview) -> Payload:
        """At the beginning of `out`."""
        extent, used = self.extents[number], self.codecs[number]
        raw = out[: extent.size]
        _gather(extent.pieces, raw)
        encoded: bytes | memoryview | None = codec.encode(used, extent.layout, raw)
        if encoded is None:
            used, encoded = Codec.NONE, raw
        record = _record(extent, used, 0, 0)
        if self.secrets:
            record.cipher, record.key_id = self.vault.cipher, extent.ino
            encoded = self.vault.seal_extent(record, self.secrets[number], encoded)
        record.stored = len(encoded)
        if encoded is not raw:
            out[: record.stored] = encoded
        taken = round_up(record.stored)
        out[record.stored : taken] = bytes(taken - record.stored)
        record.checksum = checksum(out[: record.stored])
        return Payload(record, [out[:taken]])


def _as_it_lies(extent: NewExtent) -> Payload:
    """Stored raw and written from the operation log's memory: no copy."""
    buffers = [piece.data for piece in extent.pieces]
    digest = extent.pieces[0].digest if len(buffers) == 1 else None
    check = checksum(*buffers) if digest is None else digest
    return Payload(_record(extent, Codec.NONE, extent.size, check), buffers)


def _record(extent: NewExtent, used: Codec, stored: int, check: int) -> RecordHeader:
    return RecordHeader(
        RecordKind.DATA, used, extent.layout.item_size, extent.session_id, extent.ino,
        extent.extent_id, extent.offset, extent.size, stored, 0, check,
    )  # fmt: skip


def _gather(pieces: list[Kept], out: memoryview) -> None:
    at = 0
    for piece in pieces:
        end = at + len(piece)
        copy(piece.data, out[at:end])
        at = end


def start_encoding(
    batch: Batch,
    auto: AutoCodec,
    pool: BufferPool,
    vault: Vault,
    submit: Callable[[EncodeBatch], Completion[Encoded]],
) -> None:
    """Have a batch encoded, unless that was already begun: in a thread, if that is worth
    the change of threads."""
    if batch.encoding is not None:
        return
    extents = [known.new for known in batch.sealed.files.extents if known.new is not None]
    codecs = _codecs(extents, auto)
    secrets = [vault.keys.find_or_make(extent.ino) for extent in extents] if vault.is_on else []
    work = EncodeBatch(extents, codecs, pool, vault, secrets)
    if work.costs_nothing:
        batch.encoding = Completion()
        batch.encoding.finish(work())
    else:
        batch.encoding = submit(work)


def _codecs(extents: list[NewExtent], auto: AutoCodec) -> list[Codec]:
    compressed = _compressed(extents, auto.next_batch()) if extents else set()
    return [
        codec.resolve(extent.choice, extent.layout, auto_compresses=extent.extent_id in compressed)
        for extent in extents
    ]


def _compressed(extents: list[NewExtent], share: Share) -> set[int]:
    """The ids of the `auto` extents that are."""
    found = [extent for extent in extents if extent.choice == CodecChoice.AUTO]
    match share:
        case Share.NONE:
            found = []
        case Share.LARGEST:
            found = sorted(found, key=attrgetter("size"))[-1:]
    return {extent.extent_id for extent in found}


def place(batch: Batch, encoded: Encoded, ring: Ring, state: State, vault: Vault) -> Placed:
    """Give a batch its frames. Raises RingFull."""
    records = [payload.record for payload in encoded.payloads]
    items, changed = state.placed(batch.sealed, records)
    stored = vault.with_secrets(items)
    frames = place_unit(ring, encoded.payloads, stored, batch.operation)
    extents = [extent_of(frame.header, record) for frame, group in frames for record in group]
    return Placed([frame for frame, _ in frames], extents, items, changed)


def in_ring(batch: Batch, placed: Placed) -> list[InRing]:
    """What the buffer may go on to hold of a batch that is in the ring."""
    found = []
    for known, extent in zip(batch.sealed.files.extents, placed.extents, strict=True):
        new = known.new
        assert new is not None
        row_size = new.layout.item_size * new.layout.row_items
        found.append(InRing(extent, new.ino, new.offset, new.pieces, row_size))
    return found


def place_unit(
    ring: Ring, payloads: list[Payload], items: list[Item], operation: int
) -> list[tuple[PlacedFrame, list[RecordHeader]]]:
    """The frames of one commit unit: payloads as far as a segment has room for them, in
    order, and the items with the last. Raises RingFull."""
    frames: list[tuple[PlacedFrame, list[RecordHeader]]] = []
    chunks = _item_chunks(items, min(_ITEMS_CHUNK_MAX, ring.geometry.segment_size // 8))
    while payloads or chunks:
        room = min(ring.room, FRAME_SIZE_MAX)
        group = _fitting(payloads, room)
        payloads = payloads[len(group) :]
        length = sum(payload.size for payload in group)
        chunk = None
        if not payloads and head_size(len(group), len(chunks[0])) + length <= room:
            chunk = chunks.pop(0)
        if not group and chunk is None:
            frames += [(link, []) for link in ring.advance(operation)]
            continue
        records = _lay_out(group)
        frame = ring.append(
            records, [buffer for payload in group for buffer in payload.buffers], chunk or b"",
            operation=operation, continues=bool(payloads or chunks),
        )  # fmt: skip
        frames.append((frame, records))
    return frames


def _fitting(payloads: list[Payload], room: int) -> list[Payload]:
    length = 0
    for count, payload in enumerate(payloads):
        length += payload.size
        if head_size(count + 1, 0) + length > room:
            return payloads[:count]
    return payloads


def _lay_out(group: list[Payload]) -> list[RecordHeader]:
    """The records, each with its payload's place behind the frame's head."""
    at = 0
    for payload in group:
        payload.record.payload = at
        at += payload.size
    return [payload.record for payload in group]


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

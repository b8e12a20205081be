"""The ring: segments, and the frames appended to them.

The ring places frames and knows which segments may be overwritten. It does no I/O
of its own: `append` returns what is to be written and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvfs.engine.buffers import aligned
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    NO_SEGMENT,
    FormatError,
    FrameFlag,
    FrameHeader,
    Item,
    Position,
    RecordHeader,
    checksum,
    round_up,
    unpack_items,
)
from kvfs.engine.liveness import Liveness

FRAME_SIZE_MAX = 16 * 1024 * 1024


class RingFull(Exception):
    """No segment is left, not even for what makes room. Admission should prevent it."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where segments lie. Sizes in bytes."""

    segment_size: int
    segment_count: int

    def address(self, segment: int, offset: int = 0) -> int:
        return DATA_START + segment * self.segment_size + offset

    def segment(self, address: int) -> int:
        return (address - DATA_START) // self.segment_size

    def contains(self, address: int, length: int) -> bool:
        """Whether a block-aligned range lies within one segment."""
        if address % BLOCK or not DATA_START <= address < self.address(self.segment_count):
            return False
        return length <= self.segment_size - (address - DATA_START) % self.segment_size


@dataclass(frozen=True, slots=True)
class PlacedFrame:
    """A frame with its place: write `buffers`, one after the other, to its address."""

    header: FrameHeader
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as read back: everything but the payloads, which are verified."""

    header: FrameHeader
    records: list[RecordHeader]
    items: list[Item]


def head_size(record_count: int, item_bytes: int) -> int:
    """Bytes of a frame before its payloads."""
    return round_up(FrameHeader.SIZE + record_count * RecordHeader.SIZE + item_bytes)


@dataclass(frozen=True, slots=True)
class Survey:
    """Of each segment how many blocks are live, and whether it may be overwritten; the one that
    `victim` would name."""

    live_blocks: npt.NDArray[np.int64]
    is_free: npt.NDArray[np.bool_]
    victim: int | None


@dataclass(slots=True)
class Ring:
    """The log's head, and which segments are free.

    A segment may be overwritten once it is dead, was dead in the checkpoints of both
    superblock slots (`needed_from` is the older one's replay sequence), and holds no
    frame that a replay from either would read. `unmovable` segments are left as they are:
    what is live in them could not be found.
    """

    geometry: Geometry
    uuid: bytes
    epoch: int
    position: Position
    flushed: int = 0
    needed_from: int = 0
    liveness: Liveness = field(init=False)
    _last_sequence: npt.NDArray[np.int64] = field(init=False)
    _died: npt.NDArray[np.int64] = field(init=False)
    _announced: int = field(init=False)
    _free: int | None = None
    unmovable: set[int] = field(default_factory=set)
    _emptied: set[int] = field(default_factory=set)
    _readers: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        count = self.geometry.segment_count
        self.liveness = Liveness(count, self.geometry.segment_size)
        self._last_sequence = np.full(count, -1, np.int64)
        self._died = np.full(count, -1, np.int64)
        self._announced = self.position.next_segment

    # -- the head

    @property
    def room(self) -> int:
        """Bytes left in the head's segment, less the block kept for a link."""
        return self.geometry.segment_size - self.position.offset - BLOCK

    def advance(self, operation: int) -> list[PlacedFrame]:
        """Go on in the next segment. Where no frame has named it yet, one without
        records does. Raises RingFull when there is none."""
        self.choose_next()
        if self.position.next_segment == NO_SEGMENT:
            raise RingFull("no segment of the ring is free")
        links = []
        if self.position.next_segment != self._announced:
            links = [self.append([], [], b"", operation=operation, continues=True)]
        self.position = replace(
            self.position, segment=self.position.next_segment, offset=0, next_segment=NO_SEGMENT
        )
        self._announced = NO_SEGMENT
        self._free = None
        self.choose_next()
        return links

    def choose_next(self) -> None:
        """Name the segment after this one, if that is still open and one is free."""
        if self.position.next_segment != NO_SEGMENT:
            return
        free = np.flatnonzero(self._free_mask())
        if free.size:
            # The next one upwards: a session's frames lie together on the device.
            later = free[free > self.position.segment]
            chosen = int(later[0] if later.size else free[0])
            self.position = replace(self.position, next_segment=chosen)
            self._free = None

    def append(
        self,
        records: list[RecordHeader],
        payload: Sequence[memoryview],
        items: bytes,
        *,
        operation: int,
        continues: bool,
    ) -> PlacedFrame:
        """Place a frame at the head. Its records' payload offsets are made relative to
        the frame; the caller has seen to it that it fits in `room`."""
        head_length = head_size(len(records), len(items))
        frame_length = head_length + sum(map(len, payload))
        assert frame_length <= self.room + BLOCK and frame_length % BLOCK == 0
        for record in records:
            record.payload += head_length
        table = b"".join([*(record.pack() for record in records), items])
        header = FrameHeader(
            uuid=self.uuid,
            epoch=self.epoch,
            sequence=self.position.sequence,
            previous_checksum=self.position.previous_checksum,
            flushed=self.flushed,
            operation=operation,
            address=self.geometry.address(self.position.segment, self.position.offset),
            next_segment=self.position.next_segment,
            flags=FrameFlag.CONTINUES if continues else FrameFlag(0),
            record_count=len(records),
            item_bytes=len(items),
            head_length=head_length,
            frame_length=frame_length,
            table_checksum=checksum(table),
        )
        head = aligned(head_length)
        head[: FrameHeader.SIZE] = header.pack()
        head[FrameHeader.SIZE : FrameHeader.SIZE + len(table)] = table
        self.passed(header)
        return PlacedFrame(header, (head, *payload))

    def passed(self, header: FrameHeader) -> None:
        """The head is now behind this frame: it was placed, or replayed."""
        self._last_sequence[self.geometry.segment(header.address)] = header.sequence
        self.position = self.position_after(header)
        self._announced = header.next_segment

    def position_after(self, header: FrameHeader) -> Position:
        geometry = self.geometry
        segment = geometry.segment(header.address)
        return Position(
            segment=segment,
            offset=header.address - geometry.address(segment) + header.frame_length,
            next_segment=header.next_segment,
            sequence=header.sequence + 1,
            previous_checksum=checksum(header.pack()),
        )

    # -- segments

    def pin(self, address: int) -> None:
        """A read is under way there: its segment is not overwritten meanwhile. Raises
        FormatError for what lies beyond the ring."""
        if not self.geometry.contains(address, BLOCK):
            raise FormatError("an address beyond the ring")
        self._readers[self.geometry.segment(address)] += 1

    def unpin(self, address: int) -> None:
        segment = self.geometry.segment(address)
        self._readers[segment] -= 1
        if not self._readers[segment]:
            del self._readers[segment]
            self._free = None

    def release(self, address: int, stored: int, needed_until: int) -> None:
        """The blocks of an extent or node are dead: only a checkpoint that replays from
        `needed_until` or before may know them."""
        if self.liveness.clear(address, stored):
            self._died[self.geometry.segment(address)] = needed_until

    def emptied(self, segment: int) -> None:
        """It was cleaned: the next checkpoint moves what is left of it, which is nodes."""
        self._emptied.add(segment)

    def checkpointed(self, needed_from: int) -> None:
        """Both superblock slots replay from `needed_from` or later."""
        self.needed_from = needed_from
        self._emptied.clear()
        self._free = None
        self.choose_next()

    @property
    def free_segments(self) -> int:
        """Segments that may be overwritten now, besides the head's and the next one."""
        if self._free is None:
            self._free = int(np.count_nonzero(self._free_mask()))
        return self._free

    def live_bytes(self, segment: int) -> int:
        return int(self.liveness.live_blocks[segment]) * BLOCK

    def victim(self) -> int | None:
        """The segment with the lowest live share, the oldest among equals; None when there
        is none that cleaning can free."""
        live = self.liveness.live_blocks
        candidates = live > 0
        candidates[[self.position.segment, *self.unmovable, *self._emptied]] = False
        if self.position.next_segment != NO_SEGMENT:
            candidates[self.position.next_segment] = False
        numbers = np.flatnonzero(candidates)
        if not numbers.size:
            return None
        emptiest = numbers[live[numbers] == live[numbers].min()]
        return int(emptiest[np.argmin(self._last_sequence[emptiest])])

    def survey(self) -> Survey:
        return Survey(self.liveness.live_blocks.copy(), self._free_mask(), self.victim())

    @property
    def dead_segments(self) -> int:
        """Segments without a live block, whether or not they may be overwritten yet."""
        return int(np.count_nonzero(self._dead_mask()))

    def _dead_mask(self) -> npt.NDArray[np.bool_]:
        dead: npt.NDArray[np.bool_] = self.liveness.live_blocks == 0
        dead[self.position.segment] = False
        if self.position.next_segment != NO_SEGMENT:
            dead[self.position.next_segment] = False
        return dead

    def _free_mask(self) -> npt.NDArray[np.bool_]:
        bound = self.needed_from
        free: npt.NDArray[np.bool_] = self._dead_mask()
        free &= (self._last_sequence < bound) & (self._died < bound)
        free[list(self._readers)] = False
        return free


# -- reading back ----------------------------------------------------------------


def read_header(ring: Ring, device: Device, segment: int, offset: int) -> FrameHeader:
    """The valid header of a frame of this ring at this place. Raises FormatError."""
    geometry = ring.geometry
    if offset + BLOCK > geometry.segment_size:
        raise FormatError("the segment ends")
    address = geometry.address(segment, offset)
    header = FrameHeader.unpack(read_bytes(device, address, BLOCK))
    if header.uuid != ring.uuid or header.address != address:
        raise FormatError("a frame of another ring or place")
    whole = geometry.contains(address, header.frame_length)
    heads = FrameHeader.SIZE + header.record_count * RecordHeader.SIZE + header.item_bytes
    if not whole or not heads <= header.head_length <= header.frame_length:
        raise FormatError("a frame's lengths do not fit")
    if header.frame_length % BLOCK or header.head_length % BLOCK:
        raise FormatError("a frame's lengths are not whole blocks")
    return header


def read_frame(device: Device, header: FrameHeader, *, is_durable: bool = False) -> Frame:
    """The frame with this header, all of its checksums verified. Of one that is known to
    have been flushed the payloads are not: what is damaged there is found when it is read.
    Raises FormatError."""
    if is_durable:
        return Frame(header, *read_table(device, header))
    data = read_bytes(device, header.address, header.frame_length)
    records, items = _table(header, data)
    for record in records:
        end = record.payload + record.stored
        if checksum(data[record.payload : end]) != record.checksum:
            raise FormatError("payload checksum mismatch")
    return Frame(header, records, items)


def read_table(device: Device, header: FrameHeader) -> tuple[list[RecordHeader], list[Item]]:
    """Records and items of a frame, without its payloads. Raises FormatError, OSError."""
    return _table(header, read_bytes(device, header.address, header.head_length))


def _table(header: FrameHeader, data: memoryview) -> tuple[list[RecordHeader], list[Item]]:
    records_end = FrameHeader.SIZE + header.record_count * RecordHeader.SIZE
    table_end = records_end + header.item_bytes
    if checksum(data[FrameHeader.SIZE : table_end]) != header.table_checksum:
        raise FormatError("frame table checksum mismatch")
    records = [
        RecordHeader.unpack_from(data, FrameHeader.SIZE + number * RecordHeader.SIZE)
        for number in range(header.record_count)
    ]
    for record in records:
        end = record.payload + record.stored
        if not header.head_length <= record.payload <= end <= header.frame_length:
            raise FormatError("a record lies outside of its frame")
    return records, unpack_items(bytes(data[records_end:table_end]))

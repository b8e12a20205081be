"""Where frames go, and which segments may be overwritten."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine.buffers import aligned
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    NO_SEGMENT,
    FormatError,
    FrameFlag,
    Position,
    RecordHeader,
    RecordKind,
    checksum,
    round_up,
)
from kvfs.engine.ring import (
    Geometry,
    PlacedFrame,
    Ring,
    RingFull,
    head_size,
    read_frame,
    read_header,
)
from tests.support.devices import RecordingDevice

MIB = 1024 * 1024
SEGMENTS = 12
GEOMETRY = Geometry(MIB, SEGMENTS)
UUID = b"u" * 16


def new_ring() -> Ring:
    return Ring(GEOMETRY, UUID, 1, Position(0, 0, 1, 1, 0))


def record(size: int, extent_id: int = 1) -> RecordHeader:
    return RecordHeader(
        RecordKind.DATA, 0, 1, 1, 1, extent_id, 0, size, size, 0, checksum(bytes(size))
    )


def payload_address(placed: PlacedFrame) -> int:
    return placed.header.address + placed.header.head_length


def append(ring: Ring, size: int, extent_id: int = 1) -> PlacedFrame:
    """A frame with one extent of `size` bytes, in the next segment if need be."""
    while head_size(1, 0) + round_up(size) > ring.room:
        ring.advance(0)
    payload = aligned(round_up(size))
    return ring.append([record(size, extent_id)], [payload], b"", operation=0, continues=False)


# -- reuse -----------------------------------------------------------------------------


@dataclass
class Slot:
    """What a superblock slot needs: extents and checkpoint places by segment, and all
    frames from `replay` on."""

    replay: int = 1
    segments: set[int] = field(default_factory=set)


@dataclass
class Model:
    """Follows the ring and says which segments somebody still needs."""

    ring: Ring = field(default_factory=new_ring)
    live: dict[int, tuple[int, int]] = field(default_factory=dict)  # address, size by extent
    frames: dict[int, int] = field(default_factory=dict)  # the segment of each sequence
    places: list[tuple[int, int]] = field(default_factory=list)
    older: Slot = field(default_factory=Slot)
    newer: Slot = field(default_factory=Slot)
    ids: int = 0

    def write(self, size: int) -> tuple[int, int] | None:
        try:
            placed = append(self.ring, size)
        except RingFull:
            return None
        self.frames[placed.header.sequence] = GEOMETRY.segment(placed.header.address)
        return payload_address(placed), size

    def extent(self, size: int) -> None:
        place = self.write(size)
        if place is not None:
            self.ring.liveness.mark(*place)
            self.ids += 1
            self.live[self.ids] = place

    def note(self, size: int) -> None:
        """A frame with items alone: no block of it is ever live."""
        try:
            while head_size(0, size) > self.ring.room:
                self.ring.advance(0)
        except RingFull:
            return
        placed = self.ring.append([], [], bytes(size), operation=0, continues=False)
        self.frames[placed.header.sequence] = GEOMETRY.segment(placed.header.address)

    def kill(self, pick: int) -> None:
        if self.live:
            extent = sorted(self.live)[pick % len(self.live)]
            self.ring.release(*self.live.pop(extent), self.ring.position.sequence)

    def checkpoint(self, size: int) -> None:
        place = self.write(size)
        if place is None:
            return
        self.ring.liveness.mark(*place)
        used = {GEOMETRY.segment(address) for address, _ in [*self.live.values(), place]}
        self.older, self.newer = self.newer, Slot(self.ring.position.sequence, used)
        for old in self.places:
            self.ring.release(*old, self.newer.replay - 1)
        self.places = [place]
        self.ring.checkpointed(self.older.replay)

    def needed(self) -> set[int]:
        now = {GEOMETRY.segment(address) for address, _ in self.live.values()}
        for slot in (self.older, self.newer):
            now |= slot.segments
            now |= {where for sequence, where in self.frames.items() if sequence >= slot.replay}
        return now

    def check(self) -> None:
        free = {number for number, is_free in enumerate(self.ring._free_mask()) if is_free}
        if self.ring.position.next_segment != NO_SEGMENT:
            free.add(self.ring.position.next_segment)
        assert not free & self.needed(), "a segment that is needed could be overwritten"
        assert self.ring.position.segment not in free
        assert self.ring.free_segments <= self.ring.dead_segments


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["extent", "extent", "note", "kill", "kill", "checkpoint"]),
        st.integers(0, 1000),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_no_segment_that_either_slot_needs_is_ever_free(actions: list[tuple[str, int]]) -> None:
    model = Model()
    for what, number in actions:
        match what:
            case "extent":
                model.extent((number * 977) % 900_000 + 1)
            case "note":
                model.note(number * 1000)
            case "kill":
                model.kill(number)
            case "checkpoint":
                model.checkpoint(number * 40 + 1)
        model.check()


@pytest.mark.parametrize("seed", range(6))
def test_nor_in_a_ring_that_turns_many_times(seed: int) -> None:
    """Most extents live short, a few long; checkpoints are rare, so that each is needed."""
    model, random = Model(), Random(seed)
    for number in range(600):
        model.extent(random.randrange(1, 600_000))
        model.check()
        if number % 3 == 0:
            model.note(random.randrange(1, 1_000_000))
            model.check()
        while len(model.live) > 5 + number % 3:
            model.kill(random.choice([0, 0, 1, 2, 5]))
            model.check()
        if random.random() < 0.15 or model.ring.free_segments == 0:
            model.checkpoint(random.randrange(1, 40_000))
            model.check()
    assert model.ring.position.sequence > 400


def test_what_is_dead_is_free_after_two_checkpoints() -> None:
    """Then both slots have moved on; the places of checkpoints need no third one."""
    model = Model()
    for _ in range(8):
        model.extent(600_000)
    while model.live:
        model.kill(0)
    model.checkpoint(100)
    assert model.ring.free_segments < SEGMENTS - 3
    model.checkpoint(100)
    assert model.ring.free_segments == SEGMENTS - 2, "all but the head's and the next"


def test_a_segment_that_is_being_read_is_not_free() -> None:
    """A read may have been begun before what it reads was removed."""
    ring = new_ring()
    ring.checkpointed(ring.position.sequence)
    before = ring.free_segments
    dead = GEOMETRY.address(GEOMETRY.segment_count - 1, BLOCK)
    for _ in range(2):
        ring.pin(dead)
    ring.checkpointed(ring.position.sequence)
    assert ring.free_segments == before - 1
    ring.unpin(dead)
    ring.checkpointed(ring.position.sequence)
    assert ring.free_segments == before - 1, "another reads it still"
    ring.unpin(dead)
    assert ring.free_segments == before


def test_a_ring_without_a_free_segment_is_full() -> None:
    model = Model()
    while True:
        try:
            append(model.ring, 900_000)
        except RingFull:
            break
        model.ring.liveness.mark(
            GEOMETRY.address(model.ring.position.segment, 2 * BLOCK), 50 * BLOCK
        )
    assert model.ring.free_segments == 0
    assert model.ring.position.sequence > SEGMENTS


# -- placing ---------------------------------------------------------------------------


def test_frames_follow_each_other_and_name_the_next_segment() -> None:
    ring = new_ring()
    first, second = append(ring, 5000), append(ring, 5000)
    assert second.header.address == first.header.address + first.header.frame_length
    assert second.header.sequence == first.header.sequence + 1
    assert second.header.previous_checksum == checksum(first.header.pack())
    assert second.header.next_segment == 1
    assert payload_address(first) == DATA_START + first.header.head_length


def test_the_last_block_of_a_segment_is_kept_for_a_link() -> None:
    ring = new_ring()
    while ring.room >= 2 * BLOCK:
        append(ring, 1)
    assert MIB - ring.position.offset in (BLOCK, 2 * BLOCK)
    # As if the next segment had become known only now.
    ring._announced = NO_SEGMENT
    (link,) = ring.advance(7)
    assert link.header.flags & FrameFlag.CONTINUES
    assert link.header.next_segment == 1
    assert link.header.record_count == 0
    assert GEOMETRY.contains(link.header.address, link.header.frame_length)
    assert (ring.position.segment, ring.position.offset) == (1, 0)


def test_no_link_is_written_where_a_frame_has_named_the_next_segment() -> None:
    ring = new_ring()
    append(ring, 1)
    assert ring.advance(0) == []


def test_a_frame_is_read_back_with_its_records_and_items() -> None:
    ring, device = new_ring(), RecordingDevice.of_size(DATA_START + SEGMENTS * MIB)
    items = [(b"k" * 18, b"value"), (b"l" * 18, None)]
    packed = b"".join(
        key + (0xFFFFFFFF if value is None else len(value)).to_bytes(4, "little") + (value or b"")
        for key, value in items
    )
    payloads = [aligned(2 * BLOCK), aligned(BLOCK)]
    records = [record(5000, 1), record(3000, 2)]
    records[1].payload = 2 * BLOCK
    placed = ring.append(records, payloads, packed, operation=9, continues=True)
    device.write(placed.header.address, placed.buffers)
    header = read_header(ring, device, 0, 0)
    assert header == placed.header
    frame = read_frame(device, header)
    assert frame.items == items
    assert frame.records == records
    assert (header.operation, header.flags) == (9, FrameFlag.CONTINUES)
    for offset in (BLOCK, MIB - BLOCK, MIB):
        with pytest.raises(FormatError):
            read_header(ring, device, 0, offset)


@given(st.integers(0, 20 * MIB), st.integers(0, 2 * MIB))
def test_a_range_lies_within_one_segment_or_does_not(address: int, length: int) -> None:
    inside = GEOMETRY.contains(address, length)
    start, end = address - DATA_START, address - DATA_START + length
    expected = (
        address % BLOCK == 0
        and 0 <= start < SEGMENTS * MIB
        and (length == 0 or start // MIB == (end - 1) // MIB)
    )
    assert inside == expected

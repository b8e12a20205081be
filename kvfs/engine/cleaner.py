"""Cleaning: what is live in a segment is carried forward, so that it becomes free.

Data is appended anew and its place in the extent table changed; of nodes and parts of
the bitmap only the keys are noted, and the next checkpoint writes them elsewhere. What
fails its checksum is carried as it is: it stays unreadable, and is never made good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from kvfs.engine import metadata
from kvfs.engine.appender import Appender
from kvfs.engine.checkpoints import Checkpoints
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import (
    BLOCK,
    Extent,
    FormatError,
    FrameHeader,
    Item,
    Pointer,
    RecordHeader,
    RecordKind,
    TreeNode,
    inode_key,
    round_up,
    summary_key,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Executor, Step, Urgency, wait, wait_all
from kvfs.engine.journal import apply_unit, extent_of
from kvfs.engine.metadata import pointer_to
from kvfs.engine.nodecache import UnreadableNode
from kvfs.engine.ring import Ring, read_header, read_table
from kvfs.engine.space import Purpose, Space
from kvfs.engine.writeback import Payload

log = logging.getLogger(__name__)
T = TypeVar("T")

_GROUP_SIZE = 8 * 1024 * 1024
_WORTH_CLEANING = 97  # percent of a segment: one with more that is live is left alone


class Unreadable(Exception):
    """What is live in a segment cannot be read; the message says why."""


@dataclass(eq=False)
class Cleaner:
    """Works while nothing else is under way. `promised` gives the bytes that the ring owes to
    what is not in it, `on_moved` is told where an extent is from now on."""

    appender: Appender
    index: Index
    space: Space
    checkpoints: Checkpoints
    promised: Callable[[], int]
    on_moved: Callable[[Extent], None]

    def clean(self) -> Step[None]:
        """The segments that are cheapest to empty, as far as there is room for it."""
        ring, space = self.appender.ring, self.space
        most = space.usable_segment * _WORTH_CLEANING // 100
        budget = max(most, space.left(self.promised(), Purpose.CLEAN) // 2)
        while (victim := ring.victim()) is not None:
            live = ring.live_bytes(victim)
            budget -= live
            possible = space.left(self.promised(), Purpose.CLEAN) >= live
            if live > most or budget < 0 or not possible:
                break
            yield from self._clean_segment(victim)

    def _clean_segment(self, segment: int) -> Step[None]:
        try:
            yield from self._empty(segment)
        except Unreadable as fault:
            # It stays as it is; everything else can still be written and cleaned.
            log.error("segment %d cannot be cleaned: %s", segment, fault)
            self.appender.ring.unmovable.add(segment)

    def _empty(self, segment: int) -> Step[None]:
        """Raises Unreadable."""
        device, ring = self.appender.device, self.appender.ring
        found = yield from self._read(partial(survey, device, ring, segment))
        if found.taken != ring.live_bytes(segment):
            raise Unreadable("its frames cannot be read")
        taken = sum(round_up(node.stored) for node in found.nodes)
        keys = yield from self._read(partial(first_keys, device, found.nodes))
        self.index.move(keys, taken)
        for pointer in found.others:
            self.checkpoints.rewrite_part(pointer)
        for group in groups(found.data):
            yield from self._carry(group)
        ring.emptied(segment)
        self.appender.counters.cleaned_segments += 1

    def _carry(self, group: list[LiveRecord]) -> Step[None]:
        appender = self.appender
        read = partial(carry, appender.device, appender.executor, self.index, group)
        carried = yield from self._read_step(read)
        appended = appender.append(carried.payloads, self.index.vault.sealed(carried.items))
        yield from wait_all(appended.writes)
        appender.check()
        extents = [
            extent_of(frame.header, record)
            for frame, records in appended.frames
            for record in records
        ]
        apply_unit(self.index, appender.ring, extents, [], carried.old)
        for extent in extents:
            self.on_moved(extent)
        appender.committed_sequence = appended.frames[-1][0].header.sequence
        appender.counters.carried += sum(payload.size for payload in carried.payloads)
        yield from appender.keep_little()

    def _read(self, work: Callable[[], T]) -> Step[T]:
        return self._read_step(lambda: wait(self.appender.submit(work)))

    def _read_step(self, make: Callable[[], Step[T]]) -> Step[T]:
        """Raises Unreadable."""
        try:
            return (yield from self.appender.failover.read(make))
        except (OSError, FormatError) as fault:
            raise Unreadable(str(fault)) from fault


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """A live record of a segment, and where its payload lies."""

    header: FrameHeader
    record: RecordHeader

    @property
    def address(self) -> int:
        return self.header.address + self.record.payload

    @property
    def taken(self) -> int:
        return round_up(self.record.stored)


@dataclass(slots=True)
class Survey:
    """What is live in a segment."""

    data: list[LiveRecord] = field(default_factory=list)
    nodes: list[Pointer] = field(default_factory=list)
    others: list[Pointer] = field(default_factory=list)

    @property
    def taken(self) -> int:
        """Bytes of it, in whole blocks."""
        pointers = (*self.nodes, *self.others)
        return sum(live.taken for live in self.data) + sum(round_up(p.stored) for p in pointers)


@dataclass(frozen=True, slots=True)
class Carried:
    """A group of extents to be appended: as they lay, their payloads, and summaries of
    the inodes that they belong to."""

    old: list[Extent]
    payloads: list[Payload]
    items: list[Item]


def survey(device: Device, ring: Ring, segment: int) -> Survey:
    """Runs in a thread, while nothing is committed. Raises OSError."""
    found = Survey()
    for header in _headers(device, ring, segment):
        try:
            records, _ = read_table(device, header)
        except FormatError:
            return found
        for record in records:
            live = LiveRecord(header, record)
            if not ring.liveness.is_live(live.address):
                continue
            if record.kind == RecordKind.DATA:
                found.data.append(live)
            elif record.kind == RecordKind.NODE:
                found.nodes.append(pointer_to(header, record))
            else:
                found.others.append(pointer_to(header, record))
    return found


def _headers(device: Device, ring: Ring, segment: int) -> Iterator[FrameHeader]:
    """The frames of a segment's last use: of rising sequence, one behind the other."""
    offset, sequence = 0, None
    while offset + BLOCK <= ring.geometry.segment_size:
        try:
            header = read_header(ring, device, segment, offset)
        except FormatError:
            return
        if sequence is not None and header.sequence != sequence + 1:
            return
        yield header
        sequence = header.sequence
        offset += header.frame_length


def first_keys(device: Device, nodes: list[Pointer]) -> list[bytes]:
    """The lowest key of each node: what leads to it. Runs in a thread. Raises OSError,
    FormatError."""
    return [TreeNode(metadata.read(device, pointer)).key(0) for pointer in nodes]


def groups(data: list[LiveRecord]) -> Iterator[list[LiveRecord]]:
    """Parts that are carried forward at once, each sorted so that a file lies together."""
    group: list[LiveRecord] = []
    size = 0
    for live in data:
        if group and size + live.taken > _GROUP_SIZE:
            yield sorted(group, key=_place_in_files)
            group, size = [], 0
        group.append(live)
        size += live.taken
    if group:
        yield sorted(group, key=_place_in_files)


def _place_in_files(live: LiveRecord) -> tuple[int, int, int]:
    return live.record.session_id, live.record.object_id, live.record.offset


def carry(
    device: Device, executor: Executor, index: Index, group: list[LiveRecord]
) -> Step[Carried]:
    """Read a group. Raises OSError when the device does not give it."""
    payloads = yield from wait(executor.submit(partial(_read, device, group), Urgency.WRITE_BACK))
    items: list[Item] = []
    for ino in sorted({live.record.object_id for live in group}):
        with suppress(UnreadableNode):  # what is there of it may as well lie elsewhere
            value = yield from index.committed(inode_key(ino))
            if value is not None:
                items.append((summary_key(ino), value))
    old = [extent_of(live.header, live.record) for live in group]
    return Carried(old, payloads, items)


def _read(device: Device, group: list[LiveRecord]) -> list[Payload]:
    """Runs in a thread: neighbours in one read."""
    by_address = sorted(group, key=lambda live: live.address)
    bytes_of: dict[int, memoryview] = {}
    while by_address:
        run = [by_address.pop(0)]
        while by_address and by_address[0].address == run[-1].address + run[-1].taken:
            run.append(by_address.pop(0))
        start = run[0].address
        buffer = read_bytes(device, start, run[-1].address + run[-1].taken - start)
        for live in run:
            at = live.address - start
            bytes_of[live.address] = buffer[at : at + live.taken]
    return [Payload(replace(live.record, payload=0), [bytes_of[live.address]]) for live in group]

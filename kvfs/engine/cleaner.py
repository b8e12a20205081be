"""Cleaning: what is live in a segment is carried forward, so that it becomes free.

Data is appended anew and its place in the extent table changed; of nodes and parts of
the bitmap only the keys are noted, and the next checkpoint writes them elsewhere. What
fails its checksum is carried as it is: it stays unreadable, and is never made good.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvfs.engine import metadata
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
from kvfs.engine.io import Executor, Step, Urgency, wait
from kvfs.engine.journal import extent_of
from kvfs.engine.metadata import pointer_to
from kvfs.engine.nodecache import UnreadableNode
from kvfs.engine.ring import Ring, read_header, read_table
from kvfs.engine.writeback import Payload

log = logging.getLogger(__name__)

_GROUP_SIZE = 8 * 1024 * 1024


class Unreadable(Exception):
    """What is live in a segment cannot be read; the message says why."""


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

"""Frames as a check reads them: the log behind a checkpoint, and all that the ring holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvfs.engine import journal
from kvfs.engine.check.findings import Finding
from kvfs.engine.device import Device
from kvfs.engine.format import (
    BLOCK,
    NO_SEGMENT,
    FormatError,
    FrameFlag,
    FrameHeader,
    Position,
    Superblock,
    SuperblockFlag,
    checksum,
)
from kvfs.engine.ring import Frame, Geometry, Ring, read_table


@dataclass(slots=True)
class Log:
    """The frames behind a checkpoint that count, in order. `operation` is the last that
    they complete; `is_damaged` when some that had been flushed are not whole;
    `last_sequence` is the highest of any frame that was seen."""

    end: Position
    operation: int
    last_sequence: int
    frames: list[Frame] = field(default_factory=list)
    is_damaged: bool = False
    findings: list[Finding] = field(default_factory=list)

    def take(self, frame: Frame, ring: Ring) -> None:
        self.frames.append(frame)
        self.end = ring.position_after(frame.header)
        self.last_sequence = max(self.last_sequence, frame.header.sequence)
        if not frame.header.flags & FrameFlag.CONTINUES:
            self.operation = frame.header.operation


def new_ring(superblock: Superblock) -> Ring:
    """A ring as it is before anything was read: its head is where replay begins."""
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    return Ring(geometry, superblock.uuid, superblock.epoch, superblock.replay)


def read_log(device: Device, superblock: Superblock, durable: int) -> Log:
    """All that replay would apply; and where that ends at a frame that had been flushed,
    what is whole of the frames that had been flushed behind it. Those before the sequence
    `durable` had been flushed in any case. Raises OSError."""
    ring = new_ring(superblock)
    log = Log(superblock.replay, superblock.operation, superblock.replay.sequence - 1)
    reached = _read_units(device, ring, superblock, log, durable)
    if superblock.flags & SuperblockFlag.CLEAN:
        return log
    damage = journal.damage_behind(device, ring, superblock, reached)
    if damage is not None:
        log.is_damaged = True
        log.findings.append(Finding("log", damage))
        ring.position = _read_beyond(device, ring, superblock, log, reached.sequence)
        _read_units(device, ring, superblock, log, durable)
    return log


def _read_units(
    device: Device, ring: Ring, superblock: Superblock, log: Log, durable: int
) -> Position:
    """The whole commit units from the ring's position on. Returns where the last whole frame
    ends, which may be one of a unit that is not whole."""
    unit: list[Frame] = []
    reached = ring.position
    for frame in journal.frames_behind(device, ring, superblock, durable):
        unit.append(frame)
        reached = ring.position_after(frame.header)
        if not frame.header.flags & FrameFlag.CONTINUES:
            for whole in unit:
                log.take(whole, ring)
            unit = []
    return reached


def _read_beyond(
    device: Device, ring: Ring, superblock: Superblock, log: Log, bad: int
) -> Position:
    """What had been flushed had happened: each frame counts as far as it is whole. `bad` is
    the first that is not. Returns where the log goes on behind what had been flushed."""
    start = log.end.sequence
    # A frame takes a block at least: one that claims to come later than so many is none.
    limit = start + ring.geometry.segment_count * ring.geometry.segment_size // BLOCK
    newest: dict[int, FrameHeader] = {}
    for header in all_headers(device, ring):
        is_behind = start <= header.sequence < limit and header.flushed < header.sequence
        if is_behind and not journal.is_stale(header, superblock):
            newest[header.sequence] = header
    if not newest:
        return log.end  # what said so lies where no frame can be
    log.last_sequence = max(newest)
    flushed = max(header.flushed for header in newest.values())
    for sequence in range(start, flushed + 1):
        frame = None if sequence not in newest else what_is_whole(device, newest[sequence])
        if frame is not None:
            log.take(frame, ring)
        elif sequence != bad:
            log.findings.append(Finding("log", f"frame {sequence} had been flushed and is lost"))
    following = newest.get(flushed + 1)
    return log.end if following is None else _position_of(following, ring.geometry)


def _position_of(header: FrameHeader, geometry: Geometry) -> Position:
    segment = geometry.segment(header.address)
    offset = header.address - geometry.address(segment)
    return Position(segment, offset, NO_SEGMENT, header.sequence, header.previous_checksum)


def what_is_whole(device: Device, header: FrameHeader) -> Frame | None:
    """A frame whose payloads may be bad: each has a checksum of its own."""
    try:
        records, items = read_table(device, header)
    except (FormatError, OSError):
        return None
    return Frame(header, records, items)


# -- all frames --------------------------------------------------------------------


def all_frames(device: Device, superblock: Superblock) -> list[Frame]:
    """Those whose tables can be read. Raises OSError."""
    frames = (what_is_whole(device, header) for header in all_headers(device, new_ring(superblock)))
    return [frame for frame in frames if frame is not None]


def all_headers(device: Device, ring: Ring) -> list[FrameHeader]:
    """Of all frames of this ring that can be found, by sequence; also of those that are
    only left behind. Raises OSError."""
    found = [
        header
        for segment in range(ring.geometry.segment_count)
        for header in _headers_of(device, ring, segment)
    ]
    return sorted(found, key=lambda header: (header.sequence, header.epoch))


def _headers_of(device: Device, ring: Ring, segment: int) -> Iterator[FrameHeader]:
    """Frame by frame, and block by block where there is none."""
    offset, size = 0, ring.geometry.segment_size
    while offset + BLOCK <= size:
        header = journal.header_at(device, ring, segment, offset)
        if header is not None:
            yield header
            offset += header.frame_length
            continue
        starts = journal.frame_starts(device, ring.geometry, segment, offset + BLOCK)
        offset = next(starts, size)


def unbroken(frames: list[Frame], superblock: Superblock) -> list[Frame]:
    """The frames right before the checkpoint's end, each known by the one behind it: the
    newest first."""
    found: list[Frame] = []
    by_sequence: dict[int, list[Frame]] = defaultdict(list)
    for frame in frames:
        by_sequence[frame.header.sequence].append(frame)
    sequence, wanted = superblock.replay.sequence - 1, superblock.replay.previous_checksum
    while True:
        same = [f for f in by_sequence[sequence] if checksum(f.header.pack()) == wanted]
        if not same:
            return found
        found.append(same[0])
        sequence, wanted = sequence - 1, same[0].header.previous_checksum

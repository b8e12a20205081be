"""The bytes of all extents that files use, read and compared with their checksums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvfs.engine.check.findings import Finding
from kvfs.engine.check.tables import Tables
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import Extent, Slice, checksum, round_up

_READ_MAX = 4 * 1024 * 1024

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """`size` bytes were read."""

    size: int
    findings: list[Finding]


def check_data(device: Device, tables: Tables, progress: Progress) -> Checked:
    """`progress` is told the bytes that are done, of how many."""
    extents = sorted(tables.extents.values(), key=lambda extent: extent.address)
    total = sum(round_up(extent.stored) for extent in extents)
    bad: list[Extent] = []
    done = 0
    for group in _neighbours(extents):
        progress(done, total)
        bad += _bad_of(device, group)
        done += sum(round_up(extent.stored) for extent in group)
    progress(total, total)
    return Checked(total, list(_findings(tables, bad)))


def is_whole(device: Device, extent: Extent) -> bool:
    return not _bad_of(device, [extent])


def _bad_of(device: Device, group: list[Extent]) -> list[Extent]:
    """Which of neighbouring extents are not as they were written."""
    start = group[0].address
    try:
        buffer = read_bytes(device, start, group[-1].blocks_end - start)
    except OSError:
        # One sector that cannot be read does not tell of the others.
        return group if len(group) == 1 else [e for one in group for e in _bad_of(device, [one])]
    bad = []
    for extent in group:
        at = extent.address - start
        if checksum(buffer[at : at + extent.stored]) != extent.checksum:
            bad.append(extent)
    return bad


def _neighbours(extents: list[Extent]) -> Iterator[list[Extent]]:
    """Groups that lie one behind the other and are read at once."""
    group: list[Extent] = []
    for extent in extents:
        is_next = group and extent.address == group[-1].blocks_end
        if group and not (is_next and extent.blocks_end - group[0].address <= _READ_MAX):
            yield group
            group = []
        group.append(extent)
    if group:
        yield group


def _findings(tables: Tables, bad: list[Extent]) -> Iterator[Finding]:
    """One for each part of a file that cannot be read."""
    if not bad:
        return
    users: dict[int, list[tuple[int, Slice]]] = defaultdict(list)
    for ino, slices in tables.slices.items():
        for part in slices:
            users[part.extent_id].append((ino, part))
    for extent in bad:
        for ino, part in users[extent.extent_id]:
            message = f"bytes {part.offset} to {part.end} are lost: they fail their checksum"
            yield Finding("data", message, ino, extent.address, is_lost=True)

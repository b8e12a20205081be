"""One number for the bytes of a session, the same on every ring, and which of its blocks another
session has too.

The number is a sum over blocks of a hash of path, place and bytes; a block of zeros counts as
nothing, so that holes may be there or not. As a sum it follows from that of another session by
what differs, and nobody has to read what they share. It tells sessions apart by accident, not
against an attacker.

Reading all of a session for it takes long. So it is kept in an attribute, with a number for the
*place* of the bytes: which extents they lie in. Extents never change and their ids are never used
twice; while the place is the same, so are the bytes.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from mount_tools.moving.entries import KNOWN_CONTENT, Entry, Kind
from mount_tools.paths import opened

BLOCK = 128 * 1024
_ZEROS = bytes(BLOCK)
_PLACE = struct.Struct("<Q16s")
_NUMBERS = 1 << 128
_KNOWN = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{32})")
_OF_ZEROS = xxhash.xxh3_128_digest(_ZEROS)


class Content(int):
    """Of a session, or a difference of two."""

    def __add__(self, other: int) -> Content:
        return Content((int(self) + int(other)) % _NUMBERS)

    def __sub__(self, other: int) -> Content:
        return Content((int(self) - int(other)) % _NUMBERS)


def of_file(path: bytes, size: int) -> Content:
    """What a file counts besides its bytes: that it is there, and how long it is."""
    return Content(xxhash.xxh3_128_intdigest(b"file" + size.to_bytes(8, "little") + path))


def of_bytes(path: bytes, offset: int, data: memoryview) -> Content:
    """What bytes of a file count. `offset` is of a block; behind them are zeros up to the end of
    their last block."""
    total = Content(0)
    for start in range(0, len(data), BLOCK):
        total += _of_block(path, (offset + start) // BLOCK, data[start : start + BLOCK])
    return total


def _of_block(path: bytes, number: int, data: memoryview) -> int:
    hashed = xxhash.xxh3_128(data)
    if len(data) < BLOCK:
        hashed.update(_ZEROS[len(data) :])
    digest = hashed.digest()
    if digest == _OF_ZEROS:
        return 0
    return xxhash.xxh3_128_intdigest(_PLACE.pack(number, digest) + path)


def filled(data: memoryview) -> Iterator[tuple[int, int]]:
    """The runs [start, end) of blocks that are not all zeros."""
    begun = None
    for start in range(0, len(data), BLOCK):
        if _of_block(b"", 0, data[start : start + BLOCK]):
            begun = start if begun is None else begun
        elif begun is not None:
            yield begun, start
            begun = None
    if begun is not None:
        yield begun, len(data)


# -- where the bytes are


class Slice(NamedTuple):
    """Bytes [offset, offset + length) of a file are those of an extent from `skew` on."""

    offset: int
    length: int
    extent: int
    skew: int


def slices(fd: int) -> list[Slice]:
    """Of a file that nothing is written to and that was synced: where there is none is a hole."""
    found: list[Slice] = []
    start: int | None = 0
    while start is not None:
        listed = json.loads(os.getxattr(fd, f"user.kvfs.extents.{start}"))
        start = None
        for one in listed:
            if "truncated" in one:
                start = one["next"]
            else:
                found.append(Slice(one["offset"], one["length"], one["extent"], one["skew"]))
    return found


def changed_blocks(mine: Iterable[Slice], theirs: Iterable[Slice]) -> list[int]:
    """The numbers of the blocks of a file that are not of the same parts of extents in both."""
    ours, others = _by_block(mine), _by_block(theirs)
    return sorted(n for n in ours.keys() | others.keys() if ours.get(n) != others.get(n))


def _by_block(parts: Iterable[Slice]) -> dict[int, list[Slice]]:
    blocks: dict[int, list[Slice]] = {}
    for part in parts:
        end = part.offset + part.length
        for number in range(part.offset // BLOCK, -(-end // BLOCK)):
            start = max(part.offset, number * BLOCK)
            length = min(end, (number + 1) * BLOCK) - start
            piece = Slice(start, length, part.extent, part.skew + start - part.offset)
            blocks.setdefault(number, []).append(piece)
    return blocks


def runs(blocks: Iterable[int], size: int) -> list[tuple[int, int]]:
    """Blocks, in order, as the runs [start, end) of bytes of a file of that size."""
    found: list[tuple[int, int]] = []
    for number in blocks:
        start, end = number * BLOCK, min((number + 1) * BLOCK, size)
        if start >= end:
            break
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


# -- what is known


@dataclass(frozen=True, slots=True)
class Laid:
    """A session that nothing is written to: its entries by path, and where the bytes of its
    files are."""

    path: Path
    entries: Mapping[bytes, Entry]
    slices: Mapping[bytes, list[Slice]]

    @property
    def place(self) -> int:
        """A number for where all bytes are."""
        hashed = xxhash.xxh3_128()
        for path, parts in sorted(self.slices.items()):
            head = f"{len(path)} {self.entries[path].size} {len(parts)} ".encode()
            hashed.update(head + path + repr([tuple(part) for part in parts]).encode())
        return hashed.intdigest()

    @property
    def files(self) -> list[Entry]:
        """Files, each under one of its names."""
        return [entry for entry in self.entries.values() if entry.kind is Kind.FILE]

    @property
    def known_content(self) -> Content | None:
        """As it was noted, if the bytes are where they were then."""
        try:
            noted = os.getxattr(self.path, KNOWN_CONTENT)
        except OSError:
            return None
        match = _KNOWN.fullmatch(noted)
        if match is None or int(match[2], 16) != self.place:
            return None
        return Content(int(match[1], 16))


def note_content(session: Path, content: Content, place: int) -> None:
    """Where it may be: it saves time, no more."""
    with suppress(OSError), opened(session) as fd:
        os.setxattr(fd, KNOWN_CONTENT, f"{content:032x} {place:032x}".encode())

"""What holds operations and file data in memory: the protocol.

The engine answers an operation once it is in the buffer, so a buffer outlives the
process. Once the ring has them too, operations go and data may stay, to be read from
here. kvfs.tiers has the buffer in tmpfs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.engine.format import Extent


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes [start, end) of a region of memory, as they were written, and their checksum;
    None for a part of what was written at once."""

    region: memoryview
    start: int
    end: int
    digest: int | None

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def data(self) -> memoryview:
        return self.region[self.start : self.end]

    def part(self, start: int, end: int) -> Kept:
        """The bytes [start, end) of it."""
        if start == 0 and end == len(self):
            return self
        return Kept(self.region, self.start + start, self.start + end, None)

    def joined(self, following: Kept) -> Kept | None:
        """Both as one, where they lie one behind the other."""
        if self.region is not following.region or self.end != following.start:
            return None
        return Kept(self.region, self.start, following.end, None)


def cut(pieces: Sequence[Kept], start: int, length: int) -> list[Kept]:
    """The bytes [start, start + length) of pieces that follow each other."""
    found = []
    for piece in pieces:
        if start >= len(piece):
            start -= len(piece)
            continue
        part = piece.part(start, min(start + length, len(piece)))
        found.append(part)
        length -= len(part)
        start = 0
        if length == 0:
            break
    return found


NOTHING = Kept(memoryview(b""), 0, 0, None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where data belongs: bytes of a file from `offset` on. `unit` is the session that the
    file is in, 0 for one of a pool."""

    unit: int
    ino: int
    offset: int


@dataclass(frozen=True, slots=True)
class BufferedOperation:
    """One operation as it was kept."""

    sequence: int
    operation: bytes
    kept: Kept


@dataclass(frozen=True, slots=True)
class InRing:
    """An extent that came into the ring, its place in a file, and its bytes in memory.
    `row_size` is what a token takes in the file, in bytes."""

    extent: Extent
    ino: int
    offset: int
    pieces: list[Kept]
    row_size: int


class Buffer(Protocol):
    @property
    def home(self) -> bytes:
        """Where it lies, in at most OPLOG_HOME_MAX bytes, for the next mount to read."""

    def left_at(self, home: bytes) -> str | None:
        """A name for the place, if something was left at another home and is still there."""

    def open(self, uuid: bytes, token: bytes, sequence: int) -> Iterator[BufferedOperation]:
        """The operations after `sequence` that an earlier process left under this token;
        those of another token, or up to `sequence`, are dropped. Called once, first."""

    def begin(self, token: bytes) -> None:
        """New operations are kept under this token, and behind what `open` returned."""

    def append(
        self,
        sequence: int,
        operation: bytes,
        data: bytes | bytearray | memoryview = b"",
        place: Place | None = None,
    ) -> Kept:
        """Keep an operation; returns the kept data, which is that of a file if it has a place.
        Raises OSError (ENOSPC) when there is no room, with nothing kept."""

    def release(self, sequence: int) -> None:
        """Operations up to `sequence` are in the ring: their memory is free."""

    def in_ring(self, extents: Iterable[InRing]) -> None:
        """Told before the release of the operations that made them: what stays is clean."""

    def find(self, extent: Extent, *, is_use: bool) -> Sequence[Kept] | None:
        """The decoded bytes of an extent in the ring, in pieces, if they are here; whether
        somebody reads them, or only wants to know."""

    def forget(self, extents: Iterable[Extent]) -> None:
        """Nobody will ask for these again."""

    def close(self, *, keep: bool) -> None:
        """Let go; unless `keep`, everything is in the ring and nothing of this process is left
        behind."""

    def has_room(self, size: int) -> bool:
        """Whether `append` can surely take an operation and data of `size` bytes."""

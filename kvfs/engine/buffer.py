"""What holds operations and dirty bytes until they are in the ring: the protocol.

The engine answers an operation once it is in the buffer, so a buffer outlives the
process. kvfs.tiers has the one in tmpfs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of a write as they lie in the buffer, valid until they are released.
    `digest` is their checksum; None for a part of what was written at once."""

    data: memoryview
    digest: int | None

    def part(self, start: int, end: int) -> Kept:
        if start == 0 and end == len(self.data):
            return self
        return Kept(self.data[start:end], None)


@dataclass(frozen=True, slots=True)
class BufferedOperation:
    """One operation as it was kept."""

    sequence: int
    operation: bytes
    kept: Kept


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
        self, sequence: int, operation: bytes, data: bytes | bytearray | memoryview = b""
    ) -> Kept:
        """Keep an operation; returns the kept data. Raises OSError (ENOSPC) when there
        is no room, with nothing kept."""

    def release(self, sequence: int) -> None:
        """Operations up to `sequence` are in the ring: their memory is free."""

    def close(self, *, keep: bool) -> None:
        """Let go; unless `keep`, everything is in the ring and nothing is left behind."""

    def has_room(self, size: int) -> bool:
        """Whether `append` can surely take an operation and data of `size` bytes."""

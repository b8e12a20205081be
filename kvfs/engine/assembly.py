"""The parts of a read as one run of memory, without a copy where they already are one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from kvfs.engine.buffer import cut
from kvfs.engine.buffers import BufferPool
from kvfs.engine.files import Hole, Part, Stored
from kvfs.engine.format import round_up
from kvfs.engine.reader import ExtentReader


@dataclass(frozen=True, slots=True)
class _Located:
    """Bytes [start, end) of a buffer."""

    buffer: memoryview
    start: int
    end: int

    @property
    def view(self) -> memoryview:
        return self.buffer[self.start : self.end]


class Assembler:
    """Joins parts whose extents the reader holds. One buffer serves all joins: a result
    is valid until the next."""

    def __init__(self, reader: ExtentReader) -> None:
        self._reader = reader
        self._joined = self._zeros = memoryview(b"")

    def join(self, parts: list[Part]) -> memoryview:
        """Raises EIO for an extent that fails its checksum."""
        runs = _adjacent(chain.from_iterable(map(self._locate, parts)))
        if not runs:
            return memoryview(b"")
        if len(runs) == 1:
            return runs[0].view
        length = sum(run.end - run.start for run in runs)
        if length > len(self._joined):
            self._joined = BufferPool(round_up(length), 0).take()
        at = 0
        for run in runs:
            end = at + run.end - run.start
            self._joined[at:end] = run.view
            at = end
        return self._joined[:length]

    def _locate(self, part: Part) -> list[_Located]:
        if isinstance(part, Stored):
            found = self._reader.find(part.extent)
            assert found is not None
            pieces = cut(found, part.skew, part.length)
            return [_Located(piece.region, piece.start, piece.end) for piece in pieces]
        if isinstance(part, Hole):
            if part.length > len(self._zeros):
                self._zeros = BufferPool(round_up(part.length), 0).take()
            return [_Located(self._zeros, 0, part.length)]
        return [_Located(part.region, part.start, part.end)]


def _adjacent(parts: Iterable[_Located]) -> list[_Located]:
    """Parts that follow each other in one buffer are joined."""
    joined: list[_Located] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.buffer is part.buffer and last.end == part.start:
            joined[-1] = _Located(last.buffer, last.start, part.end)
        else:
            joined.append(part)
    return joined

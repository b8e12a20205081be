"""Where a layer's bytes come from: mapped warm segments, else reads past the page cache."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvfs.torch.files import LayerFile, after, named
from kvfs.torch.layout import RowLayout
from kvfs.torch.slab import Rows
from kvfs.torch.staging import whole_pages
from kvfs.torch.transfer import Mover

MAP_ATTRIBUTE = "user.kvfs.map"
# Not offered, not for us, or gone in between: the mount has the same bytes.
_NO_OFFER = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Segment:
    """A mapped part of a layer file: `memory` holds the file's bytes from `at` on."""

    at: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.at + len(self.memory)


@dataclass
class Moved:
    """Bytes by the way they came."""

    mapped: int = 0
    mount: int = 0


class LayerSource:
    """Rows of one layer file, while it is open; `mapped` says by which way they come.

    An open file is a lease: what the daemon shows of its warm memory does not move
    under us.
    """

    def __init__(
        self, file: LayerFile, layout: RowLayout, mover: Mover, segments: list[Segment]
    ) -> None:
        self.moved = Moved()
        self._file = file
        self._layout = layout
        self._mover = mover
        self._segments = segments
        self._fd = -1

    def lease(self) -> None:
        """Open the file, and map what the daemon offers of it."""
        self._segments = _map_or_nothing(self._descriptor())

    def close(self) -> None:
        """Give the lease up."""
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def mapped(self) -> bool:
        """Whether warm memory of the daemon is mapped."""
        return bool(self._segments)

    def rows(self, first: int, last: int) -> Iterator[memoryview]:
        """Tokens first..last-1 in pieces of whole rows, each valid until the next is asked for.

        In memory that the mover moves from.

        Raises:
            OSError: EIO if the file ends before, or what the kernel reports.
        """
        width = self._layout.row_bytes
        if covers(self._segments, first * width, last * width):
            for piece in mapped_rows(self._segments, first * width, last * width, width):
                self.moved.mapped += len(piece)
                yield from self._mover.staged(piece, self._layout)
        else:
            for piece in self._read_rows(first, last):
                self.moved.mount += len(piece)
                yield piece

    def fill(self, slabs: Sequence[Rows], tokens: int, first: int, last: int) -> None:
        """Tokens first..last-1 to slabs of `tokens` each; in place where a request may be so.

        Raises:
            OSError: as `rows`.
        """
        width = self._layout.row_bytes
        begin, end = first * width, last * width
        memory = None if covers(self._segments, begin, end) else _pages(slabs, tokens * width)
        if memory is None or begin % mmap.PAGESIZE:
            self._spread(slabs, tokens, self.rows(first, last))
            return
        memory[-1] = memory[-1][: whole_pages(end - begin - (len(slabs) - 1) * tokens * width)]
        with named(self._file.path):
            _read_exactly(self._descriptor(), memory, begin, end - begin)
        self.moved.mount += end - begin

    def _spread(self, slabs: Sequence[Rows], tokens: int, pieces: Iterator[memoryview]) -> None:
        width, at = self._layout.row_bytes, 0
        for piece in pieces:
            rows = np.frombuffer(piece, np.uint8)
            begin, end = at, at + len(rows) // width
            while at < end:
                number, offset = divmod(at, tokens)
                upto = min(end, (number + 1) * tokens)
                slabs[number].put_rows(offset, rows[(at - begin) * width : (upto - begin) * width])
                at = upto

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = self._file.open_direct()
        return self._fd

    def _read_rows(self, first: int, last: int) -> Iterator[memoryview]:
        width = self._layout.row_bytes
        # Requests begin on a page and on a row: some rows before the first are read and left.
        begin = first - first % (mmap.PAGESIZE // math.gcd(width, mmap.PAGESIZE))
        offset = begin * width
        while offset < last * width:
            with self._mover.staging(self._layout) as memory, named(self._file.path):
                length = min(len(memory), last * width - offset)
                _read_exactly(self._descriptor(), [memory[: whole_pages(length)]], offset, length)
                yield memory[max(0, first * width - offset) : length]
            offset += length


@contextmanager
def opened(
    file: LayerFile, layout: RowLayout, mover: Mover, shown: SessionMap | None = None
) -> Iterator[LayerSource]:
    """The layer's rows, mapped where the daemon offers that; OSError if it cannot be opened.

    `shown` is what it offered of the whole session. What is not in that is read.
    """
    source = LayerSource(file, layout, mover, shown.segments(file.path.name) if shown else [])
    try:
        if shown is None:
            source.lease()
        yield source
    finally:
        source.close()


class SessionMap:
    """What the daemon shows of the files of a session at one moment, asked for with the first
    use: one answer, and one mapping of each warm file, for all layers.

    No lease comes with it, so what it is used for is a copy at once. The files may grow
    meanwhile, and must not be cut. Safe to use from several threads.
    """

    def __init__(self, directory: int) -> None:
        """Of the session with this descriptor."""
        self._directory = directory
        self._lock = threading.Lock()
        self._files: dict[str, list[Segment]] | None = None

    def segments(self, name: str) -> list[Segment]:
        """All of a file's bytes, in file order; nothing if it is not in warm memory."""
        with self._lock:
            if self._files is None:
                self._files = _map_session(self._directory)
        return self._files.get(name, [])


def covers(segments: list[Segment], begin: int, end: int) -> bool:
    """Whether every byte begin..end-1 is in a segment; they are in file order."""
    for segment in segments:
        if segment.at <= begin < segment.end:
            begin = segment.end
    return begin >= end


def mapped_rows(segments: list[Segment], begin: int, end: int, width: int) -> Iterator[memoryview]:
    """Bytes begin..end-1, whole rows of `width`, as views; a row that two share is copied."""
    at = begin
    for index, segment in enumerate(segments):
        stop = min(segment.end, end)
        whole = (stop - at) // width * width if segment.at <= at else 0
        if whole > 0:
            yield segment.memory[at - segment.at :][:whole]
            at += whole
        if segment.at <= at < stop:
            yield _straddling(segments[index:], at, width)
            at += width


def _straddling(segments: list[Segment], at: int, width: int) -> memoryview:
    row = bytearray()
    for segment in segments:
        if segment.at <= at + len(row) < segment.end:
            row += segment.memory[at + len(row) - segment.at :][: width - len(row)]
    return memoryview(row)


def _map_or_nothing(fd: int) -> list[Segment]:
    try:
        told = json.loads(os.getxattr(fd, MAP_ATTRIBUTE))["segments"]
        return _segments(told, _mapped(told))
    except _NO_OFFER:
        return []


def _map_session(directory: int) -> dict[str, list[Segment]]:
    try:
        files = json.loads(os.getxattr(directory, MAP_ATTRIBUTE))["files"]
        told = {name: file["segments"] for name, file in files.items()}
        mapped = _mapped(one for segments in told.values() for one in segments)
        return {name: _segments(segments, mapped) for name, segments in told.items()}
    except _NO_OFFER:
        return {}


def _mapped(told: Iterable[dict[str, Any]]) -> dict[str, Segment]:
    """The part of each warm file that is told of; `at` is its offset there."""
    wanted: dict[str, tuple[int, int]] = {}
    for one in told:
        begin, end = one["offset"], one["offset"] + one["length"]
        first, last = wanted.get(one["path"], (begin, end))
        wanted[one["path"]] = min(first, begin), max(last, end)
    mapped = {}
    for path, (begin, end) in wanted.items():
        begin -= begin % mmap.ALLOCATIONGRANULARITY
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Not populated: who copies does that beside others, in large pages at no cost.
            memory = mmap.mmap(
                fd, end - begin, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin
            )
        finally:
            os.close(fd)
        mapped[path] = Segment(begin, memoryview(memory))
    return mapped


def _segments(told: list[dict[str, Any]], mapped: dict[str, Segment]) -> list[Segment]:
    segments = []
    for one in told:
        whole = mapped[one["path"]]
        start = one["offset"] - whole.at
        segments.append(Segment(one["at"], whole.memory[start : start + one["length"]]))
    return segments


def _pages(slabs: Sequence[Rows], nbytes: int) -> list[memoryview] | None:
    """The first `nbytes` of each, if a direct request can go there."""
    memory = [slab.memory for slab in slabs]
    if len(slabs) > 1 and nbytes % mmap.PAGESIZE:
        return None
    return None if None in memory else [one[:nbytes] for one in memory if one is not None]


def _read_exactly(fd: int, memory: Sequence[memoryview], offset: int, length: int) -> None:
    """`length` bytes; the memory takes whole pages."""
    done = 0
    while done < length:
        got = os.preadv(fd, after(memory, done), offset + done)
        if got == 0:
            raise OSError(errno.EIO, f"file ends at {offset + done}, {length - done} bytes early")
        done += got

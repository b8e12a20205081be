"""Where a layer's bytes come from: mapped warm segments, else reads past the page cache."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvfs.torch.files import LayerFile, after, named
from kvfs.torch.layout import RowLayout
from kvfs.torch.slab import Rows
from kvfs.torch.staging import whole_pages
from kvfs.torch.transfer import Mover

MAP_ATTRIBUTE = "user.kvfs.map"


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
        self, fd: int, file: LayerFile, layout: RowLayout, mover: Mover, segments: list[Segment]
    ) -> None:
        self.moved = Moved()
        self._fd = fd
        self._file = file
        self._layout = layout
        self._mover = mover
        self._segments = segments

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
            _read_exactly(self._fd, memory, begin, end - begin)
        self.moved.mount += end - begin

    def _spread(self, slabs: Sequence[Rows], tokens: int, pieces: Iterator[memoryview]) -> None:
        width, at = self._layout.row_bytes, 0
        for rows in pieces:
            begin, end = at, at + len(rows) // width
            while at < end:
                number, offset = divmod(at, tokens)
                upto = min(end, (number + 1) * tokens)
                part = rows[(at - begin) * width : (upto - begin) * width]
                slabs[number].put_rows(offset, part)
                at = upto

    def _read_rows(self, first: int, last: int) -> Iterator[memoryview]:
        width = self._layout.row_bytes
        # Requests begin on a page and on a row: some rows before the first are read and left.
        begin = first - first % (mmap.PAGESIZE // math.gcd(width, mmap.PAGESIZE))
        offset = begin * width
        while offset < last * width:
            with self._mover.staging(self._layout) as memory, named(self._file.path):
                length = min(len(memory), last * width - offset)
                _read_exactly(self._fd, [memory[: whole_pages(length)]], offset, length)
                yield memory[max(0, first * width - offset) : length]
            offset += length


@contextmanager
def opened(file: LayerFile, layout: RowLayout, mover: Mover) -> Iterator[LayerSource]:
    """The layer's rows, mapped where the daemon offers that; OSError if it cannot be opened."""
    fd = file.open_direct()
    try:
        yield LayerSource(fd, file, layout, mover, _map_or_nothing(fd))
    finally:
        os.close(fd)


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
        return _map(fd)
    except (OSError, ValueError, KeyError, TypeError):
        # Not offered, not for us, or gone in between: the mount has the same bytes.
        return []


def _map(fd: int) -> list[Segment]:
    offer = json.loads(os.getxattr(fd, MAP_ATTRIBUTE))
    segments = []
    for told in offer["segments"]:
        offset, length = told["offset"], told["length"]
        shift = offset % mmap.ALLOCATIONGRANULARITY
        warm = os.open(told["path"], os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(
                warm,
                length + shift,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                prot=mmap.PROT_READ,
                offset=offset - shift,
            )
        finally:
            os.close(warm)
        segments.append(Segment(told["at"], memoryview(mapping)[shift:]))
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

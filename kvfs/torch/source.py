"""Where a layer's bytes come from: the daemon's warm memory, else reads past the page cache."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvfs.torch.files import LayerFile, named, part_of
from kvfs.torch.layout import RowLayout
from kvfs.torch.offers import Offer, Segments, SessionOffer, covers
from kvfs.torch.slab import Rows
from kvfs.torch.staging import whole_pages
from kvfs.torch.transfer import Mover


@dataclass
class Moved:
    """Bytes by the way they came."""

    warm: int = 0
    mount: int = 0


class LayerSource:
    """Rows of one layer file; `moved` says by which way they came.

    What is not offered is read through the mount, from a descriptor that is opened then.
    """

    def __init__(self, file: LayerFile, layout: RowLayout, mover: Mover) -> None:
        self.moved = Moved()
        self._file = file
        self._layout = layout
        self._mover = mover
        self._offer: Offer | None = None
        self._segments: Segments = []
        self._fd = -1

    def use(self, offer: Offer) -> None:
        """Read what is offered of the file from there."""
        self._offer = offer  # it keeps the warm files open
        self._segments = offer.segments(self._file.path.name)

    def descriptor(self) -> int:
        """The file, open: a lease for what the daemon offers of it."""
        if self._fd < 0:
            self._fd = self._file.open_direct()
        return self._fd

    def close(self) -> None:
        """Give the lease up."""
        if self._fd >= 0:
            os.close(self._fd)

    def rows(self, first: int, last: int) -> Iterator[memoryview]:
        """Tokens first..last-1 in pieces of whole rows, each valid until the next is asked for.

        In memory that the mover moves from.

        Raises:
            OSError: EIO if the file ends before, or what the kernel reports.
        """
        width = self._layout.row_bytes
        begin, end = first * width, last * width
        is_warm = covers(self._segments, begin, end)
        # Direct requests begin on a page and on a row: some rows before are read and left.
        offset = begin if is_warm else begin - begin % math.lcm(width, mmap.PAGESIZE)
        while offset < end:
            with self._mover.staging(self._layout) as memory:
                length = min(len(memory), end - offset)
                self._read([memory], offset, length, is_warm=is_warm)
                rows = memory[max(0, begin - offset) : length]
                self._count(len(rows), is_warm=is_warm)
                yield rows
            offset += length

    def fill(self, slabs: Sequence[Rows], tokens: int, first: int, last: int) -> None:
        """Tokens first..last-1 to slabs of `tokens` each; in place where a request may be so.

        Raises:
            OSError: as `rows`.
        """
        width = self._layout.row_bytes
        begin, end, size = first * width, last * width, tokens * width
        is_warm = covers(self._segments, begin, end)
        memory = [slab.memory for slab in slabs]
        in_place = [one[:size] for one in memory[:-1] if one is not None]
        may_be_direct = begin % mmap.PAGESIZE == 0 and (
            len(slabs) == 1 or size % mmap.PAGESIZE == 0
        )
        if memory[-1] is None or not (is_warm or may_be_direct):
            self._spread(slabs, tokens, self.rows(first, last))
            return
        self._read([*in_place, memory[-1]], begin, end - begin, is_warm=is_warm)
        self._count(end - begin, is_warm=is_warm)

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

    def _read(
        self, memory: Sequence[memoryview], begin: int, length: int, *, is_warm: bool
    ) -> None:
        """`length` bytes of the file from `begin` on; the memory takes whole pages."""
        with named(self._file.path):
            if not is_warm:
                pages = part_of(memory, 0, whole_pages(length))
                _read_exactly(self.descriptor(), pages, begin, length)
                return
            end = begin + length
            for segment in self._segments:
                at, upto = max(begin, segment.at), min(end, segment.end)
                if at < upto:
                    part = part_of(memory, at - begin, upto - at)
                    _read_exactly(segment.fd, part, segment.offset + at - segment.at, upto - at)

    def _count(self, nbytes: int, *, is_warm: bool) -> None:
        if is_warm:
            self.moved.warm += nbytes
        else:
            self.moved.mount += nbytes


@contextmanager
def opened(
    file: LayerFile, layout: RowLayout, mover: Mover, session: SessionOffer | None = None
) -> Iterator[LayerSource]:
    """The layer's rows, from warm memory where the daemon offers that; OSError if it cannot be
    opened.

    `session` is what is offered of all files at once; without it, or when that is too much for
    one answer, the file is opened, and the daemon asked to bring it to warm memory.
    """
    source = LayerSource(file, layout, mover)
    try:
        offer = None if session is None else session.get()
        source.use(offer or Offer.of_file(source.descriptor(), file.path.name))
        yield source
    finally:
        source.close()


def _read_exactly(fd: int, memory: Sequence[memoryview], offset: int, length: int) -> None:
    """`length` bytes, and what of the memory is behind that, as far as the file has it."""
    done, room = 0, sum(map(len, memory))
    while done < length:
        got = os.preadv(fd, part_of(memory, done, room - done), offset + done)
        if got == 0:
            raise OSError(errno.EIO, f"file ends at {offset + done}, {length - done} bytes early")
        done += got

"""Sequential look-ahead: device reads run ahead of a reader, over the ends of files.

A session is read layer by layer. Who reads a file in order, and opens files in the
order of their directory's names as it comes to them, or has read some in that order,
gets the next layers before asking for them.
"""

from __future__ import annotations

import logging
import stat
from dataclasses import dataclass, field

from cachetools import LRUCache

from kvfs.engine.format import Extent
from kvfs.engine.io import Step
from kvfs.engine.nodes import Node
from kvfs.engine.store import Store

log = logging.getLogger(__name__)

_WINDOW_MIN = 1024 * 1024
_SIBLINGS_MAX = 1024
_DIRECTORIES_MAX = 1024
# The kernel's own read-ahead asks for the next ranges at once, not always in order.
_OUT_OF_ORDER = 4 * 1024 * 1024
# So many reads in order make a sequential reader of whom out-of-order ones are forgiven.
_RUN_MIN = 3
# After so many files in order who reads them goes on so; one may follow another by chance.
_FILES_MIN = 3
# A file of many small extents must not fill the queue that others wait in.
_CHUNKS_MAX = 16


@dataclass(slots=True)
class Reader:
    """What is known of the reader of one open file. Offsets and sizes in bytes: the
    next one of a sequential reader, how much is read ahead for it, and up to where; `run`
    counts its reads in order."""

    ino: int
    expected: int = 0
    window: int = _WINDOW_MIN // 2
    ahead: int = 0
    run: int = 0
    in_order: bool = False

    def saw(self, offset: int, length: int, window_max: int) -> None:
        lately = self.expected - _OUT_OF_ORDER <= offset <= max(self.expected, self.ahead)
        if offset == self.expected:
            self.run += 1
            self.window = min(max(2 * self.window, _WINDOW_MIN), window_max)
            self.expected = offset + length
        elif self.run >= _RUN_MIN and lately:
            self.expected = max(self.expected, offset + length)
        else:
            self.run = self.window = 0
            self.expected = self.ahead = offset + length


@dataclass(slots=True)
class _Siblings:
    """The files of a directory by name, as of its mtime, the last one opened, the last one
    read, and how many were read in order up to that. Behind that one `ahead` bytes are read
    ahead, up to `offset` of the file at `next`; `window` is how many there should be."""

    mtime_ns: int
    order: list[int]
    place: dict[int, int]
    last_opened: int = -1
    last_read: int = -1
    run: int = 0
    next: int = 0
    offset: int = 0
    ahead: int = 0
    window: int = _WINDOW_MIN

    def saw_read(self, place: int, size: int, window_max: int) -> None:
        """Of the file at that place, which has so many bytes."""
        if place == self.last_read:
            return
        if place == self.last_read + 1:
            self.run += 1
            self.window = min(2 * self.window, window_max)
        else:
            self.run, self.window, self.next = 1, _WINDOW_MIN, 0
        self.last_read = place
        if self.next > place:
            self.ahead -= size
        else:
            self.next, self.offset, self.ahead = place + 1, 0, 0

    def goes_on(self, reader: Reader, place: int) -> bool:
        """Whether the next file is likely to be read next. That files were opened in order says
        nothing when all of them were opened before."""
        was_opened_for_this = reader.in_order and place == self.last_opened
        return was_opened_for_this or self.run >= _FILES_MIN


@dataclass(slots=True)
class LookAhead:
    """Starts reads; never waits for them, starts none when the queue is long, and fails
    nobody: what is wrong with a file is told to who asks for it."""

    store: Store
    window_max: int
    _directories: LRUCache[int, _Siblings] = field(
        default_factory=lambda: LRUCache(_DIRECTORIES_MAX)
    )

    def opened(self, ino: int) -> Step[Reader]:
        """A file was opened for reading."""
        reader = Reader(ino)
        try:
            node = yield from self.store.node(ino)
            siblings = yield from self._siblings(node.inode.parent)
        except OSError as failure:
            log.debug("no look-ahead for inode %d: %s", ino, failure)
            return reader
        place = siblings.place.get(ino)
        if place is not None:
            # Who begins anew, or goes on.
            reader.in_order = place in (0, siblings.last_opened + 1)
            siblings.last_opened = place
        return reader

    def reads(self, reader: Reader, offset: int, length: int) -> Step[None]:
        """A read is about to be answered: start what comes behind it."""
        reader.saw(offset, length, self.window_max)
        start = max(reader.ahead, offset)
        end = reader.expected + reader.window
        if end - start >= _WINDOW_MIN:
            reader.ahead = end
            try:
                yield from self._start(reader, start, end)
            except OSError as failure:
                log.debug("look-ahead in inode %d: %s", reader.ino, failure)

    def _start(self, reader: Reader, start: int, end: int) -> Step[None]:
        node = yield from self.store.node(reader.ino)
        # Also when it is all that is asked for: it must not wait for what is only likely.
        if start < node.inode.size:
            self._read_ahead((yield from self.store.extents(reader.ino, start, end - start)))
        if end > node.inode.size:
            yield from self._start_siblings(reader, node, end - node.inode.size)

    def _start_siblings(self, reader: Reader, node: Node, wanted: int) -> Step[None]:
        siblings = yield from self._siblings(node.inode.parent)
        place = siblings.place.get(reader.ino)
        if place is None:
            return
        siblings.saw_read(place, node.inode.size, self.window_max)
        if not siblings.goes_on(reader, place):
            return
        # Many at a time: neighbours in the ring are then one read.
        window = max(wanted, siblings.window)
        if siblings.ahead <= window // 2:
            self._read_ahead((yield from self._behind(siblings, window)))

    def _behind(self, siblings: _Siblings, window: int) -> Step[list[Extent]]:
        """What is still to be read ahead, of one file after the other."""
        extents: list[Extent] = []
        while siblings.ahead < window and siblings.next < len(siblings.order):
            ino = siblings.order[siblings.next]
            size = (yield from self.store.node(ino)).inode.size
            length = min(size - siblings.offset, window - siblings.ahead)
            extents += yield from self.store.extents(ino, siblings.offset, length)
            siblings.ahead += length
            siblings.offset += length
            if siblings.offset >= size:
                siblings.next, siblings.offset = siblings.next + 1, 0
        return extents

    def _read_ahead(self, extents: list[Extent]) -> None:
        if extents and self.store.has_room:
            self.store.reader.read_ahead(extents, _CHUNKS_MAX)

    def _siblings(self, directory: int) -> Step[_Siblings]:
        parent = yield from self.store.node(directory)
        known = self._directories.get(directory)
        if known is not None and known.mtime_ns == parent.inode.mtime_ns:
            return known
        entries = yield from self.store.list_directory(directory, 0, _SIBLINGS_MAX + 1)
        if len(entries) > _SIBLINGS_MAX:
            entries = []
        names = sorted((e.name, e.ino) for _, e in entries if stat.S_ISREG(e.type))
        order = [ino for _, ino in names]
        siblings = _Siblings(parent.inode.mtime_ns, order, {i: n for n, i in enumerate(order)})
        self._directories[directory] = siblings
        return siblings

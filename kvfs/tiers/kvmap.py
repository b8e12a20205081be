"""One warm file: decoded bytes of a session's layers in tmpfs, mapped.

A file only grows while it lives: what is overwritten lies elsewhere in it from then on. So
bytes that were shown to somebody never change, also not for who maps the file, and it is
given up whole. Its memory may be that of a file before it (spares.py). Its format is in
engine/format.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kvfs.engine.buffer import Kept, Place
from kvfs.engine.format import (
    BLOCK,
    KVMAP_DATA_START,
    KVMAP_ENTRY_SIZE,
    KVMAP_LAYOUT_AT,
    KVMAP_SEGMENT_ALIGN,
    KVMAP_TABLES_MAX,
    FormatError,
    KvmapEntry,
    KvmapHeader,
    KvmapLayout,
    round_up,
)
from kvfs.engine.io import Completion
from kvfs.tiers.mapping import make_span, map_shared, watch

_SPAN_MIN = 256 * 1024
_SPAN_MAX = 16 * 1024 * 1024
SIZE_MIN = KVMAP_DATA_START + _SPAN_MIN
_LARGE_PAGE = 2 * 1024 * 1024
_SEGMENT_GROWTH_MAX = 1024 * 1024
_TABLE_SIZE = 64 * 1024
_OPEN_SEGMENTS_MAX = 4096

Submit = Callable[[Callable[[], memoryview]], Completion[memoryview]]


@dataclass(slots=True)
class _Segment:
    """Memory for a run of one file: bytes [start, limit) of a region, filled up to `fill`,
    which is the file's offset `end`."""

    region: memoryview
    start: int
    fill: int
    limit: int
    end: int


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of the file; `fresh` is what the file takes more for it, in bytes."""

    base: int
    length: int
    fresh: int


@dataclass(slots=True)
class _Coming:
    """One that a thread is making ready."""

    span: _Span
    region: Completion[memoryview]


@dataclass(slots=True, eq=False)
class Kvmap:
    """`taken` is what it takes of the tmpfs, in bytes; `last_sequence` the last operation
    whose data is here; `extents` are those whose bytes can be found here. `users` are who
    fills memory that was placed, and the files that somebody else may have mapped. Who was
    told of it, `was_shown`, may look at its memory for ever."""

    path: Path
    header: KvmapHeader
    taken: int = 0
    last_sequence: int = -1
    extents: set[int] = field(default_factory=set)
    users: int = 0
    leases: int = 0
    was_shown: bool = False
    _layout: KvmapLayout = field(default_factory=KvmapLayout)
    _in_table: int = 0
    _end: int = 0
    _bases: dict[int, int] = field(default_factory=dict)
    _regions: list[memoryview] = field(default_factory=list)
    _free: int = 0
    _open: dict[int, _Segment] = field(default_factory=dict)
    _coming: _Coming | None = None

    # -- making and finding

    @classmethod
    def create(cls, path: Path, header: KvmapHeader) -> Kvmap:
        """Raises OSError, also ENOSPC, with nothing left behind."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        kvmap = cls(path, header)
        kvmap._begin_file()
        return kvmap

    @classmethod
    def reuse(cls, spare: Path, size: int, path: Path, header: KvmapHeader) -> Kvmap:
        """One in the memory of a spare of `size` bytes. Raises OSError, with nothing left
        behind."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            spare.rename(path)
        except OSError:
            spare.unlink(missing_ok=True)
            raise
        kvmap = cls(path, header, taken=size)
        kvmap._begin_file()
        return kvmap

    def _begin_file(self) -> None:
        try:
            self.grow(SIZE_MIN)
        except OSError:
            self.path.unlink()
            raise
        self._free = KVMAP_DATA_START
        self.regions[0][: KvmapHeader.SIZE] = self.header.pack()
        self._write_layout(KvmapLayout())

    @classmethod
    def load(cls, path: Path, uuid: bytes, token: bytes) -> Kvmap:
        """One that an earlier process left; nothing more is put into it. Raises FormatError
        when it is none, or of another mount."""
        size = path.stat().st_size
        if size < KVMAP_DATA_START:
            raise FormatError("no warm file")
        region = map_shared(path, 0, size)
        header = KvmapHeader.unpack(region)
        if (header.uuid, header.token) != (uuid, token):
            raise FormatError("of another mount")
        # The earlier process may have told others of it.
        kvmap = cls(path, header, taken=size, was_shown=True)
        kvmap._add(region, 0)
        kvmap._free = kvmap._end = size
        with suppress(FormatError):
            kvmap._layout = KvmapLayout.unpack(region[KVMAP_LAYOUT_AT:])
        # What it holds may still come into the ring, and is noted behind what is there.
        kvmap._in_table = sum(1 for _ in kvmap._entries(len(kvmap._layout.tables) - 1))
        return kvmap

    def adopt(self, token: bytes) -> None:
        """It belongs to this mount from now on. Only for one that no operation needs."""
        self.header = replace(self.header, token=token)
        self.regions[0][: KvmapHeader.SIZE] = self.header.pack()

    def entries(self) -> Iterator[KvmapEntry]:
        """What the tables say, as far as it is whole."""
        for number in range(len(self._layout.tables)):
            for entry in self._entries(number):
                if entry.start + entry.size <= self.taken:
                    yield entry

    def _entries(self, number: int) -> Iterator[KvmapEntry]:
        """Those of a table, up to the first that is not whole."""
        for place in range(self._layout.tables[number], self._table_end(number), KVMAP_ENTRY_SIZE):
            try:
                yield KvmapEntry.unpack(self.regions[0][place : place + KVMAP_ENTRY_SIZE])
            except FormatError:
                return

    # -- memory

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """It is not given up meanwhile."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    @property
    def regions(self) -> list[memoryview]:
        return self._regions

    @property
    def room(self) -> int:
        """Bytes that can be placed before it has to grow."""
        return len(self._regions[-1]) - self._free

    def growth(self, size: int) -> int:
        """What it takes more of the tmpfs when it grows by `size` bytes."""
        return max(0, self._end_after(size) - max(self.taken, self._end))

    def _end_after(self, size: int) -> int:
        end = self._end + max(size, _SPAN_MIN)
        return round_up(end, _LARGE_PAGE if size > _LARGE_PAGE else KVMAP_SEGMENT_ALIGN)

    @property
    def next_span(self) -> int:
        """By how much it should grow next, in bytes."""
        span = min(max(self.taken // 2, _SPAN_MIN), _SPAN_MAX)
        return min(span, self.tail) if self.tail else span

    @property
    def tail(self) -> int:
        """Memory of the spare that it was made from which it did not grow into, in bytes."""
        return max(0, self.taken - self._end)

    @property
    def used(self) -> int:
        """Where it is filled up to."""
        return self._end - self.room

    def cut_tail(self, size_max: int) -> None:
        """Give at most so many bytes of it back, in large pages. Raises OSError."""
        size = max(round_up(self._end, _LARGE_PAGE), self.taken - size_max)
        if size < self.taken:
            os.truncate(self.path, size)
            self.taken = size

    def let_go(self) -> bool:
        """Of its memory. Whether nobody else looks at it."""
        views = [watch(region) for region in self._regions]
        self._open.clear()
        self._coming = None
        self._regions.clear()
        return all(view() is None for view in views)

    @property
    def is_being_made(self) -> bool:
        """Whether a thread makes more of it."""
        return self._coming is not None and not self._coming.region.done

    def grow(self, size: int) -> None:
        """At once, so that `size` bytes can be placed. Raises OSError."""
        if self.begin_prepared() and self.room >= size:
            return
        span = self._reserve(size)
        try:
            region = make_span(self.path, span.base, span.length)
        except OSError:
            self.taken -= span.fresh
            raise
        self._begin(region, span.base)

    def prepare(self, size: int, submit: Submit) -> Completion[memoryview]:
        """Have the next part, with room for `size` bytes, made ready by a thread: fresh memory
        costs more than the copy into it. What is done by then counts when it grows."""
        if self._coming is None:
            span = self._reserve(size)
            region = submit(partial(make_span, self.path, span.base, span.length))
            self._coming = _Coming(span, region)
        return self._coming.region

    def begin_prepared(self) -> bool:
        """Place what comes in what was prepared, if it is ready."""
        coming = self._coming
        if coming is None or not coming.region.done:
            return False
        self._coming = None
        if coming.region.error is not None:
            self.taken -= coming.span.fresh
            return False
        self._begin(coming.region.result(), coming.span.base)
        return True

    @property
    def is_prepared(self) -> bool:
        return self._coming is not None

    def place(self, place: Place, length: int) -> Kept | None:
        """Memory for bytes of a file, behind those before it where that is possible; None when
        the file has to grow first. It is not filled yet."""
        segment = self._open.get(place.ino)
        follows = segment is not None and segment.end == place.offset
        if segment is None or not follows or not self._fits(segment, length):
            grown = 2 * (segment.limit - segment.start) if segment and follows else 0
            segment = self._new_segment(place, length, min(grown, _SEGMENT_GROWTH_MAX))
            if segment is None:
                return None
            if len(self._open) >= _OPEN_SEGMENTS_MAX:
                self._open.clear()
            self._open[place.ino] = segment
        start = segment.fill
        segment.fill += length
        segment.end += length
        return Kept(segment.region, start, segment.fill, None)

    def offset_of(self, kept: Kept) -> int:
        """Where something placed here lies in the file."""
        return self._bases[id(kept.region)] + kept.start

    def at(self, offset: int, length: int) -> Kept | None:
        """The memory of so many bytes of the file."""
        for region in self._regions:
            start = offset - self._bases[id(region)]
            if 0 <= start and start + length <= len(region):
                return Kept(region, start, start + length, None)
        return None

    # -- tables

    def note(self, entry: KvmapEntry, tokens: int) -> None:
        """For the next process: the bytes of an extent are here. Raises OSError when there is
        no room for a table."""
        layout = self._layout
        last = len(layout.tables) - 1
        at = layout.tables[last] + self._in_table * KVMAP_ENTRY_SIZE
        if at >= self._table_end(last):
            if last + 1 == KVMAP_TABLES_MAX:
                return
            if self.room < _TABLE_SIZE:
                self.grow(_TABLE_SIZE)
            at = self._bases[id(self._regions[-1])] + self._free
            self._free += _TABLE_SIZE
            self._in_table = 0
            table = self.at(at, _TABLE_SIZE)
            assert table is not None
            table.data[:] = bytes(_TABLE_SIZE)  # the entries of a file before it are whole
            self._write_layout(replace(layout, tables=(*layout.tables, at)))
        place = self.at(at, KVMAP_ENTRY_SIZE)
        assert place is not None
        place.data[:] = entry.pack()
        self._in_table += 1
        if tokens > self._layout.tokens:
            self._write_layout(replace(self._layout, tokens=tokens))

    def _table_end(self, number: int) -> int:
        start = self._layout.tables[number]
        return KVMAP_DATA_START if number == 0 else start + _TABLE_SIZE

    def _write_layout(self, layout: KvmapLayout) -> None:
        self._layout = layout
        packed = layout.pack()
        self.regions[0][KVMAP_LAYOUT_AT : KVMAP_LAYOUT_AT + len(packed)] = packed

    # -- details

    def _reserve(self, size: int) -> _Span:
        """The next part of the file, for `size` bytes."""
        base, fresh = self._end, self.growth(size)
        self._end = self._end_after(size)
        self.taken += fresh
        return _Span(base, self._end - base, fresh)

    def _begin(self, region: memoryview, base: int) -> None:
        self._add(region, base)
        self._free = 0

    def _add(self, region: memoryview, base: int) -> None:
        self._regions.append(region)
        self._bases[id(region)] = base

    def _fits(self, segment: _Segment, length: int) -> bool:
        """As it is, or because the memory behind it is free."""
        if segment.limit - segment.fill >= length:
            return True
        is_last = segment.region is self._regions[-1] and segment.limit == self._free
        if not is_last or len(segment.region) - segment.fill < length:
            return False
        segment.limit = min(
            round_up(segment.fill + length, alignment(self.header.unit)), len(segment.region)
        )
        self._free = segment.limit
        return True

    def _new_segment(self, place: Place, length: int, wanted: int) -> _Segment | None:
        """The bytes lie in memory as in the file's blocks, so that direct I/O takes them."""
        skew = place.offset % BLOCK
        size = round_up(skew + length, alignment(self.header.unit))
        if self.room < size:
            return None
        size = min(max(size, wanted), self.room)
        start = self._free
        self._free += size
        return _Segment(self._regions[-1], start, start + skew, start + size, place.offset)


def alignment(unit: int) -> int:
    """Of segments: files of a pool may be many and small."""
    return KVMAP_SEGMENT_ALIGN if unit else BLOCK

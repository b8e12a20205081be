"""Promotion: what the ring alone has of some files comes up in one pass.

The layers of a session were written one behind the other, or in turns. So what is missing of
all of them is read in the order of the device: neighbours with one I/O, whichever file they are
of, each straight to where its file has memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvfs.engine.buffer import Kept, Place
from kvfs.engine.files import Part, Stored
from kvfs.engine.format import EXTENT_SIZE_MAX, Extent, round_up
from kvfs.engine.io import Completion, Executor, Step, Urgency, wait
from kvfs.engine.reader import Target, neighbours
from kvfs.engine.store import Store
from kvfs.tiers.kvmap import alignment
from kvfs.tiers.warm import Filling, WarmTier

READS_IN_FLIGHT = 8
_WINDOW_SIZE = 32 * 1024 * 1024
_WINDOW_RANGES = 256


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file from `offset` on."""

    ino: int
    offset: int
    length: int


def windows(files: Iterable[tuple[int, int]]) -> Iterator[list[Range]]:
    """What is gathered at once of files with these numbers and sizes: so little that who needs
    one of them does not wait for long."""
    window: list[Range] = []
    size = 0
    for ino, end in files:
        for offset in range(0, end, _WINDOW_SIZE):
            length = min(end - offset, _WINDOW_SIZE)
            if size + length > _WINDOW_SIZE or len(window) == _WINDOW_RANGES:
                yield window
                window, size = [], 0
            window.append(Range(ino, offset, length))
            size += length
    if window:
        yield window


@dataclass(slots=True, eq=False)
class Underway:
    """A file that a migration has for itself, as long as something of it is left to do."""

    promotion: Promotion | None = None
    done: Completion[None] = field(default_factory=Completion)
    _left: int = 1

    def more(self) -> None:
        self._left += 1

    def less(self) -> None:
        self._left -= 1
        if not self._left:
            self.done.finish()


@dataclass(slots=True, eq=False)
class _Wanted:
    """An extent at `offset` of a file, to lie in [start, start + room) of the stretch."""

    stretch: Stretch
    offset: int
    extent: Extent
    start: int
    room: int


@dataclass(slots=True, eq=False)
class Stretch:
    """What is missing of a part of a file, in its order, and memory for it. `files` wait for
    it, and those who bring them in: files may share extents."""

    place: Place
    files: list[Underway]
    promotions: list[Promotion]
    size: int = 0
    wanted: list[_Wanted] = field(default_factory=list)
    good: list[_Wanted] = field(default_factory=list)
    left: int = 0
    filling: Filling | None = None

    def takes(self, extent: Extent) -> bool:
        return round_up(self.size) + extent.size <= EXTENT_SIZE_MAX

    def add(self, offset: int, extent: Extent) -> _Wanted:
        """Right behind the one before it if it is so in the file, else in a block of its own."""
        last = self.wanted[-1] if self.wanted else None
        if last is not None and last.offset + last.extent.size == offset:
            last.room = last.extent.size
        start = 0 if last is None else last.start + last.room
        wanted = _Wanted(self, offset, extent, start, round_up(start + extent.size) - start)
        self.wanted.append(wanted)
        self.left += 1
        self.size = start + extent.size
        return wanted


@dataclass(slots=True)
class Promotion:
    """One pass. `coming` are the extents that this one and others bring in, by their ids;
    `is_complete` whether all that was asked for is there, once it has finished."""

    store: Store
    warm: WarmTier
    executor: Executor
    coming: dict[int, Stretch]
    urgency: Urgency
    is_complete: bool = True
    _reads: deque[Completion[list[Extent]]] = field(default_factory=deque)
    _sharing: list[Underway] = field(default_factory=list)
    _filled: set[int] = field(default_factory=set)

    def hasten(self, urgency: Urgency) -> None:
        """Who waits for a guess must not wait for all demand first."""
        if urgency < self.urgency == Urgency.BACKGROUND:
            self.urgency = urgency
            for read in self._reads:
                self.executor.hasten(read)

    def bring_in(self, window: list[tuple[Range, Underway]]) -> Step[None]:
        """Begin to read what is missing of these. Each file has less to do once that is there,
        also when this ends early. Raises OSError when the device fails."""
        wanted: list[_Wanted] = []
        begun = 0
        try:
            for part, file in window:
                wanted += yield from self._missing(part, file)
            yield from self._have_memory(wanted)
            wanted.sort(key=lambda one: (one.stretch.filling is None, one.extent.address))
            ready = [one.extent for one in wanted if one.stretch.filling is not None]
            for group in neighbours(ready):
                yield from self._finish(READS_IN_FLIGHT - 1)
                self._begin(wanted[begun : begun + len(group)])
                begun += len(group)
        finally:
            self._arrived(wanted[begun:], set())
            for _, file in window:
                file.less()

    def finish(self) -> Step[None]:
        """Wait for what was begun. Raises OSError when the device fails."""
        yield from self._finish(0)
        for file in self._sharing:
            yield from wait(file.done)
        # A session that is too large drives out its own beginning.
        self.is_complete &= all(map(self.warm.holds, self._filled))

    def _finish(self, left: int) -> Step[None]:
        """Until no more than so many reads are under way."""
        while len(self._reads) > left:
            yield from wait(self._reads[0])
            self._reads.popleft()

    def _missing(self, part: Range, file: Underway) -> Step[list[_Wanted]]:
        """What of it is in the ring alone, and does not come already."""
        try:
            unit = yield from self.store.units.session_of(part.ino)
            parts = yield from self.store.parts(part.ino, part.offset, part.length)
        except FileNotFoundError:
            return []  # it was removed meanwhile
        wanted: list[_Wanted] = []
        for offset, extent in _extents(parts, part.offset):
            stretch = self.coming.get(extent.extent_id)
            if stretch is not None:
                self._share(stretch, file)
            elif self.store.reader.warm(extent) is None:
                if not wanted or not wanted[-1].stretch.takes(extent):
                    file.more()
                    stretch = Stretch(Place(unit, part.ino, offset), [file], [self])
                else:
                    stretch = wanted[-1].stretch
                wanted.append(stretch.add(offset, extent))
                self.coming[extent.extent_id] = stretch
        return wanted

    def _share(self, stretch: Stretch, file: Underway) -> None:
        if file not in stretch.files:
            file.more()
            stretch.files.append(file)
            stretch.promotions[0].hasten(self.urgency)
            stretch.promotions.append(self)
            self._sharing.append(file)

    def _have_memory(self, wanted: list[_Wanted]) -> Step[None]:
        """One behind the other, made ready at once where that is possible."""
        stretches = list(dict.fromkeys(one.stretch for one in wanted))
        sizes: Counter[int] = Counter()
        for stretch in stretches:
            unit = stretch.place.unit
            sizes[unit] += round_up(stretch.size, alignment(unit))
        is_guess = self.urgency == Urgency.BACKGROUND
        for unit, size in sizes.items():
            yield from self.warm.make_ready(unit, size, is_guess=is_guess)
        for stretch in stretches:
            stretch.filling = yield from self.warm.reserve(stretch.place, round_up(stretch.size))

    def _begin(self, wanted: list[_Wanted]) -> None:
        read = self.store.reader.read_into(list(map(_target, wanted)), self.urgency)
        self._reads.append(read)
        read.when_done(partial(self._read, wanted, read))

    def _read(self, wanted: list[_Wanted], read: Completion[list[Extent]]) -> None:
        good = [] if read.error is not None else read.result()
        self._arrived(wanted, {extent.extent_id for extent in good})

    def _arrived(self, wanted: list[_Wanted], good: set[int]) -> None:
        for one in wanted:
            stretch = one.stretch
            stretch.left -= 1
            if one.extent.extent_id in good:
                stretch.good.append(one)
            if not stretch.left:
                self._publish(stretch)

    def _publish(self, stretch: Stretch) -> None:
        if stretch.filling is not None:
            there = [(one.offset, one.extent, one.start) for one in stretch.good]
            self.warm.filled(stretch.filling, there)
        for one in stretch.wanted:
            del self.coming[one.extent.extent_id]
        for promotion in stretch.promotions:
            promotion._published(stretch)
        for file in stretch.files:
            file.less()
        # They refer to each other, and nobody else may look at memory that is to be used again.
        stretch.wanted.clear()
        stretch.good.clear()
        stretch.filling = None

    def _published(self, stretch: Stretch) -> None:
        self.is_complete &= len(stretch.good) == len(stretch.wanted)
        if stretch.filling is not None:
            self._filled.add(stretch.filling.kvmap.header.serial)


def _target(wanted: _Wanted) -> Target:
    filling = wanted.stretch.filling
    assert filling is not None
    kept = filling.kept.part(wanted.start, wanted.start + wanted.room)
    return Target(wanted.extent, kept.data)


def _extents(parts: list[Part], at: int) -> Iterator[tuple[int, Extent]]:
    """The extents among the parts of a file from `at` on, and where in it each begins."""
    for part in parts:
        if isinstance(part, Stored):
            yield at - part.skew, part.extent
        at += len(part) if isinstance(part, Kept) else part.length

"""The warm tier: file data in RAM, before it is in the ring and after.

What is written lands in a warm file of its session (kvmap.py) and is answered once the
operation log (oplog.py) refers to it. When it is in the ring it stays here, clean, to be
read, until a file of data that nobody used for longer has to go. A file that nobody wrote
to since what it holds came into the ring is clean, and is given up whole. Its memory waits
for what is written next (spares.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from kvfs.engine.buffer import BufferedOperation, InRing, Kept, Place
from kvfs.engine.buffers import copy
from kvfs.engine.format import (
    BLOCK,
    Extent,
    FormatError,
    KvmapEntry,
    KvmapHeader,
    checksum,
)
from kvfs.engine.io import Completion, Executor, Step
from kvfs.engine.policy import Policy
from kvfs.tiers.kvmap import SIZE_MIN, Kvmap, alignment
from kvfs.tiers.leases import Leases
from kvfs.tiers.oplog import CHUNK_SIZE, OperationLog, Reference, current_boot
from kvfs.tiers.policy import LRU
from kvfs.tiers.shards import Shards
from kvfs.tiers.spares import UNIT, Spare, Spares, set_aside

log = logging.getLogger(__name__)
T = TypeVar("T")

_POOL_FILE_MAX = 64 * 1024 * 1024
_POOL_SHARE = 8  # one part in so many of the pools' memory goes at once
_SESSION_SHARE = 8  # of the limit: one part in so many is the most that one file holds
_SUFFIX = ".kvmap"
_IDLE_SHARE = 16  # of the limit: one part in so many may be chunks of the log that wait
_IDLE_MAX = 4
_NAMED = 64  # victims that are asked for at once
_SERIAL_BITS = 62  # of the first number in a mount: none of another mount comes near it
_LARGE_MIN = 1024 * 1024  # who begins with so much at once has more
_STOCK_FILL_PCT = 50  # above it no memory is made ready for what may come
_GROWING_SECONDS = 10.0  # who wrote nothing for so long is not expected to write more
_TAIL_CUT_MAX = 16 * 1024 * 1024  # at once: to give these pages back takes some 2 ms
_TOUCHED_SPAN = 4 * 1024 * 1024  # to map it takes less than 1 ms


@dataclass(frozen=True, slots=True)
class _Held:
    """The bytes of an extent, in pieces, and its checksum. The pieces have checksums of their
    own until somebody looked at them."""

    kvmap: Kvmap
    pieces: tuple[Kept, ...]
    checksum: int
    is_checked: bool = True


@dataclass(slots=True)
class WarmCounters:
    """Since the mount; sizes in bytes."""

    hits: int = 0
    hit_bytes: int = 0
    evicted_files: int = 0
    evicted: int = 0
    promoted: int = 0
    taken_over: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class WarmUsage:
    """Of the tmpfs, in bytes: the most that may be taken, what is, and what others may have
    mapped of that. `spare` is memory beside that which waits for what is written next."""

    limit: int
    taken: int
    leased: int
    spare: int


@dataclass(frozen=True, slots=True)
class Filling:
    """Memory in a warm file for bytes of a file from a place on."""

    kvmap: Kvmap
    place: Place
    kept: Kept


@dataclass(frozen=True, slots=True)
class MapSegment:
    """Bytes [offset, offset + length) of a warm file are those of a file from `at` on."""

    path: Path
    offset: int
    length: int
    at: int


@dataclass(slots=True)
class _Removal:
    """Runs in a thread, and has the last word of the file's memory: whether it is that spare
    now."""

    kvmap: Kvmap | None
    spare: Spare | None

    def __call__(self) -> bool:
        kvmap, self.kvmap = self.kvmap, None
        assert kvmap is not None
        path = kvmap.path
        is_kept = self.spare is not None and kvmap.let_go() and set_aside(path, self.spare)
        if not is_kept:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()
        kvmap.let_go()
        return is_kept


@dataclass(slots=True)
class _Growing:
    """A file with memory that it did not grow into yet; up to where it was filled, and since
    when."""

    kvmap: Kvmap
    used: int
    since: float


@dataclass(slots=True)
class WarmTier:
    """Implements kvfs.engine.buffer.Buffer in `directory`, with at most `limit` bytes there.
    `policy` names the sessions that go first, `clock` gives it seconds. `on_evicted` is told of
    which session a part of the memory was given up."""

    directory: Path
    limit: int
    executor: Executor
    boot: str = field(default_factory=current_boot)
    counters: WarmCounters = field(default_factory=WarmCounters)
    shards: Shards = field(default_factory=Shards)
    leases: Leases = field(init=False)
    policy: Policy = field(default_factory=LRU)
    clock: Callable[[], float] = time.monotonic
    on_evicted: Callable[[int], None] = field(default=lambda unit: None)
    _log: OperationLog = field(init=False)
    _spares: Spares = field(init=False)
    _uuid: bytes = b""
    _token: bytes = b""
    _released: int = -1
    _all_dirty_since: int | None = None
    _serial: int = field(default_factory=lambda: secrets.randbits(_SERIAL_BITS))
    _taken: int = 0
    _kvmaps: OrderedDict[int, Kvmap] = field(default_factory=OrderedDict)
    _by_unit: dict[int, dict[int, Kvmap]] = field(default_factory=dict)
    _current: dict[int, Kvmap] = field(default_factory=dict)
    _by_region: dict[int, Kvmap] = field(default_factory=dict)
    _held: dict[int, _Held] = field(default_factory=dict)
    _leaving: set[Path] = field(default_factory=set)
    _growing: dict[int, _Growing] = field(default_factory=dict)
    _taken_before: int = 0
    _empty_before: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.leases = Leases(self.limit // 2, self.clock)
        idle = min(max(self.limit // (_IDLE_SHARE * CHUNK_SIZE), 1), _IDLE_MAX)
        self._log = OperationLog(self.directory / "log", self.limit, self.boot, self._resolve, idle)
        self._spares = Spares(self.directory / "spare", self.limit, self.executor, self.clock)

    # -- kvfs.engine.buffer.Buffer

    @property
    def home(self) -> bytes:
        return self._log.home

    def left_at(self, home: bytes) -> str | None:
        return self._log.left_at(home)

    def open(self, uuid: bytes, token: bytes, sequence: int) -> Iterator[BufferedOperation]:
        self._uuid, self._token = uuid, token
        self._released = sequence
        self._spares.open()
        for path in self._paths():
            try:
                self._take_over(Kvmap.load(path, uuid, token))
            except FormatError as fault:
                log.info("%s is dropped: %s", path.name, fault)
                path.unlink()
        yield from self._log.open(uuid, token, sequence)

    def begin(self, token: bytes) -> None:
        if token != self._token:
            for kvmap in self._kvmaps.values():
                kvmap.adopt(token)
        self._token = token
        self._log.begin(token)

    def append(
        self,
        sequence: int,
        operation: bytes,
        data: bytes | bytearray | memoryview = b"",
        place: Place | None = None,
    ) -> Kept:
        found = self._room_for(place, len(data)) if place is not None and len(data) else None
        if found is None:
            return self._log.append(sequence, operation, data)
        kvmap, kept = found
        digest = checksum(data)
        copy(memoryview(data), kept.data)
        reference = Reference(kvmap.header.serial, kvmap.offset_of(kept), len(data), digest)
        self._log.append_reference(sequence, operation, reference)
        kvmap.last_sequence = sequence
        return Kept(kept.region, kept.start, kept.end, digest)

    def release(self, sequence: int) -> None:
        self._released = sequence
        self._log.release(sequence)

    def in_ring(self, extents: Iterable[InRing]) -> None:
        for new in extents:
            found = self._in_one_file(new)
            if found is not None:
                tokens = (new.offset + new.extent.size) // max(new.row_size, 1)
                self._hold(found[0], new.ino, new.offset, new.extent, found[1], tokens)

    def find(self, extent: Extent, *, is_use: bool) -> Sequence[Kept] | None:
        held = self._held.get(extent.extent_id)
        if held is None or held.checksum != extent.checksum:
            return None
        if not held.is_checked and not self._is_good(extent, held):
            return None
        if is_use:
            self._kvmaps.move_to_end(held.kvmap.header.serial)
            self.counters.hits += 1
            self.counters.hit_bytes += extent.size
        return held.pieces

    def forget(self, extents: Iterable[Extent]) -> None:
        self.forget_all(extent.extent_id for extent in extents)

    def forget_all(self, extent_ids: Iterable[int]) -> None:
        """What the ring has of them is dead, or there are none."""
        for extent_id in extent_ids:
            kvmap = self._let_go(extent_id)
            if kvmap is not None and not kvmap.extents and self._may_go(kvmap):
                self._evict(kvmap)

    def _let_go(self, extent_id: int) -> Kvmap | None:
        """The file that it was in: nobody must look at that who gives it up."""
        held = self._held.pop(extent_id, None)
        if held is None:
            return None
        held.kvmap.extents.discard(extent_id)
        return held.kvmap

    def extent_ids(self) -> list[int]:
        """Of all extents that can be found here."""
        return list(self._held)

    def close(self, *, keep: bool) -> None:
        self._log.close(keep=keep)
        if keep:
            self._spares.close()
            return
        # No thread may come to remove what leaves.
        for path in (*self._leaving, *(kvmap.path for kvmap in self._kvmaps.values())):
            path.unlink(missing_ok=True)
        # Last: what a thread finds no longer cannot become one.
        self._spares.close()
        # Also what a process left that was killed: the file goes before its directory does.
        for parent in self.directory.glob("*/"):
            with suppress(OSError):
                parent.rmdir()
        self._kvmaps.clear()
        self._current.clear()
        self._growing.clear()
        self._held.clear()
        self._by_region.clear()
        with suppress(OSError):
            self.directory.rmdir()

    def has_room(self, size: int) -> bool:
        """Whether the log has: it takes what finds no place in a warm file."""
        self._log.limit = self.limit - self._taken - self._spares.held
        if self._log.has_room(size):
            return True
        self._make_room(CHUNK_SIZE)
        self._log.limit = self.limit - self._taken - self._spares.held
        return self._log.has_room(size)

    # -- what is evicted

    def usage(self) -> WarmUsage:
        taken = self._taken + self._log.taken
        return WarmUsage(self.limit, taken, self.leases.total, self._spares.held)

    def taken_by(self, session: int) -> int:
        """What the warm files of a session take, in bytes."""
        return sum(kvmap.taken for kvmap in self._by_unit.get(session, {}).values())

    def make_room(self, size: int) -> bool:
        """Give up spares, then what is clean and was not used for the longest time, until so
        many bytes may be taken, and what the log takes next. Whether they may."""
        return self._make_room(size + self._log.takes_next)

    def _make_room(self, size: int) -> bool:
        if self._has_room(size):
            return True
        self._spares.give_back(self._lacking(size))
        if self._has_room(size):
            return True
        if self._all_dirty_since == self._released:
            return False
        named = chain.from_iterable(map(self._of_unit, self._victims(_NAMED)))
        for kvmap in chain(named, list(self._kvmaps.values())):
            if kvmap.header.serial in self._kvmaps and self._may_go(kvmap):
                self._evict(kvmap, may_wait=False)
                if self._has_room(size):
                    return True
        if not any(map(self._is_clean, self._kvmaps.values())):
            self._all_dirty_since = self._released  # until more is in the ring nothing can go
        return False

    @property
    def fill_pct(self) -> float:
        """How much of the limit is taken; spares make room for anything."""
        return 100 * (self._taken + self._log.taken) / self.limit

    def next_to_go(self, count: int) -> list[int]:
        """So many sessions as the policy names them; 0 stands for all pools."""
        few, all_of_them = max(_NAMED, count), len(self.policy)
        for named in (few, all_of_them):
            units = [unit for unit in self._victims(named) if self._is_idle(unit)]
            if len(units) >= count:
                break
        return units[:count]

    def _victims(self, count: int) -> list[int]:
        """As the policy names them. It is told of all uses: what has no memory here is none."""
        while True:
            victims: list[int] = self.policy.victims(count, self.clock()).tolist()
            absent = [unit for unit in victims if unit not in self._by_unit]
            if not absent:
                return victims
            self.policy.remove(absent)

    def _of_unit(self, unit: int) -> list[Kvmap]:
        return list(self._by_unit.get(unit, {}).values())

    def _is_idle(self, unit: int) -> bool:
        """Pools are, as long as a part of their memory is: they go in parts."""
        is_used = [kvmap.users > 0 for kvmap in self._of_unit(unit)]
        return not (any(is_used) if unit else all(is_used))

    def evict_unit(self, unit: int) -> int:
        """Give up the memory of a session, as far as it is in the ring and nobody has it
        mapped; of the pools, which are all one, a part that was not used for the longest time.
        Returns the bytes."""
        going = self._of_unit(unit)
        if not unit:
            by_use = [kvmap for kvmap in self._kvmaps.values() if not kvmap.header.unit]
            idle = [kvmap for kvmap in by_use if self._may_go(kvmap)]
            going = idle[: -(-len(by_use) // _POOL_SHARE)]
        return sum(self._evict(kvmap) for kvmap in going if self._may_go(kvmap))

    def evict_extents(self, extent_ids: Iterable[int]) -> int:
        """The same for the files of memory that hold any of these."""
        held = map(self._held.get, extent_ids)
        kvmaps = {one.kvmap.header.serial: one.kvmap for one in held if one is not None}
        return sum(self._evict(kvmap) for kvmap in kvmaps.values() if self._may_go(kvmap))

    def _evict(self, kvmap: Kvmap, *, may_wait: bool = True) -> int:
        """Its memory is free, or waits for its next use, once nobody looks at it any longer."""
        self._growing.pop(kvmap.header.serial, None)
        del self._kvmaps[kvmap.header.serial]
        if self._current.get(kvmap.header.unit) is kvmap:
            del self._current[kvmap.header.unit]
        for extent_id in kvmap.extents:
            if self._held[extent_id].kvmap is kvmap:
                del self._held[extent_id]
        for region in map(id, kvmap.regions):
            del self._by_region[region]
        of_unit = self._by_unit[kvmap.header.unit]
        del of_unit[kvmap.header.serial]
        if not of_unit:
            del self._by_unit[kvmap.header.unit]
            self.policy.remove([kvmap.header.unit])
        self.leases.gone(kvmap)
        self._taken -= kvmap.taken
        self.counters.evicted_files += 1
        self.counters.evicted += kvmap.taken
        self.on_evicted(kvmap.header.unit)
        # To give pages back takes longer than a request may wait.
        self._leaving.add(kvmap.path)
        # What others were told of must not show them what comes there next.
        may_wait = may_wait and not kvmap.was_shown and not kvmap.is_being_made
        spare = self._spares.expect(kvmap.taken) if may_wait else None
        removal = self.executor.submit(_Removal(kvmap, spare))
        removal.when_done(partial(self._removed, kvmap.path, spare, removal))
        return kvmap.taken

    def _removed(self, path: Path, spare: Spare | None, removal: Completion[bool]) -> None:
        self._leaving.discard(path)
        if spare is not None:
            self._spares.came(spare, is_there=removal.error is None and removal.result())

    # -- memory that waits

    def tick(self) -> None:
        """Call about once a second."""
        self._cut_tails()
        self._give_up_empty()
        self._spares.give_back_idle()
        is_quiet = self._taken <= self._taken_before
        self._taken_before = self._taken
        if is_quiet:
            self._stock()

    def _stock(self) -> None:
        """Have memory made ready, one file after the other, while nobody takes any."""
        size = self._spares.lacks
        is_quiet = self._taken <= self._taken_before
        if not size or not is_quiet or not self._uuid or self.fill_pct > _STOCK_FILL_PCT:
            return
        try:
            if not self._has_room(size + self._log.takes_next):
                return
            coming = self._spares.stock(size)
        except OSError as failure:
            log.debug("no memory is made ready: %s", failure)
            return
        if coming is not None:
            coming.when_done(lambda: self._stock() if coming.result() else None)

    def _cut_tails(self) -> None:
        """Who does not write on keeps no memory for what would come."""
        now = self.clock()
        for one in list(self._growing.values()):
            kvmap = one.kvmap
            if kvmap.used != one.used:
                one.used, one.since = kvmap.used, now
            is_current = self._current.get(kvmap.header.unit) is kvmap
            if not is_current or now - one.since >= _GROWING_SECONDS:
                with suppress(OSError):
                    self._changing(kvmap, partial(kvmap.cut_tail, _TAIL_CUT_MAX))
            if kvmap.tail < UNIT:
                del self._growing[kvmap.header.serial]

    def _give_up_empty(self) -> None:
        """Files of memory whose data was removed before it came into the ring: nothing is found
        there, and nothing will be. Not at once, as what is made ready begins so."""
        empty = {
            serial
            for serial, kvmap in self._kvmaps.items()
            if not kvmap.extents and self._may_go(kvmap)
        }
        for serial in empty & self._empty_before:
            self._evict(self._kvmaps[serial])
        self._empty_before = empty

    # -- what is brought in from the ring

    def make_ready(self, unit: int, size: int, *, is_guess: bool = False) -> Step[None]:
        """Have memory for so many bytes of a session made ready at once, in a thread: in large
        pages, where there are any. A guess can wait, and leaves spares to who writes."""
        size = min(size, self._file_max(unit))
        kvmap = self._file_for(self._current.get(unit), unit, size, may_be_spare=not is_guess)
        if kvmap is None or kvmap.room >= size:
            return
        if kvmap.tail:
            size = min(size, kvmap.tail)
        with kvmap.in_use():
            if not self.make_room(kvmap.growth(size)):
                return
            coming = self._changing(kvmap, partial(kvmap.prepare, size, self.executor.submit))
            if not coming.done:
                yield coming
            self._changing(kvmap, kvmap.begin_prepared)

    def reserve(self, place: Place, size: int) -> Step[Filling | None]:
        """Block-aligned memory for so many bytes of a file, to be filled, in a warm file that
        stays until `filled`. None when there is no room for it."""
        place = replace(place, offset=place.offset // BLOCK * BLOCK)
        kvmap = self._current.get(place.unit)
        kept = None if kvmap is None else kvmap.place(place, size)
        if kvmap is not None and kept is not None:
            kvmap.users += 1
            return Filling(kvmap, place, kept)
        needed = size + 2 * alignment(place.unit)
        kvmap = self._file_for(kvmap, place.unit, needed)
        if kvmap is None:
            return None
        kvmap.users += 1
        try:
            kept = yield from self._room_to_fill(kvmap, place, size)
        except BaseException:
            kvmap.users -= 1
            raise
        if kept is None:
            kvmap.users -= 1
            return None
        return Filling(kvmap, place, kept)

    def _room_to_fill(self, kvmap: Kvmap, place: Place, size: int) -> Step[Kept | None]:
        needed = size + 2 * alignment(place.unit)
        if kvmap.room < needed:
            if not self.make_room(kvmap.growth(needed)):
                return None
            prepare = partial(kvmap.prepare, needed, self.executor.submit)
            coming = self._changing(kvmap, prepare)
            if not coming.done:
                yield coming
        try:
            if kvmap.room < needed:
                self._changing(kvmap, partial(kvmap.grow, needed))
        except OSError as failure:
            log.debug("no room in the warm tier: %s", failure)
        return kvmap.place(place, size)

    def filled(self, filling: Filling, extents: list[tuple[int, Extent, int]]) -> None:
        """The extents at these offsets of the file are there, each from so many bytes on."""
        filling.kvmap.users -= 1
        for offset, extent, start in extents:
            part = filling.kept.part(start, start + extent.size)
            known = self._held.get(extent.extent_id)
            if known is None or known.checksum != extent.checksum:
                self._hold(filling.kvmap, filling.place.ino, offset, extent, [part], 0)
                self.counters.promoted += extent.size

    def holds(self, serial: int) -> bool:
        """Whether the file of memory with this number was not given up."""
        return serial in self._kvmaps

    # -- what others map

    def segments(self, parts: Sequence[Kept]) -> list[MapSegment] | None:
        """Where the parts of a file lie; None when one of them is not in a warm file."""
        segments: list[MapSegment] = []
        kvmap, begin, end, first, at = None, 0, 0, 0, 0
        for part in parts:
            owner = self._by_region.get(id(part.region))
            if owner is None:
                return None
            owner.was_shown = True
            offset = owner.offset_of(part)
            if owner is not kvmap or offset != end:
                if kvmap is not None:
                    segments.append(MapSegment(kvmap.path, begin, end - begin, first))
                kvmap, begin, first = owner, offset, at
            end = offset + len(part)
            at += len(part)
        if kvmap is not None:
            segments.append(MapSegment(kvmap.path, begin, end - begin, first))
        return segments

    def lease(self, ino: int, parts: Sequence[Kept]) -> list[MapSegment] | None:
        """The same, and from now on they stay until `leases.end`. None also when too much is
        lent already."""
        segments = self.segments(parts)
        if segments is None or not self.leases.give(ino, self._kvmaps_of(parts)):
            return None
        return segments

    def show(self, files: Iterable[Sequence[Kept]]) -> list[list[MapSegment] | None]:
        """The same of several files for who copies them at once: they may go meanwhile, which
        takes nothing from who has them mapped. None for all when too much is lent already."""
        files = list(files)
        segments = [self.segments(parts) for parts in files]
        shown = (
            part for parts, found in zip(files, segments, strict=True) if found for part in parts
        )
        return segments if self.leases.show(self._kvmaps_of(shown)) else [None] * len(files)

    def _kvmaps_of(self, parts: Iterable[Kept]) -> Collection[Kvmap]:
        kvmaps = (self._by_region[id(part.region)] for part in parts)
        return {kvmap.header.serial: kvmap for kvmap in kvmaps}.values()

    # -- details

    def _room_for(self, place: Place, length: int) -> tuple[Kvmap, Kept] | None:
        """Memory in a warm file of the session, if there is any."""
        kvmap = self._current.get(place.unit)
        kept = None if kvmap is None else kvmap.place(place, length)
        if kept is None:
            kvmap = self._with_room(kvmap, place.unit, length)
            kept = None if kvmap is None else kvmap.place(place, length)
        if kvmap is None or kept is None:
            return None
        if kvmap.room < kvmap.next_span // 2 and not kvmap.is_prepared:
            self._prepare(kvmap, max(kvmap.next_span, length + 2 * alignment(place.unit)))
        return kvmap, kept

    def _with_room(self, kvmap: Kvmap | None, unit: int, length: int) -> Kvmap | None:
        needed = length + 2 * alignment(unit)
        kvmap = self._file_for(kvmap, unit, needed)
        if kvmap is None or kvmap.room >= needed:
            return kvmap
        if kvmap.tail:
            needed = max(needed, min(kvmap.next_span, _TOUCHED_SPAN))
        with kvmap.in_use():
            if not self.make_room(kvmap.growth(needed)):
                return None
        try:
            self._changing(kvmap, partial(kvmap.grow, needed))
        except OSError as failure:
            log.debug("no room in the warm tier: %s", failure)
            return None
        return kvmap

    def _file_for(
        self, kvmap: Kvmap | None, unit: int, size: int, *, may_be_spare: bool = True
    ) -> Kvmap | None:
        """The file of a session that so many bytes go to: the one that it has, if there is
        one that may grow so far, or the next one."""
        if kvmap is not None and kvmap.room >= size:
            return kvmap
        try:
            if may_be_spare and self._wants_spare(kvmap, unit, size):
                reused = self._reuse(unit, size)
                if reused is not None:
                    return reused
            if kvmap is not None and not self._is_full(kvmap, size):
                return kvmap
            return self._create(unit) if self.make_room(SIZE_MIN) else None
        except OSError as failure:
            log.debug("no room in the warm tier: %s", failure)
            return None

    def _wants_spare(self, kvmap: Kvmap | None, unit: int, size: int) -> bool:
        """Whether a session is so large, or a pool so busy, that it should have touched memory, if
        there is any, rather than fresh."""
        if not self._spares.has(self._file_max(unit)):
            return False
        if kvmap is None:
            return size >= _LARGE_MIN or not unit
        is_large = max(size, kvmap.taken) >= UNIT or not unit
        return is_large and not kvmap.is_prepared and kvmap.growth(size) > 0

    def _reuse(self, unit: int, size: int) -> Kvmap | None:
        """The next file of a session, in touched memory. Raises OSError."""
        # The log's next chunk comes first.
        self._spares.give_back(self._lacking(self._log.takes_next))
        if not self._has_room(self._log.takes_next):
            return None
        spare = self._spares.take(size + SIZE_MIN, self._file_max(unit))
        if spare is None:
            return None
        header = self._next_header(unit)
        path = self._path(unit, header.serial)
        kvmap = self._begin(Kvmap.reuse(spare.path, spare.size, path, header))
        self._growing[header.serial] = _Growing(kvmap, kvmap.used, self.clock())
        return kvmap

    def _prepare(self, kvmap: Kvmap, size: int) -> None:
        """What was just placed in it is not counted as dirty yet: it must not go itself."""
        unit = kvmap.header.unit
        if self._is_full(kvmap, size) or self._wants_spare(kvmap, unit, size):
            return
        with kvmap.in_use():
            if self.make_room(kvmap.growth(size)):
                self._changing(kvmap, partial(kvmap.prepare, size, self.executor.submit))

    def _changing(self, kvmap: Kvmap, change: Callable[[], T]) -> T:
        """Keep account of what a file takes, and of its memory."""
        before, regions = kvmap.taken, len(kvmap.regions)
        try:
            return change()
        finally:
            self._taken += kvmap.taken - before
            for region in kvmap.regions[regions:]:
                self._by_region[id(region)] = kvmap

    def _create(self, unit: int) -> Kvmap:
        header = self._next_header(unit)
        return self._begin(Kvmap.create(self._path(unit, header.serial), header))

    def _next_header(self, unit: int) -> KvmapHeader:
        self._serial += 1
        return KvmapHeader(self._uuid, self._token, self._serial, unit, time.time_ns())

    def _begin(self, kvmap: Kvmap) -> Kvmap:
        self._add(kvmap)
        self._current[kvmap.header.unit] = kvmap
        return kvmap

    def _add(self, kvmap: Kvmap) -> None:
        unit = kvmap.header.unit
        self._all_dirty_since = None
        self._kvmaps[kvmap.header.serial] = kvmap
        self._by_unit.setdefault(unit, {})[kvmap.header.serial] = kvmap
        self.policy.touch([unit], self.clock())
        self._taken += kvmap.taken
        for region in kvmap.regions:
            self._by_region[id(region)] = kvmap

    def _path(self, unit: int, serial: int) -> Path:
        """A name is used once, also after other mounts: who was told of it may look later, and must
        not find another file there."""
        name = f"{unit or 'pool'}.{serial:016x}{_SUFFIX}"
        return self.directory / str(self.shards.of(unit)) / name

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob(f"*/*{_SUFFIX}")) if self.directory.is_dir() else []

    def _file_max(self, unit: int) -> int:
        share = self.limit // _SESSION_SHARE
        return share if unit else min(share, _POOL_FILE_MAX)

    def _is_full(self, kvmap: Kvmap, size: int) -> bool:
        """Whether another file is to take so many bytes. What others have mapped does not grow
        beyond their share."""
        growth = kvmap.growth(size)
        if kvmap.leases and self.leases.total + growth > self.leases.limit:
            return True
        end = kvmap.taken - kvmap.tail + size
        return growth > 0 and end > self._file_max(kvmap.header.unit)

    def _take_over(self, kvmap: Kvmap) -> None:
        self._add(kvmap)
        for entry in kvmap.entries():
            kept = kvmap.at(entry.start, entry.size)
            assert kept is not None
            kept = replace(kept, digest=entry.digest)
            known = self._held.get(entry.extent_id)
            if known is not None and known.kvmap is not kvmap:
                continue
            pieces = () if known is None else known.pieces
            held = _Held(kvmap, (*pieces, kept), entry.checksum, is_checked=False)
            self._held[entry.extent_id] = held
            kvmap.extents.add(entry.extent_id)
            self.counters.taken_over += entry.size

    def _resolve(self, reference: Reference, sequence: int) -> Kept | None:
        kvmap = self._kvmaps.get(reference.serial)
        kept = None if kvmap is None else kvmap.at(reference.offset, reference.length)
        if kvmap is None or kept is None or checksum(kept.data) != reference.digest:
            return None
        kvmap.last_sequence = max(kvmap.last_sequence, sequence)
        return Kept(kept.region, kept.start, kept.end, reference.digest)

    def _in_one_file(self, new: InRing) -> tuple[Kvmap, list[Kept]] | None:
        """A warm file and the pieces of an extent in it: put together in the last of its files
        when it was written to several."""
        kvmaps = [self._by_region.get(id(piece.region)) for piece in new.pieces]
        last = kvmaps[-1]
        if last is None or None in kvmaps:
            return None
        if all(kvmap is last for kvmap in kvmaps):
            return last, new.pieces
        place = Place(last.header.unit, new.ino, new.offset)
        whole = last.place(place, sum(map(len, new.pieces)))
        if whole is None:
            return None
        at = 0
        for piece in new.pieces:
            copy(piece.data, whole.data[at : at + len(piece)])
            at += len(piece)
        return last, [whole]

    def _hold(
        self,
        kvmap: Kvmap,
        ino: int,
        offset: int,
        extent: Extent,
        pieces: Sequence[Kept],
        tokens: int,
    ) -> None:
        is_raw = extent.is_raw and len(pieces) == 1
        for piece in pieces:
            entry = KvmapEntry(
                ino, extent.extent_id, offset, kvmap.offset_of(piece), len(piece), extent.checksum,
                extent.checksum if is_raw else checksum(piece.data),
            )  # fmt: skip
            offset += len(piece)
            with suppress(OSError):  # the next process will not find it
                self._changing(kvmap, partial(kvmap.note, entry, tokens))
        old = self._held.get(extent.extent_id)
        if old is not None:  # of another history of this ring, which was restored from a copy
            old.kvmap.extents.discard(extent.extent_id)
        self._held[extent.extent_id] = _Held(kvmap, tuple(pieces), extent.checksum)
        kvmap.extents.add(extent.extent_id)
        self._spares.give_back(self._excess)  # nobody asked whether there is room for a table

    def _is_good(self, extent: Extent, held: _Held) -> bool:
        """What an earlier process left is looked at before it is believed."""
        is_whole = sum(map(len, held.pieces)) == extent.size
        if is_whole and all(checksum(piece.data) == piece.digest for piece in held.pieces):
            self._held[extent.extent_id] = replace(held, is_checked=True)
            return True
        log.error("the warm copy of extent %d fails its checksum", extent.extent_id)
        self.counters.damaged += 1
        del self._held[extent.extent_id]
        held.kvmap.extents.discard(extent.extent_id)
        return False

    def _is_clean(self, kvmap: Kvmap) -> bool:
        return kvmap.last_sequence <= self._released

    def _may_go(self, kvmap: Kvmap) -> bool:
        return not kvmap.users and self._is_clean(kvmap)

    def _has_room(self, size: int) -> bool:
        return self._lacking(size) <= 0

    def _lacking(self, size: int) -> int:
        """How many bytes have to be given up before so many may be taken."""
        lacking = self._excess + size
        if lacking > 0:
            return lacking
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.statvfs(self.directory)
        return size - status.f_bavail * status.f_frsize

    @property
    def _excess(self) -> int:
        """How much more is taken than may be, in bytes; negative when it is less."""
        return self._taken + self._log.taken + self._spares.held - self.limit

"""The warm tier: file data in RAM, before it is in the ring and after.

What is written lands in a warm file of its session (kvmap.py) and is answered once the
operation log (oplog.py) refers to it. When it is in the ring it stays here, clean, to be
read, until a file of data that nobody used for longer has to go. A file that nobody wrote
to since what it holds came into the ring is clean, and is given up whole.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from cachetools import LRUCache, TTLCache

from kvfs.engine.buffer import BufferedOperation, InRing, Kept, Place
from kvfs.engine.buffers import copy
from kvfs.engine.codec import Codec
from kvfs.engine.format import (
    BLOCK,
    Extent,
    FormatError,
    KvmapEntry,
    KvmapHeader,
    checksum,
)
from kvfs.engine.io import Executor, Step
from kvfs.engine.policy import Policy
from kvfs.tiers.kvmap import SIZE_MIN, Kvmap, alignment
from kvfs.tiers.oplog import CHUNK_SIZE, OperationLog, Reference, current_boot
from kvfs.tiers.policy import LRU
from kvfs.tiers.shards import Shards

log = logging.getLogger(__name__)
T = TypeVar("T")

_POOL_FILE_MAX = 64 * 1024 * 1024
_POOL_SHARE = 8  # one part in so many of the pools' memory goes at once
_SESSION_SHARE = 8  # of the limit: one part in so many is the most that one file holds
_SUFFIX = ".kvmap"
_IDLE_SHARE = 16  # of the limit: one part in so many may be chunks of the log that wait
_IDLE_MAX = 4
_NAMED = 64  # victims that are asked for at once
_SHOWN_SECONDS = 10  # so long at most does it take to copy what was shown
_SHOWN_MAX = 65_536
_NAMES_MAX = 65_536  # sessions whose plain name is known to have been used


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
    mapped of that."""

    limit: int
    taken: int
    leased: int


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
    """Runs in a thread, and has the last word of the file's memory."""

    kvmap: Kvmap | None

    def __call__(self) -> None:
        kvmap, self.kvmap = self.kvmap, None
        assert kvmap is not None
        kvmap.path.unlink(missing_ok=True)
        with suppress(OSError):
            kvmap.path.parent.rmdir()
        kvmap.regions.clear()


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
    policy: Policy = field(default_factory=LRU)
    clock: Callable[[], float] = time.monotonic
    on_evicted: Callable[[int], None] = field(default=lambda unit: None)
    _log: OperationLog = field(init=False)
    _uuid: bytes = b""
    _token: bytes = b""
    _released: int = -1
    _all_dirty_since: int | None = None
    _serial: int = 0
    _taken: int = 0
    _kvmaps: OrderedDict[int, Kvmap] = field(default_factory=OrderedDict)
    _by_unit: dict[int, dict[int, Kvmap]] = field(default_factory=dict)
    _current: dict[int, Kvmap] = field(default_factory=dict)
    _by_region: dict[int, Kvmap] = field(default_factory=dict)
    _held: dict[int, _Held] = field(default_factory=dict)
    _leaving: set[Path] = field(default_factory=set)
    _named: LRUCache[int, None] = field(default_factory=lambda: LRUCache(_NAMES_MAX))
    _leases: dict[int, dict[int, Kvmap]] = field(default_factory=dict)
    _leased: dict[int, Kvmap] = field(default_factory=dict)
    _shown: TTLCache[int, int] = field(init=False)  # bytes by the serial of a warm file

    def __post_init__(self) -> None:
        self._shown = TTLCache(_SHOWN_MAX, _SHOWN_SECONDS, self.clock)
        idle = min(max(self.limit // (_IDLE_SHARE * CHUNK_SIZE), 1), _IDLE_MAX)
        self._log = OperationLog(self.directory / "log", self.limit, self.boot, self._resolve, idle)

    # -- kvfs.engine.buffer.Buffer

    @property
    def home(self) -> bytes:
        return self._log.home

    def left_at(self, home: bytes) -> str | None:
        return self._log.left_at(home)

    def open(self, uuid: bytes, token: bytes, sequence: int) -> Iterator[BufferedOperation]:
        self._uuid, self._token = uuid, token
        self._released = sequence
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
            kvmap = self._by_region.get(id(new.pieces[0].region))
            where = {id(self._by_region.get(id(piece.region))) for piece in new.pieces}
            if kvmap is not None and len(where) == 1:
                tokens = (new.offset + new.extent.size) // max(new.row_size, 1)
                self._hold(kvmap, new.ino, new.offset, new.extent, new.pieces, tokens)

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
        for extent in extents:
            held = self._held.pop(extent.extent_id, None)
            if held is not None:
                held.kvmap.extents.discard(extent.extent_id)
                if not held.kvmap.extents and self._may_go(held.kvmap):
                    self._evict(held.kvmap)

    def close(self, *, keep: bool) -> None:
        self._log.close(keep=keep)
        if keep:
            return
        # No thread may come to remove what leaves.
        for path in (*self._leaving, *(kvmap.path for kvmap in self._kvmaps.values())):
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
        self._kvmaps.clear()
        self._current.clear()
        self._held.clear()
        self._by_region.clear()
        with suppress(OSError):
            self.directory.rmdir()

    def has_room(self, size: int) -> bool:
        """Whether the log has: it takes what finds no place in a warm file."""
        self._log.limit = self.limit - self._taken
        if self._log.has_room(size):
            return True
        self._make_room(CHUNK_SIZE)
        self._log.limit = self.limit - self._taken
        return self._log.has_room(size)

    # -- what is evicted

    def usage(self) -> WarmUsage:
        return WarmUsage(self.limit, self._taken + self._log.taken, self.leased)

    def make_room(self, size: int) -> bool:
        """Evict what is clean and was not used for the longest time, until so many bytes may
        be taken, and what the log takes next. Whether they may."""
        return self._make_room(size + self._log.takes_next)

    def _make_room(self, size: int) -> bool:
        if self._has_room(size):
            return True
        if self._all_dirty_since == self._released:
            return False
        named = chain.from_iterable(map(self._of_unit, self._victims(_NAMED)))
        for kvmap in chain(named, list(self._kvmaps.values())):
            if kvmap.header.serial in self._kvmaps and self._may_go(kvmap):
                self._evict(kvmap)
                if self._has_room(size):
                    return True
        if not any(map(self._is_clean, self._kvmaps.values())):
            self._all_dirty_since = self._released  # until more is in the ring nothing can go
        return False

    @property
    def fill_pct(self) -> float:
        """How much of the limit is taken."""
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
        return not any(kvmap.users for kvmap in self._of_unit(unit))

    def evict_unit(self, unit: int) -> int:
        """Give up the memory of a session, as far as it is in the ring and nobody has it
        mapped; of the pools, which are all one, a part that was not used for the longest time.
        Returns the bytes."""
        going = self._of_unit(unit)
        if not unit:
            by_use = [kvmap for kvmap in self._kvmaps.values() if not kvmap.header.unit]
            going = by_use[: -(-len(by_use) // _POOL_SHARE)]
        return sum(self._evict(kvmap) for kvmap in going if self._may_go(kvmap))

    def evict_extents(self, extents: Iterable[Extent]) -> int:
        """The same for the files of memory that hold any of these."""
        held = (self._held.get(extent.extent_id) for extent in extents)
        kvmaps = {one.kvmap.header.serial: one.kvmap for one in held if one is not None}
        return sum(self._evict(kvmap) for kvmap in kvmaps.values() if self._may_go(kvmap))

    def _evict(self, kvmap: Kvmap) -> int:
        """Its memory is free once nobody looks at it any longer."""
        del self._kvmaps[kvmap.header.serial]
        if self._current.get(kvmap.header.unit) is kvmap:
            del self._current[kvmap.header.unit]
        for extent_id in kvmap.extents:
            if self._held[extent_id].kvmap is kvmap:
                del self._held[extent_id]
        for region in kvmap.regions:
            del self._by_region[id(region)]
        of_unit = self._by_unit[kvmap.header.unit]
        del of_unit[kvmap.header.serial]
        if not of_unit:
            del self._by_unit[kvmap.header.unit]
            self.policy.remove([kvmap.header.unit])
        self._shown.pop(kvmap.header.serial, None)
        self._taken -= kvmap.taken
        self.counters.evicted_files += 1
        self.counters.evicted += kvmap.taken
        self.on_evicted(kvmap.header.unit)
        # To give pages back takes longer than a request may wait.
        self._leaving.add(kvmap.path)
        removal = self.executor.submit(_Removal(kvmap))
        removal.when_done(partial(self._leaving.discard, kvmap.path))
        return kvmap.taken

    # -- what is brought in from the ring

    def make_ready(self, unit: int, size: int) -> Step[None]:
        """Have memory for so many bytes of a session made ready at once, in a thread: in large
        pages, where there are any."""
        size = min(size, self._file_max(unit))
        kvmap = self._current.get(unit)
        if kvmap is None or self._is_full(kvmap, size):
            kvmap = self._with_room(None, unit, 0)
        if kvmap is None or kvmap.room >= size:
            return
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
        if kvmap is None or self._is_full(kvmap, size):
            kvmap = self._with_room(None, place.unit, 0)
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

    # -- what others map

    def segments(self, parts: list[Kept]) -> list[MapSegment] | None:
        """Where the parts of a file lie; None when one of them is not in a warm file."""
        segments: list[MapSegment] = []
        at = 0
        for part in parts:
            kvmap = self._by_region.get(id(part.region))
            if kvmap is None:
                return None
            offset = kvmap.offset_of(part)
            last = segments[-1] if segments else None
            if last and last.path == kvmap.path and last.offset + last.length == offset:
                segments[-1] = replace(last, length=last.length + len(part))
            else:
                segments.append(MapSegment(kvmap.path, offset, len(part), at))
            at += len(part)
        return segments

    def lease(self, ino: int, parts: list[Kept]) -> list[MapSegment] | None:
        """The same, and from now on they stay until `end_lease`. None also when too much is
        leased already."""
        segments = self.segments(parts)
        if segments is None:
            return None
        kvmaps = self._kvmaps_of(parts)
        if not self._may_lease(kvmaps):
            return None
        mine = self._leases.setdefault(ino, {})
        for serial, kvmap in kvmaps.items():
            if serial not in mine:
                mine[serial] = self._leased[serial] = kvmap
                kvmap.users += 1
                kvmap.leases += 1
        return segments

    def show(self, parts: list[Kept]) -> list[MapSegment] | None:
        """The same for who copies them at once: they may go meanwhile, which takes nothing from
        who has them mapped, and count as leased for a few seconds."""
        segments = self.segments(parts)
        if segments is None:
            return None
        kvmaps = self._kvmaps_of(parts)
        if not self._may_lease(kvmaps):
            return None
        for serial, kvmap in kvmaps.items():
            self._shown[serial] = kvmap.taken
        return segments

    def _kvmaps_of(self, parts: list[Kept]) -> dict[int, Kvmap]:
        kvmaps = (self._by_region[id(part.region)] for part in parts)
        return {kvmap.header.serial: kvmap for kvmap in kvmaps}

    def _may_lease(self, kvmaps: dict[int, Kvmap]) -> bool:
        """At most half of the memory is lent."""
        known = self._leased.keys() | self._shown.keys()
        added = sum(kvmap.taken for serial, kvmap in kvmaps.items() if serial not in known)
        return self.leased + added <= self.limit // 2

    def end_lease(self, ino: int) -> None:
        """Nobody has the file open any longer."""
        for kvmap in self._leases.pop(ino, {}).values():
            kvmap.users -= 1
            kvmap.leases -= 1
            if not kvmap.leases:
                del self._leased[kvmap.header.serial]

    @property
    def leased(self) -> int:
        """Bytes of warm files that others may have mapped."""
        shown = sum(taken for serial, taken in self._shown.items() if serial not in self._leased)
        return shown + sum(kvmap.taken for kvmap in self._leased.values())

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
        try:
            if kvmap is None or self._is_full(kvmap, needed):
                if not self.make_room(SIZE_MIN):
                    return None
                kvmap = self._create(unit)
            if kvmap.room < needed:
                with kvmap.in_use():
                    if not self.make_room(kvmap.growth(needed)):
                        return None
                self._changing(kvmap, partial(kvmap.grow, needed))
        except OSError as failure:
            log.debug("no room in the warm tier: %s", failure)
            return None
        return kvmap

    def _prepare(self, kvmap: Kvmap, size: int) -> None:
        """What was just placed in it is not counted as dirty yet: it must not go itself."""
        if self._is_full(kvmap, size):
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
        self._serial += 1
        header = KvmapHeader(self._uuid, self._token, self._serial, unit, time.time_ns())
        kvmap = Kvmap.create(self._path(unit, self._serial), header)
        self._add(kvmap)
        self._current[unit] = kvmap
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
        """A name is used once: who was told of it may look later, and must not find another file
        there."""
        path = self.directory / str(self.shards.of(unit)) / f"{unit or 'pool'}{_SUFFIX}"
        if unit and unit not in self._named and not path.exists():
            self._named[unit] = None
            return path
        return path.with_suffix(f".{serial}{_SUFFIX}")

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob(f"*/*{_SUFFIX}")) if self.directory.is_dir() else []

    def _file_max(self, unit: int) -> int:
        share = self.limit // _SESSION_SHARE
        return share if unit else min(share, _POOL_FILE_MAX)

    def _is_full(self, kvmap: Kvmap, size: int) -> bool:
        """Whether another file is to take so many bytes. What others have mapped does not grow
        beyond their share."""
        growth = kvmap.growth(size)
        if kvmap.leases and self.leased + growth > self.limit // 2:
            return True
        return kvmap.taken + size > self._file_max(kvmap.header.unit)

    def _take_over(self, kvmap: Kvmap) -> None:
        self._serial = max(self._serial, kvmap.header.serial)
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

    def _hold(
        self,
        kvmap: Kvmap,
        ino: int,
        offset: int,
        extent: Extent,
        pieces: Sequence[Kept],
        tokens: int,
    ) -> None:
        is_raw = extent.codec == Codec.NONE and len(pieces) == 1
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
        if self._taken + self._log.taken + size > self.limit:
            return False
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize >= size

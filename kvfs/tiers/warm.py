"""The warm tier: file data in RAM, before it is in the ring and after.

What is written lands in a warm file of its session (kvmap.py) and is answered once the
operation log (oplog.py) refers to it. When it is in the ring it stays here, clean, to be
read, until a file of data that nobody used for longer has to go. A file that nobody wrote
to since what it holds came into the ring is clean, and is given up whole.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.engine.buffer import BufferedOperation, InRing, Kept, Place
from kvfs.engine.buffers import copy
from kvfs.engine.codec import Codec
from kvfs.engine.format import (
    KVMAP_DATA_START,
    KVMAP_SEGMENT_ALIGN,
    Extent,
    FormatError,
    KvmapEntry,
    KvmapHeader,
    checksum,
)
from kvfs.engine.io import Executor
from kvfs.tiers.kvmap import Kvmap
from kvfs.tiers.oplog import CHUNK_SIZE, OperationLog, Reference, current_boot

log = logging.getLogger(__name__)

SHARDS = 65_536
_POOL_FILE_MAX = 64 * 1024 * 1024
_SESSION_SHARE = 8  # of the limit: one part in so many is the most that one file holds
_LOG_ROOM = 2 * CHUNK_SIZE
_SUFFIX = ".kvmap"


def shard_of(unit: int, shards: int = SHARDS) -> int:
    """The directory of a session's warm files."""
    return int(hashlib.md5(str(unit).encode(), usedforsecurity=False).hexdigest()[:8], 16) % shards


@dataclass(frozen=True, slots=True)
class _Held:
    """The bytes of an extent, and the checksums that they and their extent have. `digest` is
    None once it was looked at."""

    kvmap: Kvmap
    kept: Kept
    checksum: int
    digest: int | None = None


@dataclass(slots=True)
class WarmCounters:
    """Since the mount; sizes in bytes."""

    hits: int = 0
    hit_bytes: int = 0
    evicted_files: int = 0
    evicted: int = 0
    taken_over: int = 0
    damaged: int = 0


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
    `fill_pct`: above it the least recently used goes."""

    directory: Path
    limit: int
    executor: Executor
    boot: str = field(default_factory=current_boot)
    counters: WarmCounters = field(default_factory=WarmCounters)
    _log: OperationLog = field(init=False)
    _uuid: bytes = b""
    _token: bytes = b""
    _released: int = -1
    _serial: int = 0
    _taken: int = 0
    _kvmaps: OrderedDict[int, Kvmap] = field(default_factory=OrderedDict)
    _current: dict[int, Kvmap] = field(default_factory=dict)
    _by_region: dict[int, Kvmap] = field(default_factory=dict)
    _held: dict[int, _Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._log = OperationLog(self.directory / "log", self.limit, self.boot, self._resolve)

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
            if kvmap is not None and len(new.pieces) == 1:
                tokens = (new.offset + new.extent.size) // max(new.row_size, 1)
                self._hold(kvmap, new.ino, new.offset, new.extent, new.pieces[0], tokens)

    def find(self, extent: Extent) -> Kept | None:
        held = self._held.get(extent.extent_id)
        if held is None or held.checksum != extent.checksum:
            return None
        if held.digest is not None and not self._is_good(extent, held):
            return None
        self._kvmaps.move_to_end(held.kvmap.header.serial)
        self.counters.hits += 1
        self.counters.hit_bytes += len(held.kept)
        return held.kept

    def forget(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            held = self._held.pop(extent.extent_id, None)
            if held is not None:
                del held.kvmap.extents[extent.extent_id]
                if not held.kvmap.extents and self._is_clean(held.kvmap):
                    self.evict(held.kvmap)

    def close(self, *, keep: bool) -> None:
        self._log.close(keep=keep)
        if keep:
            return
        for kvmap in list(self._kvmaps.values()):
            kvmap.path.unlink(missing_ok=True)
            with suppress(OSError):
                kvmap.path.parent.rmdir()
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
        self.make_room(_LOG_ROOM)
        self._log.limit = self.limit - self._taken
        return self._log.has_room(size)

    # -- what is evicted

    @property
    def taken(self) -> int:
        """Bytes of the tmpfs that warm files take."""
        return self._taken

    def make_room(self, size: int) -> bool:
        """Evict what is clean and was not used for the longest time, until so many bytes may
        be taken. Whether they may."""
        if self._has_room(size):
            return True
        for kvmap in list(self._kvmaps.values()):
            if self._is_clean(kvmap):
                self.evict(kvmap)
                if self._has_room(size):
                    return True
        return False

    def evict(self, kvmap: Kvmap) -> None:
        """Its memory is free once nobody looks at it any longer."""
        assert self._is_clean(kvmap), "what the ring lacks is only here"
        del self._kvmaps[kvmap.header.serial]
        if self._current.get(kvmap.header.unit) is kvmap:
            del self._current[kvmap.header.unit]
        for extent_id in kvmap.extents:
            del self._held[extent_id]
        for region in kvmap.regions:
            del self._by_region[id(region)]
        self._taken -= kvmap.taken
        self.counters.evicted_files += 1
        self.counters.evicted += kvmap.taken
        # To give pages back takes longer than a request may wait.
        self.executor.submit(_Removal(kvmap))

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
            self._prepare(kvmap)
        return kvmap, kept

    def _with_room(self, kvmap: Kvmap | None, unit: int, length: int) -> Kvmap | None:
        needed = length + 2 * KVMAP_SEGMENT_ALIGN
        try:
            if kvmap is None or kvmap.taken + needed > self._file_max(unit):
                if not self.make_room(needed + KVMAP_DATA_START):
                    return None
                kvmap = self._create(unit)
            if kvmap.room < needed:
                if not self.make_room(needed):
                    return None
                self._changing(kvmap, lambda: kvmap.grow(needed))
        except OSError as failure:
            log.debug("no room in the warm tier: %s", failure)
            return None
        return kvmap

    def _prepare(self, kvmap: Kvmap) -> None:
        size = kvmap.next_span
        if kvmap.taken + size <= self._file_max(kvmap.header.unit) and self.make_room(size):
            self._changing(kvmap, lambda: kvmap.prepare(self.executor.submit))

    def _changing(self, kvmap: Kvmap, change: Callable[[], None]) -> None:
        """Keep account of what a file takes, and of its memory."""
        before, regions = kvmap.taken, len(kvmap.regions)
        try:
            change()
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
        self._kvmaps[kvmap.header.serial] = kvmap
        self._taken += kvmap.taken
        for region in kvmap.regions:
            self._by_region[id(region)] = kvmap

    def _path(self, unit: int, serial: int) -> Path:
        shard = self.directory / str(shard_of(unit))
        path = shard / f"{unit or 'pool'}{_SUFFIX}"
        return path if unit and not path.exists() else path.with_suffix(f".{serial}{_SUFFIX}")

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob(f"*/*{_SUFFIX}")) if self.directory.is_dir() else []

    def _file_max(self, unit: int) -> int:
        share = self.limit // _SESSION_SHARE
        return share if unit else min(share, _POOL_FILE_MAX)

    def _take_over(self, kvmap: Kvmap) -> None:
        self._serial = max(self._serial, kvmap.header.serial)
        self._add(kvmap)
        for entry in kvmap.entries():
            kept = kvmap.at(entry.start, entry.size)
            assert kept is not None
            self._held[entry.extent_id] = _Held(kvmap, kept, entry.checksum, entry.digest)
            kvmap.extents[entry.extent_id] = entry.size
            self.counters.taken_over += entry.size

    def _resolve(self, reference: Reference, sequence: int) -> Kept | None:
        kvmap = self._kvmaps.get(reference.serial)
        kept = None if kvmap is None else kvmap.at(reference.offset, reference.length)
        if kvmap is None or kept is None or checksum(kept.data) != reference.digest:
            return None
        kvmap.last_sequence = max(kvmap.last_sequence, sequence)
        return Kept(kept.region, kept.start, kept.end, reference.digest)

    def _hold(
        self, kvmap: Kvmap, ino: int, offset: int, extent: Extent, kept: Kept, tokens: int
    ) -> None:
        digest = extent.checksum if extent.codec == Codec.NONE else checksum(kept.data)
        start = kvmap.offset_of(kept)
        entry = KvmapEntry(
            ino, extent.extent_id, offset, start, extent.size, extent.checksum, digest
        )
        with suppress(OSError):  # the next process will not find it
            self._changing(kvmap, lambda: kvmap.note(entry, tokens))
        self._held[extent.extent_id] = _Held(kvmap, kept, extent.checksum)
        kvmap.extents[extent.extent_id] = extent.size

    def _is_good(self, extent: Extent, held: _Held) -> bool:
        """What an earlier process left is looked at before it is believed."""
        if checksum(held.kept.data) == held.digest:
            self._held[extent.extent_id] = _Held(held.kvmap, held.kept, held.checksum)
            return True
        log.error("the warm copy of extent %d fails its checksum", extent.extent_id)
        self.counters.damaged += 1
        del self._held[extent.extent_id]
        del held.kvmap.extents[extent.extent_id]
        return False

    def _is_clean(self, kvmap: Kvmap) -> bool:
        return kvmap.last_sequence <= self._released

    def _has_room(self, size: int) -> bool:
        if self._taken + self._log.taken + size > self.limit:
            return False
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize >= size

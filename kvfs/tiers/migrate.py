"""Migration: bytes of files and sessions go up into the warm tier, and down to the ring.

What an extent holds never changes. So a reader sees the same bytes wherever they lie, what
a writer overwrites meanwhile lies above them, and a migration only has to publish a place
once the bytes are there: old or new, never a mixture.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvfs.engine.buffer import Kept, cut
from kvfs.engine.files import Part, Stored
from kvfs.engine.format import Inode
from kvfs.engine.io import Executor, Step, Urgency, settled
from kvfs.engine.latency import Latencies
from kvfs.engine.store import Store
from kvfs.tiers.alarm import Alarm
from kvfs.tiers.promotion import Promotion, Stretch, Underway, windows
from kvfs.tiers.warm import MapSegment, WarmTier

log = logging.getLogger(__name__)

_REWRITE_WINDOW = 32 * 1024 * 1024
# A file in more than so many times the extents that it needs is worth writing anew.
_FRAGMENTED = 2
_FILES_MAX = 1 << 20
_SHOWN_MAX = 1024  # files of a directory: an answer with more would not fit in an attribute
_PREFETCHES_MAX = 64
_LOOKED_AT_ONCE = 256
# Above so much for so long the usual groups are not enough.
_STRAINED_PCT, _STRAINED_SECONDS = 88, 120.0


@dataclass(frozen=True, slots=True)
class Mapped:
    """Where the bytes of a file lie in warm files. `version` is another when the file is."""

    version: int
    size: int
    segments: list[MapSegment]


@dataclass(slots=True)
class Migration:
    """All methods are steps of the loop; two migrations of one file wait for each other.
    Above `fill_pct_max` of the warm tier `group` sessions go down at once; `latencies` is how
    long a group took. Where that does not keep the tier below 88 % for 2 minutes it is strained:
    nothing is brought in on a guess, and ever larger groups go down."""

    store: Store
    warm: WarmTier
    executor: Executor
    fill_pct_max: int = 85
    group: int = 10
    latencies: Latencies = field(default_factory=Latencies)
    _migrating: dict[int, Underway] = field(default_factory=dict)
    _coming: dict[int, Stretch] = field(default_factory=dict)
    _prefetching: set[int] = field(default_factory=set)
    _looked_at: int = 0
    _strain: Alarm = field(default_factory=lambda: Alarm(_STRAINED_PCT, _STRAINED_SECONDS))
    _count: int = 0

    # -- up

    def promote(self, ino: int, urgency: Urgency = Urgency.DEMAND) -> Step[bool]:
        """Bring a file, or all files below a directory, into the warm tier. Whether all of
        it is there now. Raises OSError when the device fails, ENOENT."""
        promotion = Promotion(self.store, self.warm, self.executor, self._coming, urgency)
        for window in windows((yield from self._sizes((yield from self._files(ino))))):
            files = [part.ino for part in window]
            taken = yield from self._take(files, promotion.urgency, promotion)
            yield from promotion.bring_in(list(zip(window, taken, strict=True)))
        yield from promotion.finish()
        return promotion.is_complete

    def _sizes(self, files: list[int]) -> Step[list[tuple[int, int]]]:
        """Of those that are still there."""
        found = []
        for ino in files:
            with suppress(FileNotFoundError):
                found.append((ino, (yield from self.store.node(ino)).inode.size))
            yield from self._let_others_go_on()
        return found

    def prefetch(self, ino: int) -> None:
        """Begin to bring it in, unless too much else is on its way, or the tier is strained."""
        has_room = len(self._prefetching) < _PREFETCHES_MAX and not self.is_strained
        if has_room and ino not in self._prefetching:
            self._prefetching.add(ino)
            self.executor.spawn(self._prefetch(ino))

    def _prefetch(self, ino: int) -> Step[None]:
        try:
            yield from self.promote(ino, Urgency.BACKGROUND)
        except OSError as failure:
            log.debug("inode %d is not brought in: %s", ino, failure)
        finally:
            self._prefetching.discard(ino)

    # -- down

    def demote(self, ino: int) -> Step[int]:
        """See a file or a session in the ring, and give its RAM back. Returns the bytes."""
        yield from self.store.write_back()
        freed = self.warm.evict_unit(ino)
        return freed + self.warm.evict_extents((yield from self._extent_ids(ino)))

    def demote_group(self, sessions: list[int]) -> Step[int]:
        """Several at once: what grew by many small appends is written anew in one stream,
        then all of it is given up. Returns the bytes."""
        started = time.monotonic()
        for session in sessions:
            if session:
                yield from self._pack(session)
        yield from self.store.write_back()
        freed = sum(self.warm.evict_unit(session) for session in sessions)
        if freed:
            self.latencies.saw(time.monotonic() - started)
        return freed

    @property
    def is_strained(self) -> bool:
        return self._strain.is_on

    def look(self, now: float) -> None:
        """Call about once a second, whatever goes down meanwhile: is the tier strained? `now` is
        the monotonic clock, in seconds."""
        fill_pct = self.warm.fill_pct
        if not self._strain.saw(fill_pct, now):
            return
        fields = {"warm_fill_pct": round(fill_pct, 1)}
        if self.is_strained:
            log.warning(
                "warm memory was more than %d %% full for %d s: larger groups of sessions go "
                "down, and none is brought in on a guess until it is below",
                _STRAINED_PCT, _STRAINED_SECONDS, extra=fields,
            )  # fmt: skip
        else:
            log.info("warm memory is not more than %d %% full again", _STRAINED_PCT, extra=fields)

    def relieve(self) -> Step[None]:
        """Call about once a second: above the fill level groups of what nobody used for the
        longest time go down."""
        self.warm.tick()
        if self.store.failure is not None:
            return
        fill_pct_max, count = self.fill_pct_max, self.group
        if self.is_strained:
            fill_pct_max = min(fill_pct_max, _STRAINED_PCT)
            # The usual group may consist of what cannot go: one twice as large has others too.
            count = max(count, min(2 * self._count, len(self.warm.policy)))
        self._count = count
        while self.warm.fill_pct > fill_pct_max:
            group = self.warm.next_to_go(count)
            if not group or not (yield from self.demote_group(group)):
                return

    def drop_dead(self) -> Step[None]:
        """Call once: warm files of an earlier daemon hold extents too that had been removed, and
        would not go with what is removed from now on."""
        for extent_id in self.warm.extent_ids():
            if (yield from self.store.is_dead(extent_id)):
                self.warm.forget_all([extent_id])
            yield from self._let_others_go_on()

    def _pack(self, session: int) -> Step[None]:
        try:
            for ino in (yield from self._entries(session)):
                if not (yield from self.store.node(ino)).is_directory:
                    (mine,) = yield from self._take([ino], Urgency.WRITE_BACK)
                    try:
                        yield from self._pack_file(ino)
                    finally:
                        mine.less()
        except OSError as failure:
            # It is in the ring as it is, in more parts.
            log.debug("session %d is not packed: %s", session, failure)

    def _pack_file(self, ino: int) -> Step[None]:
        size = (yield from self.store.node(ino)).inode.size
        for start in range(0, size, _REWRITE_WINDOW):
            length = min(_REWRITE_WINDOW, size - start)
            parts = yield from self.store.parts(ino, start, length)
            needed = -(-length // self.store.extent_size(size))
            if len(parts) > _FRAGMENTED * needed:
                yield from self.store.rewrite(ino, start, length)

    # -- where it is

    def tier(self, ino: int) -> Step[str]:
        """`warm`, `cold` or `mixed`: where the bytes of a file, or of all files below a
        directory, can be read from."""
        warm, cold = yield from self._where(ino)
        if warm and cold:
            return "mixed"
        return "cold" if cold else "warm"

    def _where(self, ino: int) -> Step[tuple[bool, bool]]:
        warm = cold = False
        for file in (yield from self._files(ino)):
            for part in (yield from self._parts(file)):
                is_cold = isinstance(part, Stored) and self.store.reader.warm(part.extent) is None
                warm, cold = warm or not is_cold, cold or is_cold
            if warm and cold:
                break
            yield from self._let_others_go_on()
        return warm, cold

    def map(self, ino: int) -> Step[Mapped | None]:
        """Bring a file in, and say where it lies; if it is open it stays there until
        `Leases.end`. None when it does not fit, or is no file."""
        if (yield from self.store.node(ino)).is_directory:
            return None
        mapped = yield from settled(lambda: self._mapped(ino))
        if mapped is None:
            yield from self.promote(ino)
            mapped = yield from settled(lambda: self._mapped(ino))
        return mapped

    def map_all(self, directory: int) -> Step[dict[bytes, Mapped] | None]:
        """Where the files in a directory lie that are here now, for who copies them at once. None
        when there are too many."""
        entries = yield from self.store.list_directory(directory, 0, _SHOWN_MAX + 1)
        if len(entries) > _SHOWN_MAX:
            return None
        yield from self.store.load(entry.ino for _, entry in entries)
        found: dict[bytes, tuple[Inode, list[Kept]]] = {}
        for _, entry in entries:
            with suppress(FileNotFoundError):  # it was removed meanwhile
                whole = yield from settled(partial(self._whole, entry.ino))
                if whole is not None:
                    found[entry.name] = whole
            yield from self._let_others_go_on()
        lent = self.warm.show(pieces for _, pieces in found.values())
        return {
            name: Mapped(inode.ctime_ns, inode.size, segments)
            for (name, (inode, _)), segments in zip(found.items(), lent, strict=True)
            if segments is not None
        }

    def _mapped(self, ino: int) -> Step[Mapped | None]:
        whole = yield from self._whole(ino)
        if whole is None:
            return None
        inode, pieces = whole
        # Not who asked, but who is still there: it may have closed the file, or died, meanwhile.
        is_open = self.store.units.opened[ino] > 0
        segments = self.warm.lease(ino, pieces) if is_open else self.warm.segments(pieces)
        return None if segments is None else Mapped(inode.ctime_ns, inode.size, segments)

    def _whole(self, ino: int) -> Step[tuple[Inode, list[Kept]] | None]:
        """A file and its pieces, if all of it is here."""
        node = yield from self.store.node(ino)
        if node.is_directory:
            return None
        pieces = yield from self._in_memory(ino)
        return None if pieces is None else (node.inode, pieces)

    def _in_memory(self, ino: int) -> Step[list[Kept] | None]:
        """The pieces of a file, if all of it is here and it has no hole."""
        size = (yield from self.store.node(ino)).inode.size
        pieces: list[Kept] = []
        for part in (yield from self.store.parts(ino, 0, size)):
            if isinstance(part, Kept):
                pieces.append(part)
                continue
            held = self.store.reader.warm(part.extent) if isinstance(part, Stored) else None
            if not isinstance(part, Stored) or held is None:
                return None
            pieces += cut(held, part.skew, part.length)
        return pieces

    # -- details

    def _take(
        self, files: list[int], urgency: Urgency, promotion: Promotion | None = None
    ) -> Step[list[Underway]]:
        """Have files for oneself: each until there is nothing left to do of it."""
        while others := self._others(files, promotion):
            for other in others:
                if other.promotion is not None:
                    other.promotion.hasten(urgency)
            yield others[0].done
        return [self._taken(ino, promotion) for ino in files]

    def _others(self, files: list[int], promotion: Promotion | None) -> list[Underway]:
        underway = [self._migrating[ino] for ino in files if ino in self._migrating]
        return [one for one in underway if promotion is None or one.promotion is not promotion]

    def _taken(self, ino: int, promotion: Promotion | None) -> Underway:
        mine = self._migrating.get(ino)
        if mine is not None:
            mine.more()
            return mine
        mine = self._migrating[ino] = Underway(promotion)
        mine.done.when_done(partial(self._migrating.__delitem__, ino))
        return mine

    def _entries(self, directory: int) -> Step[list[int]]:
        """In the order of their names, as they are read."""
        entries = yield from self.store.list_directory(directory, 0, _FILES_MAX)
        return [entry.ino for _, entry in sorted(entries, key=lambda pair: pair[1].name)]

    def _files(self, ino: int) -> Step[list[int]]:
        """Itself if it is one, else all below it, in the order of their names."""
        found = []
        left = [ino]
        while left:
            one = left.pop()
            try:
                if (yield from self.store.node(one)).is_directory:
                    left += reversed((yield from self._entries(one)))
                else:
                    found.append(one)
            except FileNotFoundError:  # it was removed meanwhile
                if one == ino:
                    raise
            yield from self._let_others_go_on()
        return found

    def _extent_ids(self, ino: int) -> Step[list[int]]:
        found = []
        for file in (yield from self._files(ino)):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                found += yield from self.store.extent_ids(file)
            yield from self._let_others_go_on()
        return found

    def _parts(self, ino: int) -> Step[list[Part]]:
        """All of a file; nothing when it was removed meanwhile."""
        try:
            size = (yield from self.store.node(ino)).inode.size
            return (yield from self.store.parts(ino, 0, size))
        except FileNotFoundError:
            return []

    def _let_others_go_on(self) -> Step[None]:
        """Now and then: there may be very many files, all of them in memory."""
        self._looked_at += 1
        if self._looked_at % _LOOKED_AT_ONCE == 0:
            # Without a thread: all of them may be waiting for the device.
            pause = self.executor.spawn(_nothing())
            if not pause.done:
                yield pause


def _nothing() -> Step[None]:
    return
    yield

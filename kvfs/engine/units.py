"""Units: what reclaim removes at once, when each was last used, which may go first.

A unit is a session (a directory with all below it) or a file of a pool. When a unit was
last used is written with checkpoints alone: it is exempt from the crash rule.
"""

from __future__ import annotations

import heapq
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from cachetools import TTLCache

from kvfs.engine.format import (
    ROOT_INODE,
    TABLE_UNITS,
    Unit,
    key_owner,
    unit_key,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Step
from kvfs.engine.nodecache import UnreadableNode
from kvfs.engine.policy import Policy
from kvfs.engine.state import State

UNIT_XATTR = b"user.kvfs.unit"
PIN_XATTR = b"user.kvfs.pin"
TTL_XATTR = b"user.kvfs.ttl"
SESSION_FILE = b"session.json"

SESSION_FILES_MAX = 1024
_SESSION_SHARE = 16  # of the ring: one part in so many
_PROTECTED_NS = 60 * 10**9
_SCAN_ITEMS = 2000
_VICTIMS = 10_000
_USED_MAX = 100_000
_SESSIONS_MAX = 4096
_SESSIONS_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Victim:
    """A unit that may be reclaimed."""

    ino: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Session:
    """A session as `/.kvfs/sessions` shows it. `stored` in bytes, as of its last use."""

    path: str
    uid: int
    stored: int
    used_ns: int
    ttl_s: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class _Above:
    """Of a directory: the outermost session that it is in, or is, and what the nearest
    `user.kvfs.unit` says, its own or one above."""

    session: int | None
    said: bytes | None


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a directory: its path, as `Units.path` gives it, and whether it is pinned, itself or
    by one above."""

    path: bytes
    pinned: bool


@dataclass(slots=True)
class Units:
    """`total` tells the size of the ring in bytes. `opened` counts open files by inode;
    `removable` is what reclaim might remove, in bytes, as of the last look at all units, which
    `oldest` is, and `expired` bit by bit.
    `policy` says which units go first; without one those do that were not used for the
    longest time. `turned` counts sessions that turned out to be pools."""

    index: Index
    state: State
    total: Callable[[], int]
    policy: Policy | None = None
    opened: Counter[int] = field(default_factory=Counter)
    removable: int = 0
    turned: int = 0
    _used: dict[int, int] = field(default_factory=dict)
    _cursor: int = 0
    _counted: int = 0  # of what is removable, up to the cursor
    _sessions: TTLCache[int, int] = field(
        default_factory=lambda: TTLCache(_SESSIONS_MAX, _SESSIONS_SECONDS)
    )

    def touch(self, ino: int, now_ns: int) -> None:
        """An inode was opened, read, written or made."""
        if len(self._used) < _USED_MAX or ino in self._used:
            self._used[ino] = now_ns

    # -- which unit

    def session_of(self, ino: int) -> Step[int]:
        """The session that a file is in, as it was up to a minute ago; 0 in a pool."""
        directory = (yield from self.state.nodes.node(ino)).inode.parent
        return (yield from self._session_of(directory, {}))

    def _session_of(self, directory: int, known: dict[int, _Above]) -> Step[int]:
        session = self._sessions.get(directory)
        if session is None:
            try:
                session = (yield from self._above(directory, known)).session or 0
            except FileNotFoundError:  # of a file without a name
                session = 0
            self._sessions[directory] = session
        return session

    def unit_of(self, ino: int) -> Step[int]:
        """The outermost session that an inode is in, or itself. Raises ENOENT."""
        return (yield from self._unit_of(ino, {}))

    def _unit_of(self, ino: int, known: dict[int, _Above]) -> Step[int]:
        """`known` is what was found of directories: to find a session looks at all of it, which
        is not done again for each of its files."""
        node = yield from self.state.nodes.node(ino)
        directory = ino if node.is_directory else node.inode.parent
        return (yield from self._above(directory, known)).session or ino

    def _above(self, directory: int, known: dict[int, _Above]) -> Step[_Above]:
        """Of each directory from the last known one down, once: trees may be deep."""
        below: list[int] = []
        while directory not in known and directory != ROOT_INODE:
            below.append(directory)
            directory = (yield from self.state.nodes.node(directory)).inode.parent
        if directory not in known:
            known[directory] = _Above(
                None, (yield from self.state.names.xattr(ROOT_INODE, UNIT_XATTR))
            )
        above = known[directory]
        for directory in reversed(below):
            own = yield from self.state.names.xattr(directory, UNIT_XATTR)
            said = above.said if own is None else own
            session = above.session
            if session is None and (yield from self._is_session(directory, said)):
                session = directory
            above = known[directory] = _Above(session, said)
        return above

    def is_session(self, directory: int) -> Step[bool]:
        """What `user.kvfs.unit` says, its own or the nearest above; else what is in it."""
        return (
            yield from self._is_session(
                directory, (yield from self.inherited(directory, UNIT_XATTR))
            )
        )

    def _is_session(self, directory: int, said: bytes | None) -> Step[bool]:
        if said in (b"session", b"pool"):
            return said == b"session"
        return (yield from self._looks_like_a_session(directory))

    def inherited(self, ino: int, name: bytes) -> Step[bytes | None]:
        """The value of an xattr, its own or that of the nearest directory above."""
        while True:
            value = yield from self.state.names.xattr(ino, name)
            if value is not None or ino == ROOT_INODE:
                return value
            ino = (yield from self.state.nodes.node(ino)).inode.parent

    def is_pinned(self, ino: int) -> Step[bool]:
        return (yield from self.inherited(ino, PIN_XATTR)) == b"1"

    def _looks_like_a_session(self, directory: int) -> Step[bool]:
        names = self.state.names
        if (yield from names.find(directory, SESSION_FILE)) is not None:
            return True
        if (yield from self.unit(directory)).is_pool:
            return False
        entries = yield from names.entries(directory, 0, SESSION_FILES_MAX + 1)
        is_session = len(entries) <= SESSION_FILES_MAX
        is_session = is_session and not any(stat.S_ISDIR(entry.type) for _, entry in entries)
        if is_session:
            stored = yield from self.stored(directory)
            is_session = stored <= self.total() // _SESSION_SHARE
        if not is_session:
            # It stays one, whatever becomes of it.
            yield from self._turn(directory, Unit(is_pool=True).pack())
        return is_session

    def _turn(self, directory: int, record: bytes | None) -> Step[None]:
        """What was a session is a pool, and has that record from now on: what is in it are units
        of their own, last used when it was."""
        was = yield from self.unit(directory)
        records = [(unit_key(directory), record)]
        if was.used_ns:
            for _, entry in (yield from self.state.names.entries(directory, 0, 1 << 62)):
                unit = yield from self.unit(entry.ino)
                if unit.used_ns < was.used_ns and not unit.is_pool:
                    stored = (yield from self.state.nodes.node(entry.ino)).taken
                    unit = replace(unit, used_ns=was.used_ns, stored=stored)
                    records.append((unit_key(entry.ino), unit.pack()))
            self.turned += 1
        self._sessions.pop(directory, None)
        self.index.apply(records)

    def stored(self, ino: int) -> Step[int]:
        """What an inode and all below it take on the device, in bytes."""
        return (yield from self._taken((yield from self._members(ino))))

    def _taken(self, inos: list[int]) -> Step[int]:
        total = 0
        for ino in inos:
            total += (yield from self.state.nodes.node(ino)).taken
        return total

    # -- when used

    def unit(self, ino: int) -> Step[Unit]:
        value = yield from self.index.get(unit_key(ino))
        return Unit() if value is None else Unit.unpack(value)

    @property
    def to_book(self) -> int:
        """How many inodes were used since `book`."""
        return len(self._used)

    def book(self, limit: int = _USED_MAX) -> Step[None]:
        """Find the units of what was used, of so many inodes at most, and note when."""
        used = dict(islice(self._used.items(), limit))
        latest: dict[int, int] = {}
        known: dict[int, _Above] = {}
        for ino, used_ns in used.items():
            try:
                node = yield from self.state.nodes.node(ino)
                # What is none any longer is found out before it is removed.
                directory = ino if node.is_directory else node.inode.parent
                session = yield from self._session_of(directory, known)
            except (FileNotFoundError, UnreadableNode):
                continue  # it is gone, or cannot be found
            if not session and node.is_directory:
                continue  # the directory of a pool is no unit
            unit = session or ino
            latest[unit] = max(used_ns, latest.get(unit, 0))
        for ino, used_ns in latest.items():
            with suppress(UnreadableNode):
                yield from self._book(ino, used_ns)
        if self.policy is not None:
            _tell(self.policy, latest)
        # Not before it is noted: whoever asks meanwhile finds it in one place or the other.
        for ino, used_ns in used.items():
            if self._used.get(ino) == used_ns:
                del self._used[ino]

    def _book(self, ino: int, used_ns: int) -> Step[None]:
        unit = yield from self.unit(ino)
        if unit.is_pool:
            return
        ttl = yield from self.state.names.xattr(ino, TTL_XATTR)
        try:
            members = yield from self._members(ino)
            stored = yield from self._taken(members)
        except FileNotFoundError:
            return
        if len(members) > SESSION_FILES_MAX:
            self._sessions.pop(ino, None)  # it may have grown to be none
        unit = replace(
            unit,
            used_ns=max(unit.used_ns, used_ns),
            stored=stored,
            ttl_s=int(ttl) if ttl else 0,
        )
        self.index.apply([(unit_key(ino), unit.pack())])

    # -- which may go

    def oldest(self, now_ns: int, after: Victim | None = None) -> Step[list[Victim]]:
        """The units that were not used for the longest time, oldest first: some of those
        that come behind `after`, or of all. None when there are no more."""
        found: list[tuple[int, int, Unit]] = []
        first = (after.unit.used_ns, after.ino) if after else (0, 0)
        self.removable = 0
        cursor = 0
        while True:
            batch = yield from self._records(cursor, _SCAN_ITEMS)
            for ino, unit in batch:
                if _is_old(unit, now_ns):
                    self.removable += unit.stored
                    if (unit.used_ns, ino) > first:
                        heapq.heappush(found, (-unit.used_ns, -ino, unit))
                    if len(found) > _VICTIMS:
                        heapq.heappop(found)
            if len(batch) < _SCAN_ITEMS:
                return [Victim(-ino, unit) for _, ino, unit in sorted(found, reverse=True)]
            cursor = batch[-1][0] + 1

    def in_order(self, victims: list[Victim], now_ns: int) -> list[Victim]:
        """As the policy would have them go. Before those that it knows, the ones that were not
        used since it began; of these the oldest first."""
        if self.policy is None:
            return victims
        known = self.policy.victims(len(self.policy), now_ns / 1e9).tolist()
        places = {ino: place for place, ino in enumerate(known)}
        return sorted(victims, key=lambda victim: places.get(victim.ino, -1))

    def forget(self, victim: Victim) -> None:
        """It was removed."""
        self.removable = max(0, self.removable - victim.unit.stored)
        if self.policy is not None:
            self.policy.forget([victim.ino])

    def expired(self, now_ns: int, limit: int, default_ttl_s: int) -> Step[list[Victim]]:
        """Those among the next `limit` units that nobody used for their time to live, or
        for `default_ttl_s` (0: no limit)."""
        batch = yield from self._records(self._cursor, limit)
        self._counted += sum(unit.stored for _, unit in batch if _is_old(unit, now_ns))
        self._cursor = batch[-1][0] + 1 if len(batch) == limit else 0
        if not self._cursor:
            self.removable, self._counted = self._counted, 0
        victims = []
        for ino, unit in batch:
            ttl_s = unit.ttl_s or default_ttl_s
            is_old = ttl_s and now_ns - unit.used_ns > ttl_s * 10**9
            if is_old and not unit.is_pool:
                victims.append(Victim(ino, unit))
        return victims

    def _records(self, start: int, limit: int) -> Step[list[tuple[int, Unit]]]:
        low, high = unit_key(start), bytes([TABLE_UNITS]) + b"\xff" * (len(unit_key(0)) - 1)
        items = yield from self.index.scan(low, high, limit)
        return [(key_owner(key), Unit.unpack(value)) for key, value in items if value]

    def sessions(self) -> Step[list[Session]]:
        """Those that were used, the last used first."""
        found: list[Session] = []
        cursor: int | None = 0
        while cursor is not None:
            batch, cursor = yield from self.some_sessions(cursor, _SCAN_ITEMS)
            found += batch.values()
        return sorted(found, key=lambda session: session.used_ns, reverse=True)

    def some_sessions(self, first: int, limit: int) -> Step[tuple[dict[int, Session], int | None]]:
        """Those among the next `limit` units from the inode `first` on, by their inodes, and
        where the next ones begin; None behind the last."""
        batch = yield from self._records(first, limit)
        found = {}
        known: dict[int, _Place] = {}
        for ino, unit in batch:
            session = None if unit.is_pool else (yield from self._session(ino, unit, known))
            if session is not None:
                found[ino] = session
        return found, batch[-1][0] + 1 if len(batch) == limit else None

    def _session(self, ino: int, unit: Unit, known: dict[int, _Place]) -> Step[Session | None]:
        try:
            node = yield from self.state.nodes.node(ino)
            if not node.is_directory:
                return None
            place = yield from self._place(ino, known)
        except FileNotFoundError:
            return None
        path = place.path.decode(errors="surrogateescape")
        return Session(path, node.inode.uid, unit.stored, unit.used_ns, unit.ttl_s, place.pinned)

    def _place(self, directory: int, known: dict[int, _Place]) -> Step[_Place]:
        """Of each directory from the last known one down, once, as in `_above`."""
        below: list[int] = []
        while directory not in known and directory != ROOT_INODE:
            below.append(directory)
            directory = (yield from self.state.nodes.node(directory)).inode.parent
        if directory not in known:
            pin = yield from self.state.names.xattr(ROOT_INODE, PIN_XATTR)
            known[directory] = _Place(b"", pin == b"1")
        place = known[directory]
        for directory in reversed(below):
            name = (yield from self.state.nodes.node(directory)).inode.name
            pin = yield from self.state.names.xattr(directory, PIN_XATTR)
            path = place.path + b"/" + name if place.path else name
            place = known[directory] = _Place(path, place.pinned if pin is None else pin == b"1")
        return place

    def is_removable(self, victim: Victim, now_ns: int) -> Step[bool]:
        """Neither pinned nor open nor used since it was chosen. What is gone or no unit any
        longer is forgotten."""
        if (yield from self.unit(victim.ino)).used_ns > victim.unit.used_ns:
            return False
        known: dict[int, _Above] = {}
        try:
            unit = yield from self._unit_of(victim.ino, known)
            if _is_pool(unit, known):
                if not (yield from self.unit(victim.ino)).is_pool:  # as was found just now
                    yield from self._turn(victim.ino, None)
                return False
            if unit != victim.ino:
                self.index.apply([(unit_key(victim.ino), None)])
                return False
            if (yield from self.is_pinned(victim.ino)):
                return False
            members = set((yield from self._members(victim.ino)))
        except FileNotFoundError:
            self.index.apply([(unit_key(victim.ino), None)])
            return False
        recent = (ino for ino, used_ns in self._used.items() if used_ns > now_ns - _PROTECTED_NS)
        return not any(ino in members for ino in (*self.opened, *recent))

    def _members(self, ino: int) -> Step[list[int]]:
        found = [ino]
        for ino in found:  # which grows: trees may be deep
            node = yield from self.state.nodes.node(ino)
            if node.is_directory:
                entries = yield from self.state.names.entries(ino, 0, 1 << 62)
                found += [entry.ino for _, entry in entries]
        return found

    def path(self, ino: int) -> Step[bytes]:
        """From the root of the mount, without a slash before it."""
        parts: list[bytes] = []
        while ino != ROOT_INODE:
            inode = (yield from self.state.nodes.node(ino)).inode
            parts.append(inode.name)
            ino = inode.parent
        return b"/".join(reversed(parts))


def _is_old(unit: Unit, now_ns: int) -> bool:
    """Whether it is one, that was not used just now."""
    return not unit.is_pool and unit.used_ns < now_ns - _PROTECTED_NS


def _is_pool(unit: int, known: dict[int, _Above]) -> bool:
    """Whether it is a directory without a session; files are units there."""
    return unit in known and known[unit].session is None


def _tell(policy: Policy, used: dict[int, int]) -> None:
    """When units were used, in ns. Those that would go first are dropped where there are too
    many: they go before all that it knows."""
    for ino, used_ns in sorted(used.items(), key=lambda use: use[1]):
        policy.touch([ino], used_ns / 1e9)
    excess = len(policy) - _USED_MAX
    if excess > 0:
        policy.remove(policy.victims(excess, max(used.values()) / 1e9))


def largest(victims: list[Victim], count: int) -> Iterator[Victim]:
    yield from heapq.nlargest(count, victims, key=lambda victim: victim.unit.stored)

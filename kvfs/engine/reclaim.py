"""Reclaim: units that nobody used for too long go, and when the ring is full those that the
policy names, or else the oldest."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvfs.engine import ops
from kvfs.engine.appender import Counters
from kvfs.engine.format import TABLE_LOG, Inode, key_owner, log_key
from kvfs.engine.io import Completion, Step, wait
from kvfs.engine.space import Purpose
from kvfs.engine.units import Units, Victim, largest

log = logging.getLogger(__name__)

LOG_ENTRIES_MAX = 10_000
_SCANNED_A_SECOND = 1000
_HOLDERS_SECONDS = 60
_HOLDERS_NAMED = 3
# It was removed, renamed or used since it was chosen.
_IN_USE = (errno.ENOENT, errno.EBUSY)

Perform = Callable[..., Step["Inode | None"]]
Removed = Callable[[list[tuple[int, bytes]]], None]


@dataclass(slots=True)
class Reclaimer:
    """`perform` does an operation of the store. `on_removed` is told (directory, name) of
    all that went, children first."""

    units: Units
    perform: Perform
    counters: Counters
    is_on: bool
    unused_seconds: int
    on_removed: Removed = field(default=lambda names: None)
    _unremovable: set[int] = field(default_factory=set)  # of which the log told
    _next_number: int | None = None
    _working: Completion[None] | None = None
    _holders_named: float = field(default=float("-inf"))

    def expire(self, *, is_filling: bool) -> Step[None]:
        """Call about once a second. Units with a time to live go on time, the others after
        `unused_seconds` without use, and only while the ring is filling up."""
        if not self.is_on:
            return
        now_ns = time.time_ns()
        default = self.unused_seconds if is_filling else 0
        for victim in (yield from self.units.expired(now_ns, _SCANNED_A_SECOND, default)):
            why = "its ttl is over" if victim.unit.ttl_s else f"unused for {_period(default)}"
            yield from self.remove(victim, why, now_ns)

    def make_space(self, wanted: int) -> Step[bool]:
        """Remove the first units to go until about `wanted` bytes are gone. Whether any went,
        also by another caller meanwhile."""
        if self._working is not None:
            yield from wait(self._working)
            return True
        self._working = Completion()
        try:
            return (yield from self._make_space(wanted))
        finally:
            working, self._working = self._working, None
            working.finish()

    def _make_space(self, wanted: int) -> Step[bool]:
        if not self.is_on:
            return False
        yield from self.units.book()
        now_ns = time.time_ns()
        oldest = victims = yield from self.units.oldest(now_ns)
        gone, turned = 0, self.units.turned
        any_removed = False
        while victims and gone < wanted:
            for victim in self.units.in_order(victims, now_ns):
                if gone >= wanted:
                    break
                if (yield from self.remove(victim, "the ring is full", now_ns)):
                    gone += victim.unit.stored
                    any_removed = True
            else:
                victims = yield from self.units.oldest(now_ns, victims[-1])
            if not victims and self.units.turned > turned:  # into files, which may come before
                turned = self.units.turned
                victims = yield from self.units.oldest(now_ns)
        if not any_removed:
            yield from self._name_holders(oldest)
        return any_removed

    def remove(self, victim: Victim, why: str, now_ns: int) -> Step[bool]:
        """One unit, unless it is in use or pinned. One that cannot be removed does not keep
        the others from going."""
        try:
            if not (yield from self.units.is_removable(victim, now_ns)):
                return False
            yield from self._remove(victim, why, now_ns)
        except OSError as failure:
            if failure.errno not in _IN_USE and victim.ino not in self._unremovable:
                log.error("inode %d cannot be reclaimed: %s", victim.ino, failure.strerror)
                self._unremovable.add(victim.ino)
            return False
        return True

    def _remove(self, victim: Victim, why: str, now_ns: int) -> Step[None]:
        units = self.units
        inode = (yield from units.state.nodes.node(victim.ino)).inode
        path = yield from units.path(victim.ino)
        tree = yield from units.state.read_tree(victim.ino)
        number = yield from self._number()
        entry = {
            "time_ns": now_ns,
            "path": path.decode(errors="surrogateescape"),
            "uid": inode.uid,
            "why": why,
            "stored": victim.unit.stored,
            "used_ns": victim.unit.used_ns,
        }
        op = ops.Reclaim(
            now_ns, inode.parent, inode.name, victim.ino, number, json.dumps(entry).encode(),
            max(0, number - LOG_ENTRIES_MAX), tree.items,
        )  # fmt: skip
        yield from self.perform(
            op, purpose=Purpose.REMOVE, is_allowed=lambda: units.is_removable(victim, now_ns)
        )
        units.forget(victim)
        self.counters.reclaimed_units += 1
        self.counters.reclaimed += victim.unit.stored
        log.info(
            "reclaimed %s (%d bytes): %s", entry["path"], victim.unit.stored, why,
            extra={"path": entry["path"], "stored": victim.unit.stored, "reason": why},
        )  # fmt: skip
        names = [
            (ino, dentry.name)
            for ino, original in reversed(tree.originals.items())
            for _, dentry in original.entries
        ]
        self.on_removed([*names, (inode.parent, inode.name)])

    def _number(self) -> Step[int]:
        if self._next_number is None:
            lines = yield from self._lines()
            self._next_number = lines[-1][0] + 1 if lines else 1
        self._next_number += 1
        return self._next_number - 1

    def entries(self) -> Step[list[dict[str, Any]]]:
        """What was reclaimed, and why, oldest first; at most LOG_ENTRIES_MAX."""
        lines = yield from self._lines()
        return [entry for _, value in lines if (entry := _entry(value)) is not None]

    def _lines(self) -> Step[list[tuple[int, bytes]]]:
        high = bytes([TABLE_LOG]) + b"\xff" * (len(log_key(0)) - 1)
        items = yield from self.units.index.scan(log_key(0), high)
        return [(key_owner(key), value) for key, value in items if value is not None]

    def _name_holders(self, victims: list[Victim]) -> Step[None]:
        now = time.monotonic()
        if now - self._holders_named < _HOLDERS_SECONDS:
            return
        self._holders_named = now
        names = []
        for victim in largest(victims, _HOLDERS_NAMED):
            try:
                path = (yield from self.units.path(victim.ino)).decode(errors="replace")
            except FileNotFoundError:
                continue
            names.append(f"{path} ({victim.unit.stored} bytes)")
        held = ", ".join(names) or "units used within the last minute"
        log.warning("the ring is full and nothing may be reclaimed; held by %s", held)


_ENTRY_TYPES = {
    "time_ns": int, "path": str, "uid": int, "why": str, "stored": int, "used_ns": int,
}  # fmt: skip


def _entry(value: bytes) -> dict[str, Any] | None:
    """A line of the log; None for what is none."""
    try:
        entry = json.loads(value)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(entry, dict) and all(
        type(entry.get(name)) is type_ for name, type_ in _ENTRY_TYPES.items()
    )
    return entry if is_whole else None


def _period(seconds: int) -> str:
    """In days where it is whole days, else in hours."""
    days, rest = divmod(seconds, 24 * 3600)
    return f"{seconds / 3600:g} hours" if rest else f"{days} days"

"""What a mount tells, look by look, whatever becomes of it."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kvfs.mount.mounts import find_mount
from mount_tools.common import describe_os_error
from mount_tools.mountpoints import STATS
from mount_tools.paths import opened
from mount_tools.segments import Segments, read_segments
from mount_tools.sessions import Session, read_session

T = TypeVar("T")

_SESSIONS = Path(".kvfs") / "sessions"
_ANSWER_SECONDS = 3.0
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


@dataclass(frozen=True, slots=True)
class Row:
    """A session, as mount_tools.selection.Listed. `warm` is what its warm files take, in bytes."""

    name: str
    stored: int
    last_use: float
    heat: float
    warm: int
    pinned: bool
    tokens: int | None = None
    size: int | None = None
    tier: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """One look; `at` by the monotonic clock, in seconds. `stats` is the document of
    `stats.json`."""

    at: float
    stats: dict[str, Any]
    segments: Segments
    rows: list[Row]

    def is_of_the_same_mount(self, other: Seen) -> bool:
        """Whether their counters go on from each other."""
        names = ("pid", "uuid", "epoch")
        return all(self.stats[name] == other.stats[name] for name in names)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is nothing to see, and what to do, in one line."""

    message: str


@dataclass(slots=True)
class Source:
    """Looks at a mount. What is slow to find out of a session is asked again only when it was
    used or moved since, and at each look for `budget` seconds at most."""

    mountpoint: Path
    device: str
    _asker: Asker = field(default_factory=lambda: Asker(_ANSWER_SECONDS))
    _known: dict[str, tuple[Row, Session | None]] = field(default_factory=dict)

    def look(self, budget: float) -> Seen | Trouble:
        """Returns after some seconds also where the mount hangs."""
        where = self.mountpoint
        if find_mount(where) is None:
            return Trouble(f"{where} is not mounted; mount it with: {self._mount_command}")
        try:
            return self._asker.ask(lambda: self._look(budget), budget)
        except TimeoutError:
            return Trouble(
                f"{where} does not answer; if that stays so, detach it with: "
                f"kvfs umount --force {where}"
            )
        except PermissionError:
            return Trouble(f"{where} belongs to another user; run as its owner")
        except FileNotFoundError:
            return Trouble(f"the daemon of {where} is of an earlier release: mount it again")
        except OSError as failure:
            if failure.errno in _DEAD:
                return Trouble(f"its daemon has ended; mount it again with: {self._mount_command}")
            return Trouble(describe_os_error(failure))
        except (ValueError, KeyError, TypeError) as failure:
            return Trouble(f"{where} tells what this kvfs does not know: {failure!r}")

    @property
    def _mount_command(self) -> str:
        return f"kvfs mount {self.mountpoint} {self.device}"

    def _look(self, budget: float) -> Seen:
        stats = json.loads((self.mountpoint / STATS).read_text())
        segments = read_segments(self.mountpoint)
        lines = (self.mountpoint / _SESSIONS).read_text().splitlines()
        rows = [_row(json.loads(line)) for line in lines]
        self._find_out(rows, time.monotonic() + budget)
        return Seen(time.monotonic(), stats, segments, [self._with_details(row) for row in rows])

    def _find_out(self, rows: list[Row], end: float) -> None:
        """Of those first that nothing is known of."""
        changed = [row for row in rows if self._is_changed(row)]
        for row in sorted(changed, key=lambda row: row.name in self._known):
            if time.monotonic() > end:
                break
            self._known[row.name] = row, _details(self.mountpoint / row.name)
        names = {row.name for row in rows}
        for name in self._known.keys() - names:
            del self._known[name]

    def _is_changed(self, row: Row) -> bool:
        known = self._known.get(row.name)
        return known is None or replace(known[0], heat=row.heat) != row

    def _with_details(self, row: Row) -> Row:
        known = self._known.get(row.name)
        if known is None or known[1] is None:
            return row
        found = known[1]
        return replace(
            row, tokens=found.tokens, size=found.size, tier=found.tier, model=found.model
        )


def _row(document: dict[str, Any]) -> Row:
    return Row(
        name=document["path"],
        stored=document["stored"],
        last_use=document["used_ns"] / 1e9,
        heat=document["heat"],
        warm=document["warm"],
        pinned=document["pinned"],
    )


def _details(directory: Path) -> Session | None:
    try:
        return read_session(directory, directory.name)
    except OSError as failure:
        if failure.errno in _DEAD:
            raise
        return None  # it is gone, or closed to this user


class Asker:
    """Has work done that may hang, each within `seconds` and what it is granted besides. What
    hangs is left behind, one at a time: until it ends nothing else is begun."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left_behind: threading.Thread | None = None

    def ask(self, work: Callable[[], T], more_seconds: float = 0.0) -> T:
        """Raises TimeoutError, and what `work` raises."""
        if self._left_behind is not None:
            self._left_behind.join(self._seconds)
            if self._left_behind.is_alive():
                raise TimeoutError
            self._left_behind = None
        results: list[T] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                results.append(work())
            except Exception as failure:
                failures.append(failure)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._seconds + more_seconds)
        if thread.is_alive():
            self._left_behind = thread
            raise TimeoutError
        if failures:
            raise failures[0]
        return results[0]


def set_xattr(mountpoint: Path, session: str, name: str, value: bytes) -> None:
    """`user.kvfs.NAME` of a session. Raises OSError, also ENOTCONN where nothing is mounted: what
    is below the mountpoint is none of ours."""
    if find_mount(mountpoint) is None:
        raise OSError(errno.ENOTCONN, "it is not mounted")
    with opened(mountpoint / session) as fd:
        os.setxattr(fd, f"user.kvfs.{name}", value)

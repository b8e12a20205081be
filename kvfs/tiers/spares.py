"""Touched memory that waits for its next use: whole files of the warm tier's tmpfs.

Memory that the machine has to find first costs many times the copy into it; where a
hypervisor takes back what is free, some fifty times as much as memory that was in use.
So files that were given up wait here, and a few are made ready while there is nothing else
to do. A spare begins with zeros: nothing takes it for a warm file.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvfs.engine.format import KVMAP_DATA_START, round_up
from kvfs.engine.io import Completion, Executor, Urgency
from kvfs.tiers.mapping import make_span

# Sizes are multiples of a large page; less than one is not worth a file.
UNIT = 2 * 1024 * 1024
_CAP_SHARE = 8  # of the limit: one part in so many is the most that waits
_FLOOR_SHARE = 16
_FLOOR_MAX = 512 * 1024 * 1024
_STOCK_SIZE = 16 * 1024 * 1024
_IDLE_SECONDS = 60.0


@dataclass(slots=True)
class Spare:
    """A file of `size` bytes. It is `ready` unless a thread is at work on it; nothing else of
    it changes meanwhile."""

    path: Path
    size: int
    since: float
    ready: bool = False


@dataclass(slots=True)
class Spares:
    """The files in `directory`, of a tier with at most `limit` bytes. `held` is what they take
    of these, with those to come."""

    directory: Path
    limit: int
    executor: Executor
    clock: Callable[[], float] = time.monotonic
    held: int = 0
    _spares: dict[Path, Spare] = field(default_factory=dict)

    @property
    def cap(self) -> int:
        """The most that may wait here, in bytes."""
        return _units(self.limit // _CAP_SHARE)

    @property
    def floor(self) -> int:
        """What is to be here at all times, in bytes."""
        return _units(min(self.limit // _FLOOR_SHARE, _FLOOR_MAX))

    def open(self) -> None:
        """What an earlier process left goes."""
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing of these is left behind, also by threads that are at work on them."""
        for path in self._spares:
            path.unlink(missing_ok=True)
        self._spares.clear()
        self.held = self.limit = 0  # no more come
        with suppress(OSError):  # it may be there no longer, or another's
            self.directory.rmdir()

    # -- in

    def expect(self, size: int) -> Spare | None:
        """A place for a file of so many bytes, or for its beginning; None when there is no room.
        `came` is told of it."""
        size = _units(min(size, self.cap - self.held))
        if size <= 0:
            return None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return None
        # Another daemon may use the directory: what is renamed there must not replace its files.
        spare = Spare(self.directory / secrets.token_hex(8), size, self.clock())
        self._spares[spare.path] = spare
        self.held += size
        return spare

    def came(self, spare: Spare, *, is_there: bool) -> None:
        if is_there:
            spare.ready = True
        elif self._spares.pop(spare.path, None) is not None:
            self.held -= spare.size

    @property
    def lacks(self) -> int:
        """The size of the next file that should be made ready, in bytes; 0 for none."""
        return max(min(self.floor - self.held, _STOCK_SIZE), 0)

    def stock(self, size: int) -> Completion[bool] | None:
        """Have a file of so many bytes made ready in a thread, when it has nothing else to do.
        Raises OSError."""
        spare = self.expect(size)
        if spare is None:
            return None
        try:
            # Not by the thread: it must not make one that `close` did not find.
            os.close(os.open(spare.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError:
            self.came(spare, is_there=False)
            raise
        return self._work(spare, partial(_touch, spare.path, spare.size), Urgency.BACKGROUND)

    # -- out

    def take(self, size: int, size_max: int) -> Spare | None:
        """The smallest file with so many bytes, or else the largest, that is not larger than
        `size_max`. Who takes it renames it."""
        fitting = [s for s in self._spares.values() if s.ready and s.size <= size_max]
        if not fitting:
            return None
        enough = [spare for spare in fitting if spare.size >= size]
        taken = (min if enough else max)(enough or fitting, key=lambda spare: spare.size)
        del self._spares[taken.path]
        self.held -= taken.size
        return taken

    def has(self, size_max: int) -> bool:
        """Whether `take` finds one."""
        return any(spare.ready and spare.size <= size_max for spare in self._spares.values())

    def give_back(self, size: int) -> None:
        """So many bytes to the system, as far as they are here: the oldest first."""
        for spare in list(self._spares.values()):
            if size <= 0:
                return
            if spare.ready:
                less = min(round_up(size, UNIT), spare.size)
                size -= less
                self.held -= less
                spare.size -= less
                spare.ready = False
                self._work(spare, partial(_cut, spare.path, spare.size), Urgency.DEMAND)

    def give_back_idle(self) -> None:
        """What nobody wanted for a time, beyond the floor."""
        since = self.clock() - _IDLE_SECONDS
        idle = sum(s.size for s in self._spares.values() if s.ready and s.since <= since)
        self.give_back(min(idle, self.held - self.floor))

    # -- details

    def _work(self, spare: Spare, work: Callable[[], bool], urgency: Urgency) -> Completion[bool]:
        done = self.executor.submit(work, urgency)
        done.when_done(lambda: self.came(spare, is_there=done.error is None and done.result()))
        return done


def set_aside(path: Path, spare: Spare) -> bool:
    """Make a file, which nobody looks at any longer, that spare, in a thread. Whether it is."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # First: who finds it after a kill, in either place, must not believe it.
            os.pwrite(fd, bytes(KVMAP_DATA_START), 0)
            os.ftruncate(fd, spare.size)
        finally:
            os.close(fd)
        path.rename(spare.path)
    except OSError:
        return False
    return True


def _touch(path: Path, size: int) -> bool:
    try:
        make_span(path, 0, size)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    return True


def _cut(path: Path, size: int) -> bool:
    if not size:
        path.unlink(missing_ok=True)
        return False
    os.truncate(path, size)
    return True


def _units(size: int) -> int:
    return size // UNIT * UNIT

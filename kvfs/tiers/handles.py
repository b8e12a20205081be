"""Handles: for each block of KV where it is, in which version, and who uses it now.

A migration marks its handles, copies, publishes the new place, and then frees the old one.
Whoever wants a handle that migrates waits; a migration waits for those who already use it.
So a reader sees the old bytes or the new ones, never a mixture, and no write is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
NOWHERE = -1
_WRITER = -1


class State(IntEnum):
    """Where the bytes of a block are; `FREE` is a handle that nobody has."""

    FREE = 0
    HOT = 1
    WARM = 2
    COLD = 3
    MIGRATING = 4


@dataclass(frozen=True)
class View:
    """State, place and version of some handles at one moment, in the order asked for."""

    states: NDArray[np.uint8]
    places: NDArray[np.int64]
    versions: NDArray[np.uint32]


class Migration:
    """Handles that are marked as migrating, and what they were before."""

    def __init__(self, table: HandleTable, ids: Ids, before: View) -> None:
        self.before = before
        self._table = table
        self._ids = ids
        self._open = True

    def publish(self, state: State, places: Ids | int = NOWHERE) -> None:
        """From now on the blocks are there; the old places may be freed after this."""
        self._open = False
        self._table._settle(self._ids, state, places)

    def close(self) -> None:
        """Unless it was published: all is as it was before."""
        if self._open:
            self._open = False
            self._table._settle(self._ids, self.before.states, self.before.places)


class HandleTable:
    """Handles in tables of 17 bytes each. Safe to use from several threads.

    The ids of one call must be different ones. A thread that uses handles must not ask for
    more before it has given them back, but may ask for all at once.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._changed = threading.Condition()
        self._states = np.zeros(capacity, np.uint8)
        self._places = np.full(capacity, NOWHERE, np.int64)
        self._versions = np.zeros(capacity, np.uint32)
        # How many read; _WRITER while one writes.
        self._users = np.zeros(capacity, np.int32)
        self._free = np.arange(capacity, dtype=np.int64)[::-1].copy()
        self._free_count = capacity

    def __len__(self) -> int:
        """Handles that somebody has."""
        return len(self._states) - self._free_count

    def add(self, count: int, state: State, places: Ids | int = NOWHERE) -> Ids:
        """`count` new handles in one state, at the places given."""
        with self._changed:
            while self._free_count < count:
                self._grow()
            self._free_count -= count
            ids = self._free[self._free_count : self._free_count + count].copy()
            self._states[ids] = state
            self._places[ids] = places
            return ids

    def remove(self, ids: Ids) -> None:
        """Give handles back, once nobody uses them and none of them migrates."""
        with self._changed:
            self._await(lambda: self._is_unused(ids))
            self._states[ids] = State.FREE
            self._places[ids] = NOWHERE
            self._versions[ids] += 1
            self._free[self._free_count : self._free_count + len(ids)] = ids
            self._free_count += len(ids)

    def look(self, ids: Ids) -> View:
        """What the table says now; it may be otherwise when this returns."""
        with self._changed:
            return self._view(ids)

    def hold(self, ids: Ids) -> View:
        """Begin to read, once none of them migrates or is written; `let_go` ends it."""
        with self._changed:
            self._await(lambda: self._is_readable(ids))
            self._users[ids] += 1
            return self._view(ids)

    def let_go(self, ids: Ids) -> None:
        """End what `hold` began, of all its handles or of some."""
        with self._changed:
            self._users[ids] -= 1
            self._changed.notify_all()

    @contextmanager
    def reading(self, ids: Ids) -> Iterator[View]:
        """Their bytes stay where the view says, and as they are, until the end."""
        view = self.hold(ids)
        try:
            yield view
        finally:
            self.let_go(ids)

    @contextmanager
    def writing(self, ids: Ids) -> Iterator[View]:
        """Alone with the bytes of these blocks; their version is a new one at the end."""
        with self._changed:
            self._await(lambda: self._is_unused(ids))
            self._users[ids] = _WRITER
            view = self._view(ids)
        try:
            yield view
        finally:
            with self._changed:
                self._users[ids] = 0
                self._versions[ids] += 1
                self._changed.notify_all()

    @contextmanager
    def migrating(self, ids: Ids) -> Iterator[Migration]:
        """Mark them, wait for their users; at the end all is as before unless published."""
        with self._changed:
            self._await(lambda: not (self._states[ids] == State.MIGRATING).any())
            migration = Migration(self, ids, self._view(ids))
            # The mark comes before the wait: else readers that follow each other hold it off.
            self._states[ids] = State.MIGRATING
            self._await(lambda: not self._users[ids].any())
        try:
            yield migration
        finally:
            migration.close()

    def _settle(self, ids: Ids, states: NDArray[np.uint8] | State, places: Ids | int) -> None:
        with self._changed:
            self._states[ids] = states
            self._places[ids] = places
            self._versions[ids] += 1
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(condition)

    def _is_readable(self, ids: Ids) -> bool:
        migrates = (self._states[ids] == State.MIGRATING).any()
        return not migrates and not (self._users[ids] == _WRITER).any()

    def _is_unused(self, ids: Ids) -> bool:
        return not (self._states[ids] == State.MIGRATING).any() and not self._users[ids].any()

    def _view(self, ids: Ids) -> View:
        return View(self._states[ids], self._places[ids], self._versions[ids])

    def _grow(self) -> None:
        old = len(self._states)
        self._states = np.concatenate([self._states, np.zeros(old, np.uint8)])
        self._places = np.concatenate([self._places, np.full(old, NOWHERE, np.int64)])
        self._versions = np.concatenate([self._versions, np.zeros(old, np.uint32)])
        self._users = np.concatenate([self._users, np.zeros(old, np.int32)])
        free = np.empty(2 * old, np.int64)
        free[: self._free_count] = self._free[: self._free_count]
        free[self._free_count : self._free_count + old] = np.arange(2 * old - 1, old - 1, -1)
        self._free, self._free_count = free, self._free_count + old

"""Brings in the sessions that are foretold, and sends down those that are idle.

It is told of what happens in the mount and has the tier do the rest, within a budget: of the
guesses the surest goes first, and none while readers need the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cachetools import LRUCache

from kvfs.engine.io import Completion, Step
from kvfs.tiers import hints
from kvfs.tiers.budget import Budget
from kvfs.tiers.predict import Forecast, Predictor, Reason

log = logging.getLogger(__name__)

# One that could not be brought in whole is not tried again at once.
_AGAIN_SECONDS = 30.0
_TRIED_MAX = 4096
_QUIET_SECONDS = 2.0  # without a use, after which who reads a session has paused


class Tier(Protocol):
    """Where sessions are brought to; a session is named by its inode."""

    @property
    def is_strained(self) -> bool:
        """Nothing more is to be brought in on a guess for now."""

    def is_whole(self, session: int) -> bool:
        """All of it is known to be in memory."""

    def promote(self, session: int) -> Step[int]:
        """Bring it to memory, behind all that somebody waits for. Returns the bytes that were
        read. Raises OSError."""

    def demote(self, sessions: list[int]) -> Step[None]:
        """See them in the ring and give their memory back. Raises OSError."""


@dataclass(slots=True)
class Outcomes:
    """How many sessions were brought in by each kind of forecast and then used (`right`), or
    not (`wrong`); what was read for that, in bytes."""

    right: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    wrong: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    right_bytes: int = 0
    wrong_bytes: int = 0


@dataclass(slots=True)
class HotUses:
    """Blocks that agents found on the accelerator, and not, as far as they tell."""

    hits: int = 0
    misses: int = 0


@dataclass(slots=True)
class _Brought:
    """For which forecast; what was read for it, in bytes, None as long as it is; whether it
    was right, None as long as nobody knows."""

    forecast: Forecast
    size: int | None = None
    is_right: bool | None = None


@dataclass(slots=True)
class _Opened:
    """When it was opened or used last; its size, and how much of it was read since, in bytes."""

    last_use: float
    size: int
    read: int = 0


class Planner:
    """`group` sessions go down at once. `spawn` drives a step beside the caller; `demand_waits`
    says whether a reader waits for a thread, `demanded` how many bytes were read for readers
    since the start. Times are seconds of `clock`."""

    def __init__(
        self,
        tier: Tier,
        predictor: Predictor,
        budget: Budget,
        group: int,
        spawn: Callable[[Step[None]], Completion[None]],
        demand_waits: Callable[[], bool],
        demanded: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcomes = Outcomes()
        self.hot_uses = HotUses()
        self._tier = tier
        self._predictor = predictor
        self._budget = budget
        self._group = group
        self._spawn = spawn
        self._demand_waits = demand_waits
        self._demanded = demanded
        self._demanded_before = 0
        self._clock = clock
        self._tried: LRUCache[int, float] = LRUCache(_TRIED_MAX)
        self._brought: LRUCache[int, _Brought] = LRUCache(_TRIED_MAX)
        self._hot: LRUCache[int, hints.HotStats] = LRUCache(_TRIED_MAX)
        self._opened: LRUCache[int, _Opened] = LRUCache(_TRIED_MAX)
        self._idle: dict[int, None] = {}
        self._is_demoting = False

    # -- what happens

    def saw_open(self, session: int, now: float, size: int) -> None:
        """A file of it, of `size` bytes in all, was opened for reading. While somebody reads it
        the device has enough to do: it is brought in once nobody did for a while."""
        opened = self._opened.setdefault(session, _Opened(now, size))
        opened.last_use, opened.size = now, size

    def saw_use(self, session: int, now: float, read: int = 0) -> None:
        """A read, of so many bytes, or a write of one of its files reached us. Who has read all
        of it has it, and does not want it a second time."""
        brought = self._brought.pop(session, None)
        if brought is not None:
            brought.is_right = True
            self._count(brought)
        self._idle.pop(session, None)
        opened = self._opened.get(session)
        if opened is not None:
            opened.last_use = now
            opened.read += read
            if opened.read >= opened.size:
                del self._opened[session]
        self._predictor.used(session, now)

    def hint(self, session: int, said: hints.Said, now: float, size: int) -> None:
        """Of a session of `size` bytes."""
        if isinstance(said, hints.HotStats):
            self._count_hot(session, said)
            self._hot[session] = said
        self._predictor.hint(session, said, now, size)
        self._bring_in(now)

    def _count_hot(self, session: int, said: hints.HotStats) -> None:
        before = self._hot.get(session)
        if before is None or said.hits < before.hits or said.misses < before.misses:
            before = hints.HotStats(0)  # it was opened anew, and counts from there
        self.hot_uses.hits += said.hits - before.hits
        self.hot_uses.misses += said.misses - before.misses

    @property
    def hot_hit_rate(self) -> float | None:
        """What share of blocks agents found on the accelerator, of those that told of it."""
        hits = sum(hot.hits for hot in self._hot.values())
        asked = hits + sum(hot.misses for hot in self._hot.values())
        return hits / asked if asked else None

    def removed(self, session: int) -> None:
        self._predictor.forget(session)
        self._opened.pop(session, None)
        self._hot.pop(session, None)
        self._brought.pop(session, None)
        self._idle.pop(session, None)

    def tick(self, now: float) -> None:
        """Call about once a second."""
        self._bring_in(now)
        self._send_down(now)

    # -- what follows from it

    def _bring_in(self, now: float) -> None:
        for session, opened in list(self._opened.items()):
            if now - opened.last_use >= _QUIET_SECONDS:
                del self._opened[session]
                self._predictor.opened(session, now, opened.size)
        demanded = self._demanded()
        self._budget.demand(demanded - self._demanded_before, now)
        self._demanded_before = demanded
        self._predictor.bandwidth = self._budget.rate
        if self._tier.is_strained:
            return
        for forecast in self._predictor.wanted(now):
            session = forecast.session
            tried = self._tried.get(session, -_AGAIN_SECONDS)
            if self._tier.is_whole(session) or now - tried < _AGAIN_SECONDS:
                continue
            if not self._budget.begin(forecast.size, now, demand_waits=self._demand_waits()):
                return
            self._tried[session] = now
            brought = self._brought[session] = _Brought(forecast)
            self._idle.pop(session, None)
            self._spawn(self._promote(brought))

    def _promote(self, brought: _Brought) -> Step[None]:
        session = brought.forecast.session
        size = 0
        try:
            size = yield from self._tier.promote(session)
        except OSError as failure:
            # Whoever asks for it is told; a guess fails nobody.
            log.debug("session %d was not brought in: %s", session, failure)
        finally:
            brought.size = size
            self._budget.end(brought.forecast.size, size, self._clock())
        self._count(brought)
        if brought.is_right is False:  # meanwhile it was sent down, as far as it was there
            self._idle[session] = None
        self._bring_in(self._clock())

    def _count(self, brought: _Brought) -> None:
        """Once it is there, and was used or not."""
        if brought.size is None or brought.is_right is None:
            return
        outcomes, reason = self.outcomes, brought.forecast.reason
        if brought.is_right:
            outcomes.right[reason] += 1
            outcomes.right_bytes += brought.size
        else:
            outcomes.wrong[reason] += 1
            outcomes.wrong_bytes += brought.size

    def _send_down(self, now: float) -> None:
        for session in self._predictor.idle(now):
            brought = self._brought.pop(session, None)
            if brought is not None:
                brought.is_right = False
                self._count(brought)
            self._idle[session] = None
        if self._idle and not self._is_demoting:
            self._is_demoting = True
            self._spawn(self._demote())

    def _demote(self) -> Step[None]:
        try:
            while self._idle:
                group = list(self._idle)[: self._group]
                yield from self._tier.demote(group)
                for session in group:
                    self._tried.pop(session, None)
                    self._idle.pop(session, None)
        except OSError as failure:
            log.debug("idle sessions stay in memory for now: %s", failure)
        finally:
            self._is_demoting = False

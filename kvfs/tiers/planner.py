"""Brings in the sessions that are foretold, and sends down those that are idle.

It is told of what happens in the mount and has the tiers do the rest, within a budget: of the
guesses the surest goes first, and none while a reader waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvfs.engine.io import Completion, DeadlineExceeded, Step
from kvfs.tiers import hints
from kvfs.tiers.budget import Budget
from kvfs.tiers.predict import Forecast, Predictor, Reason

log = logging.getLogger(__name__)

_DEMOTIONS_MAX = 2  # at once


class Tier(Protocol):
    """Where sessions are brought to. Sizes in bytes; a session is named by its inode."""

    def is_up(self, session: int) -> bool:
        """It is in memory, or on its way."""

    def size(self, session: int) -> int:
        """What bringing it in would read."""

    def promote(self, session: int) -> Step[None]:
        """Bring it to warm, in the background."""

    def demote(self, session: int) -> Step[None]:
        """See it in the ring and give its memory back."""


@dataclass(slots=True)
class Outcomes:
    """How many sessions were brought in by each kind of forecast and then used (`right`), or
    not (`wrong`); `wasted` are the bytes of the latter."""

    right: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    wrong: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    brought: int = 0
    wasted: int = 0


class Planner:
    """`spawn` drives a step beside the caller; `demand_waits` says whether a reader waits for
    a thread. Times are seconds of `clock`."""

    def __init__(
        self,
        tier: Tier,
        predictor: Predictor,
        budget: Budget,
        spawn: Callable[[Step[None]], Completion[None]],
        demand_waits: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcomes = Outcomes()
        self._tier = tier
        self._budget = budget
        self._spawn = spawn
        self._demand_waits = demand_waits
        self._clock = clock
        self._predictor = predictor
        self._brought: dict[int, Forecast] = {}
        self._going_down: dict[int, bool] = {}  # by whether it is under way

    # -- what happens

    def saw_open(self, session: int, now: float) -> None:
        """A file of it was opened for reading."""
        self._predictor.opened(session, now)
        self._bring_in(now)

    def saw_use(self, session: int, now: float) -> None:
        """A read or write of one of its files reached us."""
        forecast = self._brought.pop(session, None)
        if forecast is not None:
            self.outcomes.right[forecast.reason] += 1
        if self._going_down.get(session) is False:
            del self._going_down[session]
        self._predictor.used(session, now)

    def read(self, size: int, now: float) -> None:
        """So many bytes were read from the device for somebody who waited."""
        self._budget.demand(size, now)

    def hint(self, session: int, value: bytes, now: float) -> None:
        """Raises ValueError for what is no hint."""
        self._predictor.hint(session, hints.parse(value), now)
        self._bring_in(now)

    def removed(self, session: int) -> None:
        self._predictor.forget(session)
        self._brought.pop(session, None)
        self._going_down.pop(session, None)

    def tick(self, now: float) -> None:
        """Call about once a second."""
        self._bring_in(now)
        self._send_down(now)

    # -- what follows from it

    def _bring_in(self, now: float) -> None:
        self._predictor.bandwidth = self._budget.rate
        for forecast in self._predictor.wanted(now):
            session = forecast.session
            if self._tier.is_up(session):
                continue
            size = self._tier.size(session)
            if not self._budget.begin(size, now, demand_waits=self._demand_waits()):
                return
            self._going_down.pop(session, None)
            self._brought[session] = forecast
            self.outcomes.brought += size
            self._spawn(self._promote(session, size))

    def _promote(self, session: int, size: int) -> Step[None]:
        try:
            yield from self._tier.promote(session)
        except (OSError, DeadlineExceeded) as failure:
            # Whoever asks for it is told; a guess fails nobody.
            log.debug("session %d was not brought in: %s", session, failure)
            self._brought.pop(session, None)
            size = 0
        finally:
            self._budget.end(size, self._clock())

    def _send_down(self, now: float) -> None:
        for session in self._predictor.idle(now):
            forecast = self._brought.pop(session, None)
            if forecast is not None:
                self.outcomes.wrong[forecast.reason] += 1
                self.outcomes.wasted += self._tier.size(session)
            if self._tier.is_up(session):
                self._going_down.setdefault(session, False)
        waiting = [session for session, is_going in self._going_down.items() if not is_going]
        for session in waiting[: _DEMOTIONS_MAX - (len(self._going_down) - len(waiting))]:
            self._going_down[session] = True
            self._spawn(self._demote(session))

    def _demote(self, session: int) -> Step[None]:
        try:
            yield from self._tier.demote(session)
        except (OSError, DeadlineExceeded) as failure:
            log.debug("session %d stays in memory for now: %s", session, failure)
            self._going_down[session] = False
        else:
            self._going_down.pop(session, None)

"""Which sessions are needed soon, by when, how sure that is; and which are not.

Pure logic: it is told what happens, and when, and does nothing itself. Four things foretell a
turn, from the surest to the least: somebody opens a file of the session, or its tool has
answered; the agent said when; sessions that are used together with it began a turn; the gaps
that it had before. All tables are bounded.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from kvfs.tiers.gaps import Gaps, Outlook
from kvfs.tiers.hints import HotStats, Said, ToolDone, ToolStarted, TurnExpected
from kvfs.tiers.together import WINDOW_SECONDS, Together

# Requests with less between them belong to one turn.
_PAUSE_SECONDS = 1.0
_FLEET_RATE = 1 / 200
# Bringing in begins so long before it has to: nobody looks more often than once a second.
_AHEAD_SECONDS = 2.0
_STALE_MAX = 64  # entries of a heap, before it is made anew
# Of a turn that somebody foretold.
_SURE = 0.95
_SAID = 0.9


class Reason(Enum):
    """What a forecast is made from, the best first."""

    OPENED = "opened"
    TOOL_DONE = "tool_done"
    SAID = "said"
    TOGETHER = "together"
    GAPS = "gaps"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The session is used between `by` and `until` (seconds, of the clock that was given),
    with a chance of `sureness`. `size` in bytes, as far as it is known."""

    session: int
    by: float
    until: float
    sureness: float
    reason: Reason
    size: int


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """A session goes down after `idle_seconds`, is brought in `hold_seconds` for a guess, and
    only for one of `least_sureness`."""

    idle_seconds: float = 300.0
    hold_seconds: float = 60.0
    least_sureness: float = 0.5
    sessions_max: int = 32_768


@dataclass(frozen=True, slots=True)
class _Planned:
    """So early that it is there in time."""

    start: float
    forecast: Forecast


@dataclass(slots=True)
class _Session:
    """`used`: when last, -inf before the first time; `checked_at`: when it is looked at next
    because it may be idle, inf once it was found to be. `size` is the last that was told,
    `hot` what of it is on the accelerator, both in bytes."""

    used: float = -inf
    checked_at: float = inf
    size: int = 0
    hot: int = 0
    in_tool: bool = False
    after_tool: Gaps = field(default_factory=Gaps)
    otherwise: Gaps = field(default_factory=Gaps)

    @property
    def gaps(self) -> Gaps:
        return self.after_tool if self.in_tool else self.otherwise


class Predictor:
    """`bandwidth`: bytes a second at which a session is brought in."""

    bandwidth = 1e9

    def __init__(self, options: PredictOptions = PredictOptions()) -> None:
        self.options = options
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._together = Together()
        self._fleet = {False: Gaps(), True: Gaps()}  # by whether a tool ran
        # By when they are due; an entry that is not the session's any longer is passed over.
        self._checks: list[tuple[float, int]] = []
        self._later: list[tuple[float, int]] = []
        self._planned: dict[int, _Planned] = {}
        self._wanted: dict[int, Forecast] = {}

    # -- what happens

    def used(self, session: int, now: float) -> None:
        """A request for the session reached us."""
        known = self._sessions.get(session) or self._add(session)
        gap = now - known.used
        if gap > _PAUSE_SECONDS:
            self._begins(session, known, now, gap)
        known.used = now
        if known.checked_at == inf:
            self._check(session, known, now + self.options.idle_seconds)

    def opened(self, session: int, now: float, size: int) -> None:
        """A file of it was opened, which has `size` bytes in all: what follows is most likely
        a read."""
        known = self._sessions.get(session) or self._add(session)
        known.size = size
        self._foretell(session, now, now, _SURE, Reason.OPENED)

    def hint(self, session: int, hint: Said, now: float, size: int) -> None:
        """Said of a session that has `size` bytes."""
        known = self._sessions.get(session) or self._add(session)
        known.size = size
        match hint:
            case ToolStarted():
                known.in_tool = True
            case ToolDone():
                self._foretell(session, now, now, _SURE, Reason.TOOL_DONE)
            case TurnExpected(seconds):
                by = now + seconds
                self._foretell(session, now, by, _SAID, Reason.SAID)
                idle_from = now if seconds > self.options.idle_seconds else by + self._hold
                self._check(session, known, idle_from)
            case HotStats(held):
                known.hot = held

    def forget(self, session: int) -> None:
        """It was removed."""
        self._sessions.pop(session, None)
        self._planned.pop(session, None)
        self._wanted.pop(session, None)

    # -- what follows from it

    def wanted(self, now: float) -> list[Forecast]:
        """What should be brought in now, the surest first: it is asked for again until it is
        used, or its time is over."""
        while self._later and self._later[0][0] <= now:
            start, session = heapq.heappop(self._later)
            planned = self._planned.get(session)
            if planned is not None and planned.start == start:
                del self._planned[session]
                self._wanted[session] = planned.forecast
        for forecast in [each for each in self._wanted.values() if each.until < now]:
            del self._wanted[forecast.session]
            self._check(forecast.session, self._sessions[forecast.session], now)
        cold = [each for each in self._wanted.values() if not self._is_hot(each.session)]
        return sorted(cold, key=lambda each: (-each.sureness, each.by))

    def idle(self, now: float) -> Iterator[int]:
        """The sessions that are not needed soon, each once after its last use, and after each
        forecast that did not come true."""
        while self._checks and self._checks[0][0] <= now:
            due, session = heapq.heappop(self._checks)
            known = self._sessions.get(session)
            if known is None or known.checked_at != due:
                continue
            kept_until = self._kept_until(session, known, now)
            if kept_until > now:
                self._check(session, known, kept_until)
            else:
                known.checked_at = inf
                yield session

    def _is_hot(self, session: int) -> bool:
        """The accelerator holds all of it: nothing is read."""
        known = self._sessions[session]
        return known.hot >= known.size > 0

    def _kept_until(self, session: int, known: _Session, now: float) -> float:
        """Till when a session stays that is looked at because it may be idle."""
        foretold = self._foretold(session)
        if foretold is not None:
            soon = foretold.by - now <= self.options.idle_seconds
            return foretold.until if soon and foretold.until > now else now
        if known.used + self.options.idle_seconds > now:
            return known.used + self.options.idle_seconds
        forecast = self._by_gaps(session, known, now)
        if forecast is None:
            return now
        if forecast.by - now <= self._hold:
            return forecast.until
        self._plan(forecast, now)
        return now

    def _by_gaps(self, session: int, known: _Session, now: float) -> Forecast | None:
        """When an idle session is most likely to be used, if that is likely enough."""
        own, fleet = known.gaps, self._fleet[known.in_tool]
        outlook, idle = Outlook(own, fleet), now - known.used
        moments = [max(idle, gaps.usual - self._hold / 2) for gaps in (own, fleet)]
        sureness, idle = max((outlook.chance(at, self._hold), at) for at in [idle, *moments])
        if sureness < self.options.least_sureness:
            return None
        by = known.used + idle
        return Forecast(session, by, by + self._hold, sureness, Reason.GAPS, known.size)

    # -- forecasts and tables

    @property
    def _hold(self) -> float:
        return self.options.hold_seconds

    def _add(self, session: int) -> _Session:
        if len(self._sessions) >= self.options.sessions_max:
            self.forget(next(iter(self._sessions)))
        known = self._sessions[session] = _Session()
        return known

    def _begins(self, session: int, known: _Session, now: float, gap: float) -> None:
        """A turn. Who was used together with it may be needed too."""
        self._sessions.move_to_end(session)
        if gap < inf:
            known.gaps.saw(gap)
            self._fleet[known.in_tool].saw(gap, _FLEET_RATE)
        known.in_tool = False
        self._planned.pop(session, None)
        self._wanted.pop(session, None)
        was_away = inf > gap > self.options.idle_seconds + WINDOW_SECONDS
        for other, sureness in self._together.began(session, now, was_away, self._is_away(now)):
            self._foretell(other, now, now, sureness, Reason.TOGETHER, WINDOW_SECONDS)

    def _is_away(self, now: float) -> Callable[[int], bool]:
        def is_away(session: int) -> bool:
            known = self._sessions.get(session)
            return known is not None and now - known.used > self.options.idle_seconds

        return is_away

    def _foretell(
        self,
        session: int,
        now: float,
        by: float,
        sureness: float,
        reason: Reason,
        hold_seconds: float | None = None,
    ) -> None:
        """Unless something better is known of it."""
        hold = self.options.hold_seconds if hold_seconds is None else hold_seconds
        size = self._sessions[session].size
        forecast = Forecast(session, by, by + hold, sureness, reason, size)
        better = self._foretold(session)
        is_worse = better is not None and better.until >= now and better.sureness > sureness
        if sureness >= self.options.least_sureness and not is_worse:
            self._planned.pop(session, None)
            self._wanted.pop(session, None)
            self._plan(forecast, now)

    def _foretold(self, session: int) -> Forecast | None:
        planned = self._planned.get(session)
        return self._wanted.get(session) if planned is None else planned.forecast

    def _plan(self, forecast: Forecast, now: float) -> None:
        session = forecast.session
        start = forecast.by - _AHEAD_SECONDS - forecast.size / self.bandwidth
        if start <= now:
            self._wanted[session] = forecast
            return
        self._planned[session] = _Planned(start, forecast)
        heapq.heappush(self._later, (start, session))
        if len(self._later) > 2 * len(self._planned) + _STALE_MAX:
            self._later = [(each.start, each.forecast.session) for each in self._planned.values()]
            heapq.heapify(self._later)

    def _check(self, session: int, known: _Session, at: float) -> None:
        known.checked_at = at
        heapq.heappush(self._checks, (at, session))
        if len(self._checks) > 2 * len(self._sessions) + _STALE_MAX:
            checks = [(each.checked_at, name) for name, each in self._sessions.items()]
            self._checks = [check for check in checks if check[0] < inf]
            heapq.heapify(self._checks)

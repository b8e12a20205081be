"""What is read and written: told to the policy that names victims, and kept as heat.

A request only adds to a list; the rest is done for many at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvfs.engine.policy import Hint, Policy
from kvfs.tiers.heat import HeatMap, Temperature
from kvfs.tiers.hints import Said, ToolDone, ToolStarted, TurnExpected
from kvfs.tiers.slots import SlotTable

_RECENT_MAX = 512
_KEPT_MAX = 200_000
_SAMPLE_MAX = 1024
_MEANING = {
    ToolStarted: Hint.TOOL_RUNNING,
    ToolDone: Hint.TURN_EXPECTED,
    TurnExpected: Hint.TURN_EXPECTED,
}


@dataclass(frozen=True, slots=True)
class HeatSummary:
    """Of the sessions that were used lately: their mean heat, and how many lie above 1.8 times
    that, between, and below 0.9 times."""

    mean: float = 0.0
    hot: int = 0
    warm: int = 0
    cold: int = 0


@dataclass(slots=True)
class _Heat:
    """The heat of what was used lately, by key."""

    map: HeatMap = field(default_factory=HeatMap)
    slots: SlotTable = field(default_factory=SlotTable)

    def access(self, keys: list[int]) -> None:
        # A key that is new and comes twice must get one slot.
        self.slots.take(list(dict.fromkeys(keys)))
        self.map.access(self.slots.take(keys))
        if len(self.slots) > _KEPT_MAX:
            self._forget_half()

    def of(self, key: int) -> float:
        slots = self.slots.find([key])
        return float(self.map.heat(slots)[0]) if slots.size else 0.0

    def summary(self) -> HeatSummary:
        """Estimated from some of them, evenly taken, if there are very many. 0 is none of them."""
        size = self.slots.size
        some = np.arange(0, size, max(1, -(-size // _SAMPLE_MAX)))
        # A slot that nobody has has the key 0, or, once it was given back, no heat.
        some = some[self.slots.keys(some) != 0]
        some = some[self.map.heat(some) > 0]
        if not some.size:
            return HeatSummary()
        known = len(self.slots) - self.slots.find([0]).size
        temperatures = self.map.classify(some)
        hot, warm, cold = (
            round(known / some.size * int((temperatures == one).sum()))
            for one in (Temperature.HOT, Temperature.WARM, Temperature.COLD)
        )
        return HeatSummary(float(self.map.heat(some).mean()), hot, warm, cold)

    def _forget_half(self) -> None:
        known = self.slots.all()
        cold = known[np.argsort(self.map.heat(known))[: known.size // 2]]
        self.map.forget(cold)
        self.slots.give_back(cold)


@dataclass(slots=True)
class Uses:
    """Of files and of the sessions that they are in (0: none). `clock` gives seconds."""

    policy: Policy
    clock: Callable[[], float]
    _files: _Heat = field(default_factory=_Heat)
    _sessions: _Heat = field(default_factory=_Heat)
    _recent: list[tuple[int, int]] = field(default_factory=list)

    def record(self, session: int, ino: int) -> None:
        """One read or write of a file reached us."""
        self._recent.append((session, ino))
        if len(self._recent) >= _RECENT_MAX:
            self.settle()

    def settle(self) -> None:
        """What was recorded counts. Called about once a second, and before anybody asks."""
        if not self._recent:
            return
        recent, self._recent = self._recent, []
        self._files.access([ino for _, ino in recent])
        self._sessions.access([session for session, _ in recent])
        now_s = self.clock()
        # Each by itself: several at once would be one request's.
        for session in dict.fromkeys(session for session, _ in recent):
            self.policy.touch([session], now_s)

    def hint(self, session: int, said: Said) -> None:
        """What an agent said of its session after its last use."""
        hint = _MEANING.get(type(said))
        if hint is not None:
            self.settle()
            self.policy.hint([session], hint)

    def heat(self, key: int, *, is_session: bool) -> float:
        """H of a file or of a session: the sum of 1 / (now + 1 - tick) over its last uses, a
        tick for each use of any (heat.py)."""
        self.settle()
        return (self._sessions if is_session else self._files).of(key)

    def summary(self) -> HeatSummary:
        self.settle()
        return self._sessions.summary()

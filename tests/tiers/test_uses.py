"""Uses: what the policy is told, and heat by the formula."""

from __future__ import annotations

import pytest

from kvfs.engine.policy import Hint, Keys
from kvfs.tiers import uses
from kvfs.tiers.hints import HotStats, ToolDone, ToolStarted, TurnExpected
from kvfs.tiers.policy import LRU
from kvfs.tiers.uses import HeatSummary, Uses


class Told(LRU):
    """An LRU that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def touch(self, keys: Keys, now_s: float) -> None:
        super().touch(keys, now_s)
        self.calls.append((list(keys), now_s))

    def hint(self, keys: Keys, hint: Hint) -> None:
        self.calls.append((list(keys), hint))


def test_sessions_are_told_once_each_in_their_order_when_it_settles() -> None:
    policy = Told()
    made = Uses(policy, lambda: 7.0)
    for session, ino in [(1, 10), (2, 20), (1, 11), (2, 20)]:
        made.record(session, ino)
    assert policy.calls == []
    made.settle()
    made.settle()
    assert policy.calls == [([1], 7.0), ([2], 7.0)]


def test_a_hint_comes_after_the_uses_before_it() -> None:
    policy = Told()
    made = Uses(policy, lambda: 7.0)
    made.record(1, 10)
    made.hint(1, ToolStarted())
    made.hint(1, ToolDone())
    made.hint(1, TurnExpected(3.0))
    made.hint(1, HotStats(5))
    assert policy.calls == [
        ([1], 7.0),
        ([1], Hint.TOOL_RUNNING),
        ([1], Hint.TURN_EXPECTED),
        ([1], Hint.TURN_EXPECTED),
    ]


def test_heat_is_the_sum_of_one_over_age_in_uses_of_all() -> None:
    made = Uses(LRU(), lambda: 0.0)
    for session, ino in [(1, 10), (2, 20), (1, 11), (2, 20)]:
        made.record(session, ino)
    assert made.heat(20, is_session=False) == pytest.approx(1 / 1 + 1 / 3, rel=0.15)
    assert made.heat(10, is_session=False) == pytest.approx(1 / 4, rel=0.15)
    assert made.heat(1, is_session=True) == pytest.approx(1 / 2 + 1 / 4, rel=0.15)
    assert made.heat(99, is_session=False) == 0.0


def test_the_coldest_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "_KEPT_MAX", 100)
    made = Uses(LRU(), lambda: 0.0)
    for ino in range(1000):
        made.record(1, 5000)
        made.record(1, ino)
        if ino % 40 == 0:
            made.settle()
    assert made.heat(5000, is_session=False) > 1
    assert made.heat(999, is_session=False) > 0
    assert made.heat(0, is_session=False) == 0.0
    assert len(made._files.slots) <= 100


def test_the_summary_counts_sessions_by_their_heat_and_not_what_is_in_none() -> None:
    made = Uses(LRU(), lambda: 0.0)
    assert made.summary() == HeatSummary()
    for session in [*range(1, 101), 0, 0, *[1] * 50]:
        made.record(session, 10)
    summary = made.summary()
    assert summary.hot == 1
    assert summary.hot + summary.warm + summary.cold == 100
    heats = [made.heat(session, is_session=True) for session in range(1, 101)]
    assert summary.mean == pytest.approx(sum(heats) / 100)


def test_the_summary_of_very_many_is_estimated_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "_SAMPLE_MAX", 100)
    made = Uses(LRU(), lambda: 0.0)
    for session in range(1, 1001):
        made.record(session, 10)
    summary = made.summary()
    assert summary.hot + summary.warm + summary.cold == pytest.approx(1000, abs=20)
    whole = [made.heat(session, is_session=True) for session in range(1, 1001)]
    assert summary.mean == pytest.approx(sum(whole) / 1000, rel=0.5)


def test_the_summary_leaves_out_what_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "_KEPT_MAX", 50)
    made = Uses(LRU(), lambda: 0.0)
    for session in range(1, 52):
        made.record(session, 10)
    summary = made.summary()
    kept = sum(made.heat(session, is_session=True) > 0 for session in range(1, 52))
    assert summary.hot + summary.warm + summary.cold == kept < 51

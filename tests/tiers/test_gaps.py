"""The gaps between turns: what is learnt of them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers.gaps import Gaps, Outlook

SECONDS = st.floats(0.001, 1e7)


def learnt(seconds: list[float]) -> Gaps:
    gaps = Gaps()
    for gap in seconds:
        gaps.saw(gap)
    return gaps


@given(st.lists(SECONDS, min_size=1, max_size=60))
def test_the_mean_is_among_what_was_seen(seconds: list[float]) -> None:
    logs = [math.log(max(gap, 0.1)) for gap in seconds]
    assert min(logs) - 1e-6 <= learnt(seconds).mean <= max(logs) + 1e-6


@given(
    st.lists(SECONDS, max_size=20),
    st.lists(SECONDS, max_size=20),
    SECONDS | st.just(0.0),
    SECONDS,
    SECONDS,
)
def test_a_chance_is_one_and_grows_with_the_time(
    seconds: list[float], others: list[float], idle: float, within: float, more: float
) -> None:
    outlook = Outlook(learnt(seconds), learnt(others))
    chance = outlook.chance(idle, within)
    assert -1e-12 <= chance <= outlook.chance(idle, within + more) + 1e-12 <= 1 + 1e-12


def test_chances_come_true_as_often_as_they_say() -> None:
    """On gaps that are spread as those of agents are."""
    random = np.random.default_rng(1)
    seconds = np.exp(random.logistic(4.0, 0.7, 4000))
    gaps = learnt([])
    for gap in seconds[:2000]:
        gaps.saw(gap, rate=1 / 200)
    for idle, within in [(0, 60), (30, 60), (60, 300), (300, 300)]:
        still_idle = seconds[2000:][seconds[2000:] > idle]
        share = np.mean(still_idle <= idle + within)
        assert abs(Outlook(gaps, gaps).chance(idle, within) - share) < 0.08


def test_what_is_regular_is_foretold_to_the_minute() -> None:
    gaps = learnt([600 + wobble for wobble in (0, 3, -4, 2, -1, 5, -3, 1) * 8])
    assert abs(gaps.usual - 600) < 20
    outlook = Outlook(gaps, learnt([5, 4000, 40, 900] * 10))
    assert outlook.chance(570, 60) > 0.8
    assert outlook.chance(300, 60) < 0.05


def test_a_gap_that_outlasts_its_rule_has_none() -> None:
    """That it must end soon because it should have ended long ago is no reason."""
    gaps = learnt([10.0] * 50)
    outlook = Outlook(gaps, gaps)
    assert outlook.chance(5, 10) > 0.9
    assert outlook.chance(300, 60) < 0.15


def test_it_follows_a_session_that_changes() -> None:
    gaps = learnt([10.0] * 50 + [1000.0] * 30)
    assert 900 < math.exp(gaps.mean) <= 1000


def test_the_others_are_what_is_known_of_a_new_session() -> None:
    fleet, old = learnt([100.0, 120.0, 90.0] * 20), learnt([5.0] * 200)
    assert Outlook(Gaps(), fleet).chance(0, 10) < 0.05
    assert Outlook(old, fleet).chance(0, 10) > 0.9

"""Sessions that are used together."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers import together
from kvfs.tiers.together import Together


def away(*sessions: int) -> Callable[[int], bool]:
    return lambda session: session in sessions


def rounds(known: Together, count: int, start: float = 0.0, *, follows: bool = True) -> float:
    """Session 1 begins a turn each 1000 s, and 2, which was away, 5 s later."""
    now = start
    for _ in range(count):
        list(known.began(1, now, True, away(2)))
        if follows:
            list(known.began(2, now + 5, True, away(1)))
        now += 1000
    return now


def test_what_follows_again_and_again_is_foretold() -> None:
    known = Together()
    now = rounds(known, 1)
    assert list(known.began(1, now, True, away(2))) == [(2, 0.0)], "once is no rule"
    now = rounds(known, 20, now)
    ((other, sureness),) = known.began(1, now, True, away(2))
    assert other == 2
    assert sureness > 0.8


def test_who_is_there_is_not_foretold() -> None:
    known = Together()
    now = rounds(known, 20)
    assert list(known.began(1, now, True, away())) == []


def test_what_no_longer_follows_is_forgotten() -> None:
    known = Together()
    now = rounds(known, 20)
    now = rounds(known, 100, now, follows=False)
    assert [sureness for _, sureness in known.began(1, now, True, away(2))] < [0.1]


def test_many_turns_in_a_row_are_one_trial() -> None:
    known = Together()
    now = rounds(known, 10)
    for number in range(10):
        list(known.began(1, now + number, False, away(2)))
    list(known.began(2, now + 10, True, away()))
    ((_, sureness),) = known.began(1, now + 1000, True, away(2))
    assert sureness > 0.7


def test_what_comes_later_than_half_a_minute_is_another_matter() -> None:
    known = Together()
    for number in range(10):
        list(known.began(1, number * 1000.0, True, away(2)))
        list(known.began(2, number * 1000.0 + 31, True, away(1)))
    assert list(known.began(1, 20_000, True, away(2))) == []


@given(st.lists(st.tuples(st.integers(1, 120), st.floats(0, 20), st.booleans()), max_size=300))
def test_it_is_bounded_and_a_sureness_is_a_chance(turns: list[tuple[int, float, bool]]) -> None:
    known, now = Together(), 0.0
    for session, pause, was_away in turns:
        now += pause
        for other, sureness in known.began(session, now, was_away, lambda other: other % 2 == 0):
            assert other != session
            assert 0 <= sureness < 1
    assert len(known._lately) <= together._LATELY_MAX
    assert all(len(edges) <= together._EDGES_MAX for edges in known._edges.values())

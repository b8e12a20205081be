"""What guesses may use: never what demand uses, never before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers.budget import Bandwidth, Budget

RATE = 1000.0
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["demand", "guess", "guess while demand waits", "end"]),
        st.integers(1, 3000),
        st.floats(0, 3),
    ),
    max_size=80,
)


def new_budget() -> Budget:
    budget = Budget(Bandwidth(RATE))
    budget.demand(0, 0.0)
    return budget


@given(MOVES)
def test_guesses_have_what_demand_leaves(moves: list[tuple[str, int, float]]) -> None:
    """Over any time guesses take at most what the device does in it, a short burst and the
    last of them; and what demand took in it is not theirs, up to a second's worth."""
    budget, now, running = new_budget(), 0.0, []
    taken: list[tuple[float, int, bool]] = []
    for move, size, pause in moves:
        now += pause
        if move == "demand":
            budget.demand(size, now)
            taken.append((now, size, False))
        elif move == "end":
            if running:
                estimate = running.pop()
                budget.end(estimate, estimate, now)
        else:
            waits = move != "guess"
            if budget.begin(size, now, demand_waits=waits):
                assert not waits, "a guess goes before a reader"
                running.append(size)
                taken.append((now, size, True))
            assert len(running) == budget.in_flight <= budget.in_flight_max
    for first, (start, _, _) in enumerate(taken):
        for last, (end, size, is_guess) in enumerate(taken[first:], first):
            guesses = sum(each for _, each, guess in taken[first : last + 1] if guess)
            demand = sum(each for _, each, guess in taken[first : last + 1] if not guess)
            device = RATE * (end - start)
            if is_guess:
                assert guesses <= device + RATE / 10 + size + 1e-6
                assert guesses <= 2 * device + RATE / 10 + size - min(demand, RATE) + 1e-6


@given(st.lists(st.integers(1, 200), min_size=1, max_size=50))
def test_where_demand_uses_all_there_is_nothing_to_guess_with(sizes: list[int]) -> None:
    budget, now = new_budget(), 0.0
    budget.demand(int(RATE) + 1, now)
    for size in sizes:
        now += size / RATE
        budget.demand(size, now)
        assert not budget.begin(1, now, demand_waits=False)


def test_after_demand_has_ended_guesses_soon_go_on() -> None:
    budget = new_budget()
    for now in range(100):
        budget.demand(10_000, now)
    assert not budget.begin(1, 99.9, demand_waits=False)
    assert budget.begin(1, 100.1, demand_waits=False), "a long debt is forgiven"


def test_one_larger_than_the_bucket_may_go_and_those_after_it_wait() -> None:
    budget = new_budget()
    assert budget.begin(10_000, 5.0, demand_waits=False)
    budget.end(10_000, 10_000, 6.0)
    assert not budget.begin(1, 14.8, demand_waits=False)
    assert budget.begin(1, 15.0, demand_waits=False)


def test_what_has_ended_makes_place() -> None:
    budget = new_budget()
    assert [budget.begin(1, 5.0, demand_waits=False) for _ in range(2)] == [True, False]
    budget.end(1, 1, 5.1)
    assert budget.begin(1, 5.1, demand_waits=False)


def test_one_that_read_more_than_was_thought_has_to_be_paid_for() -> None:
    budget = new_budget()
    assert budget.begin(1, 5.0, demand_waits=False)
    budget.end(1, 3000, 5.0)
    assert not budget.begin(1, 7.8, demand_waits=False)
    assert budget.begin(1, 8.0, demand_waits=False)


def test_bandwidth_is_of_busy_time() -> None:
    measured = Bandwidth(1.0)
    for number in range(4):
        start = 100.0 * number
        measured.began(start)
        measured.began(start)
        measured.ended(50_000_000, start + 0.5)
        measured.ended(50_000_000, start + 1.0)
    assert measured.rate == pytest.approx(1e8)


def test_a_device_that_has_little_to_do_is_not_taken_for_slow() -> None:
    measured = Bandwidth(1e9)
    for number in range(3):
        measured.began(number)
        measured.ended(50_000_000, number + 0.5)
    assert 0.9e9 < measured.rate < 1e9
    for number in range(400):
        measured.began(number)
        measured.ended(50_000_000, number + 0.5)
    assert measured.rate == pytest.approx(1e8), "one that has become slow is, after a while"

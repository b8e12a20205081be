"""Eviction: each policy against a simple model of it, and what holds for all of them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine.policy import Hint, Policy
from kvfs.tiers import gittins
from kvfs.tiers.gittins import GittinsPolicy, gittins_index
from kvfs.tiers.policy import LRU, S3FIFO, HeatPolicy
from kvfs.tiers.replay import Foreknowledge, HintGiven, Replay, Trace

POLICIES = [LRU, S3FIFO, HeatPolicy, GittinsPolicy]
MakePolicy = Callable[[], Policy]

# Requests of different blocks, out of twelve.
requests = st.lists(
    st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True), min_size=1, max_size=40
)


def trace_of(blocks: list[list[int]], hints: tuple[HintGiven, ...] = ()) -> Trace:
    """A request a second."""
    arrays = [np.array(request, np.int32) for request in blocks]
    return Trace([float(second) for second in range(len(blocks))], arrays, 12, hints)


def hits(policy: Policy, blocks: list[list[int]], capacity: int) -> int:
    trace = trace_of(blocks)
    return round(Replay(trace, policy, capacity).hit_ratio() * trace.accesses)


# -- simple models -------------------------------------------------------------------------


def naive_lru_hits(blocks: list[list[int]], capacity: int) -> int:
    order: list[int] = []
    found = 0
    for request in blocks:
        found += len(set(request) & set(order))
        order = [block for block in order if block not in request] + request
        order = order[-capacity:]
    return found


def naive_s3fifo_hits(blocks: list[list[int]], capacity: int) -> int:
    """The paper's Algorithm 1, a request of several blocks at once."""
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: deque[int] = deque()
    uses: dict[int, int] = {}
    found = 0
    for request in blocks:
        for block in request:
            if block in small or block in main:
                found += 1
                uses[block] = min(uses[block] + 1, 3)
            else:
                uses[block] = 0
                if block in ghosts:
                    ghosts.remove(block)
                    main.append(block)
                else:
                    small.append(block)
        share = 0.1 * (len(small) + len(main))
        gone: list[int] = []
        while len(small) + len(main) > capacity:
            if small and (len(small) >= share or not main):
                block = small.popleft()
                if uses[block] > 1:
                    uses[block] = 0
                    main.append(block)
                else:
                    gone.append(block)
            else:
                block = main.popleft()
                if uses[block]:
                    uses[block] -= 1
                    main.append(block)
                else:
                    uses.pop(block)
        ghosts.extend(gone)
        while len(ghosts) > 0.9 * (len(small) + len(main)):
            ghosts.popleft()
    return found


def brute_force_hits(blocks: list[list[int]], capacity: int) -> int:
    """The most hits that any choice of what to hold gives."""

    @cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(blocks):
            return 0
        request = frozenset(blocks[number])
        choices = itertools.combinations(held | request, min(capacity, len(held | request)))
        ahead = max(best(number + 1, frozenset(choice)) for choice in choices)
        return len(held & request) + ahead

    return best(0, frozenset())


@given(requests, st.integers(1, 10))
def test_lru_hits_as_its_model(blocks: list[list[int]], capacity: int) -> None:
    assert hits(LRU(), blocks, capacity) == naive_lru_hits(blocks, capacity)


@given(requests, st.integers(1, 10))
def test_s3fifo_hits_as_its_model(blocks: list[list[int]], capacity: int) -> None:
    assert hits(S3FIFO(), blocks, capacity) == naive_s3fifo_hits(blocks, capacity)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=8
    ),
    st.integers(1, 4),
)
def test_min_has_the_most_hits_there_can_be(blocks: list[list[int]], capacity: int) -> None:
    trace = trace_of(blocks)
    found = round(Foreknowledge(trace).hit_ratio(capacity) * trace.accesses)
    assert found == brute_force_hits(blocks, capacity)


# -- all policies --------------------------------------------------------------------------


@pytest.mark.parametrize("make", POLICIES)
@settings(max_examples=50)
@given(blocks=requests, capacity=st.integers(1, 10))
def test_no_policy_has_more_hits_than_min(
    make: MakePolicy, blocks: list[list[int]], capacity: int
) -> None:
    trace = trace_of(blocks)
    best = Foreknowledge(trace).hit_ratio(capacity)
    assert Replay(trace, make(), capacity).hit_ratio() <= best + 1e-9


operations = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.lists(st.integers(0, 20), min_size=1, unique=True)),
        st.tuples(st.just("hint"), st.lists(st.integers(0, 20), unique=True)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 20), unique=True)),
        st.tuples(st.just("forget"), st.lists(st.integers(0, 20), unique=True)),
        st.tuples(st.just("victims"), st.lists(st.integers(0, 20), max_size=8)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("make", POLICIES)
@settings(max_examples=100)
@given(operations=operations)
def test_a_policy_names_what_it_holds_and_holds_it_until_it_is_removed(
    make: MakePolicy, operations: list[tuple[str, list[int]]]
) -> None:
    policy = make()
    held: set[int] = set()
    for second, (operation, numbers) in enumerate(operations):
        keys = [number << 33 for number in numbers]  # inodes and session ids may be large
        match operation:
            case "touch":
                policy.touch(keys, float(second))
                held |= set(keys)
            case "hint":
                policy.hint(keys, Hint.WAITING)
            case "remove":
                policy.remove(keys)
                held -= set(keys)
            case "forget":
                policy.forget(keys)
                held -= set(keys)
            case _:
                named = policy.victims(len(numbers), float(second)).tolist()
                assert len(set(named)) == len(named) == min(len(numbers), len(held))
                assert set(named) <= held
        assert len(policy) == len(held)
    assert set(policy.victims(100, 1e6).tolist()) == held


@pytest.mark.parametrize("make", POLICIES)
def test_a_policy_has_no_chance_in_it(make: MakePolicy) -> None:
    rng = np.random.default_rng(5)
    blocks = [rng.choice(12, 4, replace=False).tolist() for _ in range(300)]
    assert hits(make(), blocks, 5) == hits(make(), blocks, 5)


@pytest.mark.parametrize("make", POLICIES)
def test_victims_that_may_not_go_do_not_keep_others(make: MakePolicy) -> None:
    """Of sessions that are open the next ones are asked for."""
    policy = make()
    policy.touch(list(range(500)), 0)
    first = policy.victims(10, 1).tolist()
    more = policy.victims(20, 1).tolist()
    assert more[:10] == first
    policy.remove(more[10:])
    assert policy.victims(10, 1).tolist() == first


def test_heat_holds_what_is_used_often() -> None:
    policy = HeatPolicy()
    for second in range(20):
        policy.touch([1, 2], second)
    policy.touch([3, 4, 5], 20)
    policy.touch([6, 7, 8, 9], 21)
    assert policy.victims(3, 21).tolist() == [3, 4, 5]


# -- the default ---------------------------------------------------------------------------


def test_the_index_of_a_constant_hazard_is_its_rate() -> None:
    """Bins so narrow that a use within one is seldom."""
    widths = np.full(40, 0.01)
    index = gittins_index(np.full((1, 40), 1 - np.exp(-0.01 * 3)), widths)
    np.testing.assert_allclose(index, 3, rtol=1e-3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_the_index_is_the_best_of_all_times_to_wait(hazard: list[float]) -> None:
    widths = np.arange(1.0, len(hazard) + 1)

    def rate(first: int, last: int) -> float:
        unused, found, held = 1.0, 0.0, 0.0
        for bin_ in range(first, last + 1):
            found += unused * hazard[bin_]
            held += unused * widths[bin_] * (1 - hazard[bin_] / 2)
            unused *= 1 - hazard[bin_]
        return found / held

    best = [
        max(rate(first, last) for last in range(first, len(hazard))) for first in range(len(hazard))
    ]
    np.testing.assert_allclose(gittins_index(np.array(hazard), widths), best, rtol=1e-6)


def test_an_index_rises_before_uses_that_come_late() -> None:
    """No use in the first 9 seconds, then nearly all: it pays to wait, the more the longer
    one waited. By the hazard alone what is young would go."""
    hazard = np.array([0.0] * 9 + [0.9] + [0.01] * 10)
    index = gittins_index(hazard, np.ones(20))
    assert (np.diff(index[:10]) > 0).all()
    assert index[0] > index[10]


def cyclic(sessions: int, rounds: int, blocks: int) -> list[list[int]]:
    """Sessions of so many blocks that take turns, and a scan beside each."""
    scan = itertools.count(sessions * blocks)
    return [
        request
        for _ in range(rounds)
        for session in range(sessions)
        for request in (
            [session * blocks + block for block in range(blocks)],
            [next(scan) for _ in range(blocks)],
        )
    ]


def test_the_default_learns_that_scans_are_not_used_again_and_sessions_are() -> None:
    requests_ = cyclic(sessions=8, rounds=60, blocks=6)
    arrays = [np.array(request, np.int32) for request in requests_]
    unique = 1 + max(map(max, requests_))
    trace = Trace([float(second) for second in range(len(arrays))], arrays, unique)
    of_all = {make: Replay(trace, make(), capacity=30).hit_ratio() for make in (LRU, GittinsPolicy)}
    best = Foreknowledge(trace).hit_ratio(30)
    assert of_all[LRU] == 0
    assert of_all[GittinsPolicy] > 0.7 * best


def test_the_default_learns_when_it_is_asked_and_not_while_something_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lessons = []
    learnt = gittins._learnt_index
    monkeypatch.setattr(gittins, "_learnt_index", lambda *c: lessons.append(1) or learnt(*c))
    policy = GittinsPolicy()
    for number in range(100):
        policy.touch([number], float(number))
    assert not lessons
    policy.victims(1, 100.0)
    policy.victims(1, 100.0)
    assert len(lessons) == 1


def agents(turns: int, meaning: tuple[Hint, Hint] | None) -> Trace:
    """Thirty sessions at random; after a tool the next turn comes soon, after the end of an
    answer late. Only hints tell which it is: `meaning` is what they are called."""
    rng = np.random.default_rng(2)
    due = [(float(session), session) for session in range(30)]
    times_s, sessions, hints = [], [], []
    for turn in range(turns):
        time_s, session = due.pop(due.index(min(due)))
        is_late = bool(rng.random() < 0.2)
        due.append((time_s + (200 if is_late else 20) * rng.uniform(0.5, 1.5), session))
        times_s.append(time_s)
        sessions.append(np.array([session], np.int32))
        if meaning:
            hints.append(HintGiven(time_s, turn, meaning[is_late]))
    return Trace(times_s, sessions, 30, hints)


def test_hints_help_and_what_they_mean_is_learnt() -> None:
    meanings = (None, (Hint.TOOL_RUNNING, Hint.WAITING), (Hint.FINISHED, Hint.TURN_EXPECTED))
    untold, told, misnamed = (
        Replay(agents(3000, meaning), GittinsPolicy(), 8).hit_ratio() for meaning in meanings
    )
    assert told > untold + 0.05
    assert misnamed == pytest.approx(told, abs=0.01)


@pytest.mark.parametrize("make", [HeatPolicy, GittinsPolicy])
def test_what_is_remembered_of_keys_that_went_is_bounded(
    make: type[HeatPolicy] | type[GittinsPolicy],
) -> None:
    policy = make(history=100)
    for number in range(0, 5000, 5):
        policy.touch(range(number, number + 5), number)
        policy.remove(policy.victims(max(len(policy) - 10, 0), number))
    assert len(policy._slots) <= 100 + 10 + 5
    assert len(policy) == 10

"""The heat map ranks as the sum over the last 100 ticks does, and takes less room and time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers.heat import COLD_SHARE, HOT_SHARE, HeatMap, Temperature

Ids = npt.NDArray[np.int64]
Pattern = Callable[[np.random.Generator, int, int], Ids]
WINDOW = 100


def exact_heat(accesses: Ids, blocks: int) -> npt.NDArray[np.float64]:
    """Section 7's formula, as it stands."""
    ticks: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=WINDOW))
    for tick, block in enumerate(accesses.tolist(), 1):
        ticks[block].append(tick)
    now = len(accesses)
    return np.array([sum(1 / (now + 1 - t) for t in ticks[block]) for block in range(blocks)])


def in_batches(accesses: Ids, size: int = 500, window: int = WINDOW) -> HeatMap:
    heat_map = HeatMap(window)
    for start in range(0, len(accesses), size):
        heat_map.access(accesses[start : start + size])
    return heat_map


def ranks(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Equal values share the mean of their places."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[which]


def spearman(one: npt.NDArray[np.floating], other: npt.NDArray[np.floating]) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


# -- patterns of access --------------------------------------------------------------------


def zipf(rng: np.random.Generator, blocks: int, length: int) -> Ids:
    popularity = 1 / np.arange(1, blocks + 1)
    return rng.choice(blocks, length, p=popularity / popularity.sum())


def recency(rng: np.random.Generator, blocks: int, length: int) -> Ids:
    """Mostly blocks that were used lately, among ever newer ones."""
    newest = np.arange(length) * blocks // length
    return np.maximum(newest - rng.geometric(0.02, length), 0)


def bursts(rng: np.random.Generator, blocks: int, length: int) -> Ids:
    """A block is used many times in a row, then not for long."""
    starts = rng.integers(0, blocks, length // 20)
    return np.repeat(starts, 20)[:length]


def turns(rng: np.random.Generator, blocks: int, length: int) -> Ids:
    """Sessions of 40 blocks: each turn uses all that its session has, and a few more."""
    sessions = blocks // 40
    grown = np.ones(sessions, np.int64)
    found: list[Ids] = []
    while sum(map(len, found)) < length:
        session = min(int(rng.exponential(sessions / 5)), sessions - 1)
        grown[session] = min(grown[session] + int(rng.integers(0, 4)), 40)
        found.append(session * 40 + np.arange(grown[session])[::-1])
    return np.concatenate(found)


@pytest.mark.parametrize("pattern", [zipf, recency, bursts, turns])
@pytest.mark.parametrize("blocks", [200, 2000])
def test_blocks_rank_as_by_the_formula(pattern: Pattern, blocks: int) -> None:
    accesses = pattern(np.random.default_rng(7), blocks, 40_000)
    used = np.unique(accesses)
    heats = in_batches(accesses).heat(used)
    assert spearman(heats, exact_heat(accesses, blocks)[used]) >= 0.99


@pytest.mark.parametrize("pattern", [zipf, recency, turns])
def test_the_heat_of_seldom_used_blocks_is_nearly_that_of_the_formula(pattern: Pattern) -> None:
    accesses = pattern(np.random.default_rng(11), 4000, 30_000)
    used, counts = np.unique(accesses, return_counts=True)
    seldom = used[counts <= 10]
    shares = in_batches(accesses).heat(seldom) / exact_heat(accesses, 4000)[seldom]
    assert 0.8 < shares.min() <= shares.max() < 1.1


def test_a_long_time_without_use_cools_down_in_order() -> None:
    heat_map = HeatMap()
    heat_map.access(np.arange(50))
    for _ in range(40):
        heat_map.access(np.arange(50, 250_050))
    heats = heat_map.heat(np.arange(50))
    assert (np.diff(heats) >= 0).all()
    assert 0.5e-7 < heats[0] < 2e-7, "1 / 10 million"


# -- accesses ------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 7))
def test_batches_change_nothing(accesses: list[int], size: int) -> None:
    ids = np.array(accesses, np.int64)
    at_once, one_by_one = in_batches(ids, 1000), in_batches(ids, size)
    known = np.unique(ids)
    np.testing.assert_allclose(at_once.heat(known), one_by_one.heat(known), rtol=1e-4)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_the_last_used_of_two_with_as_many_uses_is_hotter(order: list[int]) -> None:
    heat_map = in_batches(np.array(order, np.int64))
    last = {block: tick for tick, block in enumerate(order)}
    once = [block for block in last if order.count(block) == 1]
    by_heat = sorted(once, key=lambda block: heat_map.heat(np.array([block]))[0])
    assert by_heat == sorted(once, key=last.__getitem__)


def test_a_narrow_window_forgets_old_uses() -> None:
    accesses = np.array([0] * 400 + [1] * 20 + [2] * 40)
    wide, narrow = in_batches(accesses, window=100), in_batches(accesses, window=5)
    block = np.array([0])
    assert narrow.heat(block)[0] < 0.2 * wide.heat(block)[0]


def test_a_forgotten_block_starts_cold_as_something_else() -> None:
    heat_map = HeatMap()
    block = np.array([3])
    heat_map.access(np.repeat(block, 50))
    heat_map.forget(block)
    assert heat_map.heat(block)[0] == 0
    heat_map.add(np.array([4]))
    heat_map.access(np.array([3, 4]))
    heats = heat_map.heat(np.array([3, 4]))
    assert heats[0] == pytest.approx(1 / 2, rel=0.1)
    assert heats[1] == pytest.approx(1, rel=0.1)


# -- decisions -----------------------------------------------------------------------------


def test_temperatures_go_by_the_mean_of_those_that_are_hot_or_warm() -> None:
    rng = np.random.default_rng(3)
    heat_map = in_batches(zipf(rng, 300, 5000))
    ids = np.arange(250)
    heats = heat_map.heat(ids)
    found = heat_map.classify(ids)
    assert set(found.tolist()) == {Temperature.COLD, Temperature.WARM, Temperature.HOT}
    assert ((found == Temperature.HOT) == (heats > HOT_SHARE * heats.mean())).all()
    assert ((found == Temperature.COLD) == (heats < COLD_SHARE * heats.mean())).all()
    assert heat_map.classify(np.zeros(0, np.int64)).size == 0


def test_a_million_blocks_take_less_than_64_bytes_each_however_they_came() -> None:
    heat_map = HeatMap()
    for start in range(0, 1_000_000, 10_000):
        heat_map.add(np.arange(start, start + 10_000))
        heat_map.access(np.arange(start, start + 10_000, 7))
    assert heat_map.nbytes / 1_000_000 < 64
    assert heat_map.classify(np.arange(1_000_000)).size == 1_000_000

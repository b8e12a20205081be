"""The pool of hot bytes: equal slabs and workspaces under one budget."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs.torch import HotBudgetError, HotPool
from kvfs.torch.hot import WORKSPACES, Workspace

SLAB = 4096


def test_slabs_are_taken_until_the_budget_and_used_again() -> None:
    pool = HotPool(5 * SLAB, slab_bytes=SLAB)
    taken = pool.take(3)
    assert len(set(taken)) == 3
    assert pool.take(9) != [] and pool.take(1) == []
    assert (pool.used_slabs, pool.free_slabs, pool.used_bytes) == (5, 0, 5 * SLAB)
    pool.give(taken)
    assert pool.free_slabs == 3
    assert set(pool.take(3)) == set(taken)
    assert pool.allocated_bytes == 5 * SLAB


def test_pressure_is_told_in_bytes_that_are_missing() -> None:
    pool = HotPool(4 * SLAB, slab_bytes=SLAB)
    asked: list[int] = []
    pool.on_pressure = asked.append
    pool.press(4)
    assert asked == []
    pool.take(3)
    pool.press(3)
    assert asked == [2 * SLAB]


def test_a_layer_each_where_there_is_room_else_two() -> None:
    pool = HotPool(40 * SLAB, slab_bytes=SLAB)
    assert len(pool.lend("a", 2 * SLAB, want=5, slabs=0) or []) == 5
    # Slabs that the forward will take come before workspaces that it could do without.
    assert len(pool.lend("b", 2 * SLAB, want=5, slabs=30) or []) == WORKSPACES


def test_workspaces_that_rest_make_room_for_slabs_and_for_others() -> None:
    pool = HotPool(10 * SLAB, slab_bytes=SLAB)
    assert pool.lend("a", SLAB, want=8, slabs=0)
    assert pool.free_slabs == 0 or pool.workspace_bytes < pool.budget_bytes
    pool.rest("a")
    assert pool.free_slabs == 10
    assert len(pool.take(9)) == 9
    assert pool.lend("b", SLAB, want=2, slabs=0) is None
    pool.give([0])
    assert len(pool.lend("b", SLAB, want=2, slabs=0) or []) == 2


def test_a_budget_below_two_layers_is_refused_and_no_budget_rises() -> None:
    with pytest.raises(HotBudgetError, match=r"hot memory of 40960 bytes .* two layers"):
        HotPool(10 * SLAB, slab_bytes=SLAB).lend("a", 6 * SLAB, want=2, slabs=0)
    pool = HotPool(slab_bytes=SLAB)
    before = pool.budget_bytes
    assert pool.lend("a", before, want=2, slabs=0)
    assert pool.budget_bytes == 2 * before


@pytest.mark.parametrize("slab_bytes", [0, 5000])
def test_a_slab_is_whole_pages(slab_bytes: int) -> None:
    with pytest.raises(ValueError, match="whole number of pages"):
        HotPool(slab_bytes=slab_bytes)


def test_churn_does_not_fragment() -> None:
    """Thousands of sessions of random length come, grow and go: memory is the peak's."""
    random = np.random.default_rng(0)
    pool = HotPool(2000 * SLAB, slab_bytes=SLAB)
    sessions: dict[int, list[int]] = {}
    most = 0
    for number in range(5000):
        slabs = int(random.geometric(1 / 40))
        got = pool.take(slabs)
        while len(got) < slabs:
            most = max(most, pool.used_slabs)
            pool.give(got)
            pool.give(sessions.pop(int(random.choice(list(sessions)))))
            got = pool.take(slabs)
        sessions[number] = got
        most = max(most, pool.used_slabs)
        if random.random() < 0.9:
            pool.give(sessions.pop(int(random.choice(list(sessions)))))
        live = sum(map(len, sessions.values()))
        assert pool.used_slabs == live
        # Any session that fits the budget gets its slabs, wherever the free ones lie.
        assert pool.free_slabs == 2000 - live
        assert pool.allocated_bytes <= most * SLAB
    for slabs_of_one in sessions.values():
        pool.give(slabs_of_one)
    assert pool.used_slabs == 0
    assert most > 1000


class PoolMachine(RuleBasedStateMachine):
    """Owners and slabs in any order: never over the budget, never a slab with two users."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HotPool(64 * SLAB, slab_bytes=SLAB)
        self.held: list[int] = []
        self.active: dict[str, list[Workspace]] = {}

    @rule(count=st.integers(1, 20))
    def take(self, count: int) -> None:
        promised = self.pool.free_slabs
        got = self.pool.take(count)
        assert len(got) == min(count, promised)
        assert not set(got) & set(self.held)
        self.held += got

    @rule(count=st.integers(1, 20))
    def give(self, count: int) -> None:
        gone, self.held = self.held[:count], self.held[count:]
        self.pool.give(gone)

    @rule(
        owner=st.sampled_from("abc"),
        nbytes=st.integers(1, 12 * SLAB),
        want=st.integers(2, 6),
        slabs=st.integers(0, 10),
    )
    def lend(self, owner: str, nbytes: int, want: int, slabs: int) -> None:
        spaces = self.pool.lend(owner, nbytes, want, slabs)
        self.active.pop(owner, None)
        if spaces is not None:
            assert WORKSPACES <= len(spaces)
            assert all(space.nbytes >= nbytes for space in spaces)
            self.active[owner] = spaces

    @rule(owner=st.sampled_from("abc"))
    def rest(self, owner: str) -> None:
        self.pool.rest(owner)
        self.active.pop(owner, None)

    @rule(owner=st.sampled_from("abc"))
    def forgo(self, owner: str) -> None:
        self.pool.forgo(owner)
        self.active.pop(owner, None)

    @rule(nbytes=st.integers(1, 40 * SLAB))
    def shrink(self, nbytes: int) -> None:
        before, free = self.pool.allocated_bytes, self.pool.free_slabs
        lent = {id(space) for spaces in self.active.values() for space in spaces}
        given = self.pool.shrink(nbytes)
        assert self.pool.allocated_bytes == before - given
        assert self.pool.free_slabs == free, "what holds no KV can be taken as before"
        kept = self.pool.used_bytes + sum(
            space.nbytes for spaces in self.active.values() for space in spaces
        )
        assert len(lent) == sum(map(len, self.active.values()))
        assert given >= min(nbytes, before - kept)

    @invariant()
    def all_is_accounted_for(self) -> None:
        assert self.pool.used_slabs == len(self.held)
        assert self.pool.allocated_bytes <= self.pool.budget_bytes
        lent = {id(space): space.nbytes for one in self.active.values() for space in one}
        assert sum(lent.values()) <= self.pool.workspace_bytes


PoolMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, phases=[Phase.explicit, Phase.generate]
)
TestPoolMachine = PoolMachine.TestCase

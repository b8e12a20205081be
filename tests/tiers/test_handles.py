"""Handles under readers, writers and migrations that run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.tiers.handles import NOWHERE, HandleTable, State

WORDS = 64


def test_handles_come_and_go() -> None:
    table = HandleTable(capacity=2)
    ids = table.add(5, State.HOT, np.arange(5))
    assert len(set(ids.tolist())) == 5 == len(table)
    view = table.look(ids)
    assert view.places.tolist() == [0, 1, 2, 3, 4]
    assert (view.states == State.HOT).all()
    table.remove(ids[:2])
    assert len(table) == 3
    again = table.add(2, State.COLD)
    assert set(again.tolist()) == set(ids[:2].tolist())
    assert table.look(again).places.tolist() == [NOWHERE, NOWHERE]
    # A version never comes back: who remembers one knows that the block is another.
    assert (table.look(again).versions > view.versions[:2]).all()


def test_a_migration_that_is_not_published_changes_nothing() -> None:
    table = HandleTable()
    ids = table.add(3, State.HOT, np.array([7, 8, 9]))
    with pytest.raises(RuntimeError, match="broken"), table.migrating(ids[1:]):
        assert table.look(ids).states.tolist() == [State.HOT, State.MIGRATING, State.MIGRATING]
        raise RuntimeError("broken")
    assert table.look(ids).places.tolist() == [7, 8, 9]
    assert (table.look(ids).states == State.HOT).all()


def test_who_meets_a_migration_waits_for_it_and_sees_the_new_place() -> None:
    table = HandleTable()
    ids = table.add(2, State.HOT, np.array([1, 2]))
    asked, seen = threading.Event(), []

    def read() -> None:
        asked.set()
        with table.reading(ids) as view:
            seen.append(view.places.tolist())

    reader = threading.Thread(target=read)
    with table.migrating(ids[:1]) as migration:
        reader.start()
        asked.wait()
        reader.join(0.05)
        assert not seen
        migration.publish(State.COLD, 11)
    reader.join()
    assert seen == [[11, 2]]


def test_a_migration_waits_for_readers_and_keeps_new_ones_out() -> None:
    table = HandleTable()
    ids = table.add(1, State.HOT, 5)
    order: list[str] = []

    def migrate() -> None:
        with table.migrating(ids) as migration:
            order.append("migrates")
            migration.publish(State.COLD)

    def read() -> None:
        with table.reading(ids):
            order.append("reads later")

    table.hold(ids)
    migrator, reader = threading.Thread(target=migrate), threading.Thread(target=read)
    migrator.start()
    while table.look(ids).states[0] != State.MIGRATING:
        pass
    reader.start()
    reader.join(0.02)
    assert order == []
    table.let_go(ids)
    migrator.join()
    reader.join()
    assert order == ["migrates", "reads later"]


@settings(max_examples=12, deadline=None)
@given(
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    readers=st.integers(1, 2),
    writers=st.integers(1, 2),
    migrators=st.integers(1, 2),
)
def test_old_or_new_never_a_mixture_never_a_lost_write(
    blocks: int, seed: int, readers: int, writers: int, migrators: int
) -> None:
    """Each block is an array in one of two stores; a write adds 1 to every word of it."""
    table = HandleTable(capacity=1)
    stores = np.zeros((2, blocks, WORDS), np.int64)
    ids = table.add(blocks, State.HOT, np.arange(blocks))
    state_of = (State.HOT, State.COLD)
    added = np.zeros(blocks, np.int64)
    adding = threading.Lock()
    failures: list[str] = []

    def some(random: np.random.Generator) -> np.ndarray:
        return random.choice(blocks, random.integers(1, blocks + 1), replace=False)

    def read(random: np.random.Generator) -> None:
        which = some(random)
        with table.reading(ids[which]) as view:
            for block, state in zip(which, view.states, strict=True):
                words = stores[state_of.index(State(state)), block]
                # One word at a time, so that a writer in between would be seen.
                if len({int(word) for word in words}) != 1:
                    failures.append(f"a mixture in block {block}: {words}")

    def write(random: np.random.Generator) -> None:
        which = some(random)
        with table.writing(ids[which]) as view:
            for block, state in zip(which, view.states, strict=True):
                words = stores[state_of.index(State(state)), block]
                for at in range(WORDS):
                    words[at] += 1
        with adding:
            added[which] += 1

    def migrate(random: np.random.Generator) -> None:
        which = some(random)
        to = int(random.integers(2))
        with table.migrating(ids[which]) as migration:
            for block, state in zip(which, migration.before.states, strict=True):
                old = state_of.index(State(state))
                for at in range(WORDS):
                    stores[to, block, at] = stores[old, block, at]
            if random.random() < 0.8:
                migration.publish(state_of[to], which)
                for block, state in zip(which, migration.before.states, strict=True):
                    if state_of.index(State(state)) != to:
                        stores[1 - to, block] = -(10**9)

    def run(action: Callable[[np.random.Generator], None], own_seed: int) -> None:
        random = np.random.default_rng(own_seed)
        for _ in range(25):
            action(random)

    actions = [read] * readers + [write] * writers + [migrate] * migrators
    threads = [
        threading.Thread(target=run, args=(action, seed + index))
        for index, action in enumerate(actions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    view = table.look(ids)
    for block in range(blocks):
        words = stores[state_of.index(State(view.states[block])), block]
        assert words.tolist() == [added[block]] * WORDS

"""Many more files than fit in memory: right, and within the limits that the options set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvfs.engine.format import ROOT_INODE
from kvfs.engine.io import run
from kvfs.engine.store import StoreOptions
from tests.engine.audit import audit
from tests.engine.kit import DIRECTORY, FILE, MIB, Bench, new_device

SESSIONS, LAYERS = 300, 4
LIMITS = StoreOptions(cache_size=4 * MIB, index_cache_size=64 * 1024, nodes_max=48, uid=0, gid=0)


def content(session: int, layer: int) -> bytes:
    return b"%d/%d " % (session, layer) * (layer + 1)


def names() -> Iterator[tuple[bytes, bytes, bytes]]:
    """A session, a layer, and what that holds; in no order of the index."""
    pairs = [(session, layer) for session in range(SESSIONS) for layer in range(LAYERS)]
    Random(0).shuffle(pairs)
    for session, layer in pairs:
        yield b"session-%d" % session, b"layer.%d" % layer, content(session, layer)


def check_limits(bench: Bench, changed: int = 0) -> None:
    """What `changed` since the last write to the ring has to stay."""
    state, index = bench.store._state, bench.store._space.index
    in_use = len(state.nodes._nodes) + len(state.files.table)
    assert in_use <= LIMITS.nodes_max + changed
    assert index.nodes.held <= LIMITS.index_cache_size
    assert sum(map(len, index.nodes._nodes.values())) <= index.nodes.held


@pytest.fixture
def many(tmpfs: Path) -> Bench:
    bench = Bench(tmpfs, new_device(segments=32), options=LIMITS)
    for session in range(SESSIONS):
        directory = bench.make(b"session-%d" % session, mode=DIRECTORY)
        for layer in range(LAYERS):
            ino = bench.make(b"layer.%d" % layer, directory)
            bench.write(ino, content(session, layer))
        if session % 20 == 0:
            run(bench.store.sync())
            check_limits(bench)
        if session % 100 == 0:
            run(bench.store.checkpoint())
    return bench


@pytest.mark.parametrize("stage", ["synced", "checkpointed", "reopened"])
def test_all_are_right_and_few_in_memory(many: Bench, stage: str) -> None:
    many.stage = stage
    many.settle()
    assert many.names() == sorted(b"session-%d" % session for session in range(SESSIONS))
    for session, layer, held in names():
        directory = many.find(session)
        assert many.names(directory) == [b"layer.%d" % number for number in range(LAYERS)]
        assert many.read(many.find(layer, directory)) == held
        check_limits(many)
    assert many.store.usage().inodes == 1 + SESSIONS * (1 + LAYERS)
    audit(many.store)


def test_inodes_that_are_held_do_not_stay_in_memory(many: Bench) -> None:
    run(many.store.checkpoint())
    inos = {}
    for session, layer, held in names():
        inos[session, layer] = ino = many.find(layer, many.find(session))
        many.store.pin(ino)
        assert many.read(ino) == held
        check_limits(many)
    pins = many.store._state.nodes.pins
    assert len(pins) == SESSIONS * LAYERS
    for number in range(0, SESSIONS, 3):
        run(many.store.unlink(many.find(b"session-%d" % number), b"layer.0"))
    run(many.store.sync())
    for session, layer, held in names():
        ino = inos[session, layer]
        assert many.store.is_pinned(ino)
        assert many.read(ino) == held, "who holds it reads it, with or without a name"
        run(many.store.unpin(ino))
    assert len(pins) == 0
    run(many.store.drop_free())
    assert many.store.usage().inodes == 1 + SESSIONS * (1 + LAYERS) - SESSIONS // 3
    run(many.store.sync())
    audit(many.store)


def test_many_that_are_made_and_never_looked_at_do_not_stay(tmpfs: Path) -> None:
    bench = Bench(tmpfs, options=LIMITS)
    for number in range(1000):
        bench.make(b"file-%d" % number, mode=FILE)
    run(bench.store.sync())
    check_limits(bench)


def test_loading_many_at_once_leaves_those_out_that_are_gone(many: Bench) -> None:
    many.stage = "reopened"
    many.settle()
    directories = [many.find(name) for name in many.names()]
    run(many.store.load([*directories, max(directories) + 2]))
    check_limits(many)
    assert run(many.store.node(ROOT_INODE)).inode.nlink == 2 + SESSIONS

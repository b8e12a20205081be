"""Forks: exact copies made of metadata, which then go on apart."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

import pytest

from kvfs.engine import writer as writer_module
from kvfs.engine.format import BLOCK, ROOT_INODE, round_up
from kvfs.engine.io import run
from kvfs.engine.nodes import Node
from kvfs.engine.store import Store
from kvfs.tiers.oplog import OperationLog
from tests.engine.audit import audit
from tests.engine.deferred import DeferredExecutor
from tests.engine.kit import (
    DIRECTORY,
    MIB,
    OPTIONS,
    SYMLINK,
    Bench,
    failure_of,
    new_device,
    noise,
)
from tests.support.encrypted import KEY


@pytest.fixture(params=["buffered", "synced", "checkpointed", "reopened", "killed"])
def session(bench: Bench, request: pytest.FixtureRequest) -> int:
    """A session with layers, a subdirectory, hard links, a symlink, xattrs."""
    bench.stage = request.param
    ino = bench.make(b"session", mode=DIRECTORY)
    run(bench.store.set_xattr(ino, b"user.kvfs.model", b"the model"))
    for number in range(3):
        layer = bench.make(b"layer.%03d" % number, parent=ino)
        bench.write(layer, noise(200_000, number))
        run(bench.store.set_xattr(layer, b"user.kvfs.dtype", b"float32"))
    run(bench.store.link(layer, ino, b"link"))
    below = bench.make(b"below", parent=ino, mode=DIRECTORY)
    bench.write(bench.make(b"file", parent=below), b"deep down")
    bench.make(b"symlink", parent=below, mode=SYMLINK, target=b"../layer.000")
    bench.settle()
    return ino


def content(bench: Bench, directory: int, name: bytes) -> bytes:
    return bench.read(bench.find(name, directory))


def fork(bench: Bench, ino: int, name: bytes = b"fork") -> int:
    node: Node = run(bench.store.fork(ino, name))
    return node.inode.ino


def test_a_fork_is_an_exact_copy_and_costs_no_data(bench: Bench, session: int) -> None:
    run(bench.store.sync())
    written, live = bench.store.counters.payload_written, bench.store.usage().live
    copy = fork(bench, session)
    run(bench.store.sync())
    assert bench.store.counters.payload_written == written
    assert bench.store.usage().live == live
    assert bench.names(copy) == bench.names(session)
    for number in range(3):
        assert content(bench, copy, b"layer.%03d" % number) == noise(200_000, number)
    below = bench.find(b"below", copy)
    assert below != bench.find(b"below", session)
    assert content(bench, below, b"file") == b"deep down"
    assert run(bench.store.readlink(bench.find(b"symlink", below))) == b"../layer.000"
    assert run(bench.store.xattr(copy, b"user.kvfs.model")) == b"the model"
    layer = bench.find(b"layer.002", copy)
    assert bench.find(b"link", copy) == layer
    assert run(bench.store.node(layer)).inode.nlink == 2
    assert run(bench.store.xattr(layer, b"user.kvfs.dtype")) == b"float32"
    audit(bench.store)


def test_both_branches_go_on_apart(bench: Bench, session: int) -> None:
    copy = fork(bench, session)
    ours, theirs = bench.find(b"layer.000", session), bench.find(b"layer.000", copy)
    bench.write(ours, b"ours", 100_000)
    bench.write(theirs, b"theirs", 200_000)
    run(bench.store.set_attributes(bench.find(b"layer.001", copy), size=1000))
    run(bench.store.unlink(session, b"layer.002"))
    bench.settle()
    data = noise(200_000, 0)
    ours, theirs = bench.find(b"layer.000", session), bench.find(b"layer.000", copy)
    assert bench.read(ours) == data[:100_000] + b"ours" + data[100_004:]
    assert bench.read(theirs) == data + b"theirs"
    assert content(bench, session, b"layer.001") == noise(200_000, 1)
    assert content(bench, copy, b"layer.001") == noise(200_000, 1)[:1000]
    assert content(bench, copy, b"layer.002") == noise(200_000, 2)
    run(bench.store.sync())
    audit(bench.store)


def test_shared_extents_live_until_the_last_user_goes(bench: Bench, session: int) -> None:
    copy = fork(bench, session)
    second = fork(bench, copy, b"second")
    for directory in (session, copy):
        for number in range(3):
            run(bench.store.unlink(directory, b"layer.%03d" % number))
        run(bench.store.unlink(directory, b"link"))
    bench.settle()
    second = bench.find(b"second")
    for number in range(3):
        assert content(bench, second, b"layer.%03d" % number) == noise(200_000, number)
    run(bench.store.sync())
    live = bench.store.usage().live
    for number in range(3):
        run(bench.store.unlink(second, b"layer.%03d" % number))
    run(bench.store.unlink(second, b"link"))
    run(bench.store.sync())
    assert bench.store.usage().live <= live - 3 * 200_000
    audit(bench.store)


@pytest.mark.plain
def test_shared_bytes_count_in_each_file_and_once_in_the_ring(bench: Bench, session: int) -> None:
    run(bench.store.sync())
    live = bench.store.usage().live
    copy = fork(bench, session)
    run(bench.store.sync())
    taken = round_up(128 * 1024) + round_up(200_000 - 128 * 1024)
    for directory in (session, copy):
        node = run(bench.store.node(bench.find(b"layer.000", directory)))
        assert node.taken == taken
    assert bench.store.usage().live == live


def test_a_fork_of_what_is_not_in_the_ring_yet_is_exact(bench: Bench) -> None:
    ino = bench.make(b"session", mode=DIRECTORY)
    layer = bench.make(b"layer", parent=ino)
    bench.write(layer, noise(MIB))
    copy = fork(bench, ino)
    bench.write(layer, b"later", MIB)
    assert content(bench, copy, b"layer") == noise(MIB)
    bench.open()  # as after SIGKILL: everything from the operation log
    assert content(bench, bench.find(b"fork"), b"layer") == noise(MIB)
    assert content(bench, bench.find(b"session"), b"layer") == noise(MIB) + b"later"
    run(bench.store.sync())
    audit(bench.store)


def test_forks_of_forks_survive_cleaning(bench: Bench, session: int) -> None:
    copies = [session]
    for number in range(5):
        copies.append(fork(bench, copies[-1], b"fork-%d" % number))
        bench.write(bench.find(b"layer.000", copies[-1]), noise(5000, 50 + number), number * BLOCK)
    run(bench.store.sync())
    bench.write(bench.make(b"other"), noise(3 * MIB))
    run(bench.store.sync())
    run(bench.store.unlink(1, b"other"))
    for _ in range(3):
        run(bench.store.clean())
        run(bench.store.checkpoint())
    audit(bench.store)
    expected = bytearray(noise(200_000, 0))
    assert content(bench, session, b"layer.000") == expected
    for number, copy in enumerate(copies[1:]):
        expected[number * BLOCK : number * BLOCK + 5000] = noise(5000, 50 + number)
        assert content(bench, copy, b"layer.000") == expected


def test_a_tree_whose_files_share_bytes_is_forked_and_removed(staged: Bench) -> None:
    top = staged.make(b"top", mode=DIRECTORY)
    first = staged.make(b"first", parent=top, mode=DIRECTORY)
    staged.write(staged.make(b"layer", parent=first), noise(200_000))
    fork(staged, first, b"second")
    staged.settle()
    copy = fork(staged, staged.find(b"top"))
    run(staged.store.sync())
    audit(staged.store)
    top = staged.find(b"top")
    for directory in (staged.find(b"first", top), staged.find(b"second", top)):
        run(staged.store.unlink(directory, b"layer"))
    run(staged.store.unlink(staged.find(b"first", copy), b"layer"))
    run(staged.store.sync())
    audit(staged.store)
    assert content(staged, staged.find(b"second", copy), b"layer") == noise(200_000)


def test_a_tree_with_a_larger_index_than_is_kept_in_memory_is_forked(tmpfs: Path) -> None:
    device = new_device(segments=32)
    bench = Bench(tmpfs, device)
    ino = bench.make(b"session", mode=DIRECTORY)
    for number in range(600):
        bench.write(bench.make(b"%d" % number, parent=ino), b"x")
    run(bench.store.close())
    executor = DeferredExecutor(device)
    options = replace(OPTIONS, index_cache_size=20_000)
    store = Store.open(
        device, "ring", executor, OperationLog(tmpfs / "other", 64 * MIB), options, KEY
    )
    nodes = store._writer.index.nodes
    assert store._writer.index.checkpoint.node_bytes > nodes.size
    task = executor.begin(store.fork(ino, b"fork"))
    happened = sum(
        1 for _ in takewhile(lambda _: not task.done and executor.happen(), range(100_000))
    )
    assert task.done, f"not done after {happened} events"
    copy = task.completion.result().inode.ino
    assert len(executor.run(store.list_directory(copy, 0, 1000))) == 600
    executor.settle()
    assert nodes.held <= nodes.size


@pytest.mark.parametrize("nodes_max", [1, 8, 40_000])
def test_a_change_of_more_inodes_than_are_kept_in_memory_is_whole(
    tmpfs: Path, nodes_max: int
) -> None:
    """What it looked at first is still what it changes in the end."""
    bench = Bench(tmpfs, options=replace(OPTIONS, nodes_max=nodes_max))
    parent = bench.make(b"parent", mode=DIRECTORY)
    other = bench.make(b"other", mode=DIRECTORY)
    session = bench.make(b"session", parent=parent, mode=DIRECTORY)
    deep = session
    for number in range(30):
        bench.make(b"layer.%03d" % number, parent=session)
        deep = bench.make(b"below", parent=deep, mode=DIRECTORY)
    run(bench.store.checkpoint())

    def links(ino: int) -> int:
        return run(bench.store.node(ino)).inode.nlink

    run(bench.store.fork(session, b"fork"))
    assert links(parent) == 4
    assert bench.names(parent) == [b"fork", b"session"]
    # Up all of the tree it is looked for a loop.
    run(bench.store.rename(parent, b"fork", deep, b"moved", replace=False, exchange=False))
    assert (links(parent), links(deep)) == (3, 3)
    run(bench.store.rename(ROOT_INODE, b"other", deep, b"moved", replace=False, exchange=True))
    assert bench.find(b"moved", deep) == other
    assert run(bench.store.node(other)).inode.parent == deep
    assert (links(ROOT_INODE), links(parent), links(deep)) == (4, 3, 3)
    run(bench.store.checkpoint())
    again = bench.open_image(bench.device.image)
    for ino, count in ((ROOT_INODE, 4), (parent, 3), (deep, 3), (other, 2)):
        assert run(again.node(ino)).inode.nlink == count
    audit(bench.store)


def test_forks_that_fail_again_and_again_do_not_use_up_the_ids(bench: Bench) -> None:
    with patch.object(writer_module, "ID_WINDOW", 64):
        run(bench.store.checkpoint())
        ino = bench.make(b"session", mode=DIRECTORY)
        for number in range(20):
            bench.make(b"%d" % number, parent=ino)
            run(bench.store.tick())
        for _ in range(10):
            assert failure_of(bench.store.fork(ino, b"session")) == errno.EEXIST
            run(bench.store.tick())
        last = bench.make(b"last")
        bench.open()
        assert bench.make(b"next") > last
    run(bench.store.sync())
    audit(bench.store)


def test_what_cannot_be_forked(bench: Bench) -> None:
    ino = bench.make(b"session", mode=DIRECTORY)
    file = bench.make(b"file")
    store = bench.store
    assert failure_of(store.fork(ino, b"file")) == errno.EEXIST
    assert failure_of(store.fork(ino, b"session")) == errno.EEXIST
    assert failure_of(store.fork(file, b"new")) == errno.ENOTDIR
    assert failure_of(store.fork(1, b"new")) == errno.EINVAL
    assert failure_of(store.fork(999, b"new")) == errno.ENOENT
    assert failure_of(store.fork(ino, b"n" * 256)) == errno.ENAMETOOLONG
    assert bench.names() == [b"file", b"session"]


def test_a_fork_is_one_commit_unit(bench: Bench, session: int) -> None:
    run(bench.store.sync())
    before = bench.store.counters.operations
    copy = fork(bench, session)
    assert bench.store.counters.operations == before + 1
    root = run(bench.store.node(copy)).inode
    assert stat.S_ISDIR(root.mode)
    assert root.nlink == 3

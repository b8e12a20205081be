"""A full ring: ENOSPC with nothing lost, rm works, and the space comes back."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine.format import BLOCK, ROOT_INODE, round_up
from kvfs.engine.io import run
from kvfs.engine.liveness import Liveness
from kvfs.engine.nodes import Node
from tests.engine.audit import Items, audit
from tests.engine.kit import DIRECTORY, MIB, Bench, failure_of, new_device, noise


def fill(bench: Bench, size: int, prefix: bytes = b"fill") -> dict[bytes, bytes]:
    """Files of `size` bytes until ENOSPC; what was acknowledged, by name."""
    kept = {}
    for number in range(10_000):
        name, data = b"%s %d" % (prefix, number), noise(size, number)
        try:
            ino = bench.make(name)
            kept[name] = b""
            bench.write(ino, data)
            kept[name] = data
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
            return kept
    raise AssertionError("it never gets full")


def check(bench: Bench, expected: dict[bytes, bytes]) -> None:
    assert bench.names() == sorted(expected)
    for name, data in expected.items():
        assert bench.read(bench.find(name)) == data


@pytest.mark.parametrize("size", [100, 5000, 100_000, MIB])
def test_everything_acknowledged_before_enospc_is_there(bench: Bench, size: int) -> None:
    kept = fill(bench, size)
    check(bench, kept)
    run(bench.store.close())
    bench.open()
    check(bench, kept)
    audit(bench.store)


def test_a_full_ring_holds_most_of_its_size(bench: Bench) -> None:
    total = bench.store.usage().total
    kept = sum(map(len, fill(bench, 300_000).values()))
    assert kept > 0.85 * total
    assert bench.store.usage().free < 1.2 * MIB


def test_what_was_removed_is_free_before_the_ring_says_so(bench: Bench) -> None:
    """Evictors remove files until `statvfs` shows that there is enough."""
    directory = bench.make(b"session", mode=DIRECTORY)
    names = [b"%d" % number for number in range(4)]
    for number, name in enumerate(names):
        bench.write(bench.make(name, parent=directory), noise(MIB, number))
    run(bench.store.sync())
    run(bench.store.fork(directory, b"fork"))
    run(bench.store.sync())
    full = bench.store.usage().free
    run(bench.store.unlink(directory, names[0]))
    assert bench.store.usage().free <= full, "a fork has its bytes"
    fork = bench.find(b"fork")
    for number, name in enumerate(names):
        run(bench.store.unlink(fork, name))
        if number:
            run(bench.store.unlink(directory, name))
        gained = bench.store.usage().free - full
        assert number + 0.9 < gained / MIB <= number + 1
    promised = bench.store.usage().free
    run(bench.store.sync())
    assert promised <= bench.store.usage().free <= full + 4.1 * MIB
    run(bench.store.sync())
    audit(bench.store)


@pytest.mark.parametrize("size", [100, 5000, 300_000])
def test_rm_works_when_full_and_the_space_comes_back(bench: Bench, size: int) -> None:
    before = bench.store.usage()
    kept = fill(bench, size)
    for name in kept:
        run(bench.store.unlink(1, name))
    for _ in range(3):
        run(bench.store.checkpoint())
    assert bench.names() == []
    after = bench.store.usage()
    assert after.free > before.free - MIB, "but for the segment of the last checkpoint"
    assert after.inodes == 1
    again = fill(bench, size)
    assert len(again) >= 0.9 * len(kept)
    check(bench, again)


def test_small_changes_work_when_it_is_full_of_data(bench: Bench) -> None:
    """What makes room is not refused; truncation to nothing makes room too."""
    kept = fill(bench, 300_000)
    first, second, *_ = kept
    run(bench.store.rename(1, first, 1, second))
    run(bench.store.set_attributes(bench.find(second), size=0))
    run(bench.store.sync())
    assert bench.read(bench.find(second)) == b""


def test_twenty_rounds_of_filling_and_removing_leak_nothing(bench: Bench) -> None:
    run(bench.store.checkpoint())
    start = bench.store.usage()
    counts = []
    for number in range(20):
        kept = fill(bench, 250_000, b"round %d" % number)
        counts.append(len(kept))
        check(bench, kept)
        for name in kept:
            run(bench.store.unlink(1, name))
        for _ in range(3):
            run(bench.store.checkpoint())
        items = audit(bench.store)
        assert not items.extents
        assert len(items.inodes) == 1
        assert bench.store.usage().live == start.live
        assert bench.store.usage().free > start.free - MIB
    assert min(counts) >= 0.9 * counts[0]


def test_overwriting_in_place_forever_needs_no_more_space(bench: Bench) -> None:
    ino = bench.make(b"file")
    for number in range(60):
        bench.write(ino, noise(MIB, number))
        if number % 7 == 0:
            run(bench.store.sync())
    assert bench.read(ino) == noise(MIB, 59)
    audit(bench.store)


def test_enospc_is_not_raised_while_much_is_free(bench: Bench) -> None:
    """Dead segments become free by checkpoints on the way, without a failure."""
    for number in range(100):
        name = b"%d" % (number % 3)
        if name in bench.names():
            run(bench.store.unlink(1, name))
        bench.write(bench.make(name), noise(2 * MIB, number))
    assert bench.store.failure is None


def test_a_log_of_one_chunk_is_used_again_and_again(tmpfs: Path) -> None:
    bench = Bench(tmpfs, log_limit=8 * MIB)
    ino = bench.make(b"file")
    for number in range(30):
        bench.write(ino, noise(MIB, number), number % 4 * MIB)
    assert bench.read(ino, 3 * MIB, MIB) == noise(MIB, 27)


def test_a_log_without_room_for_a_chunk_is_enospc(tmpfs: Path) -> None:
    bench = Bench(tmpfs, log_limit=MIB)
    assert failure_of(bench.store.create(1, b"file", 0o100644, 0, 0)) == errno.ENOSPC
    assert bench.names() == []


@pytest.mark.plain
def test_usage_counts_what_is_there(bench: Bench) -> None:
    empty = bench.store.usage()
    assert (empty.inodes, empty.live) == (1, 0)
    assert 0 < empty.free <= empty.total <= bench.device.size
    bench.write(bench.make(b"file"), noise(10 * BLOCK))
    used = bench.store.usage()
    assert used.inodes == 2
    assert used.free <= empty.free - 10 * BLOCK
    run(bench.store.sync())
    assert bench.store.usage().live == 10 * BLOCK


def test_free_never_grows_by_writing(bench: Bench) -> None:
    free = bench.store.usage().free
    ino = bench.make(b"file")
    for number in range(8):
        bench.write(ino, noise(MIB, number), number * MIB)
        now = bench.store.usage().free
        assert now <= free
        free = now


# -- st_blocks -------------------------------------------------------------------------


def stored_of(items: Items, ino: int) -> int:
    used = {part.extent_id for part in items.slices[ino]}
    return sum(round_up(items.extents[extent].stored) for extent in used)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "zeros", "truncate", "sync", "checkpoint"]),
        st.integers(0, 300_000),
        st.integers(1, 150_000),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(changes=CHANGES, codec=st.sampled_from([b"none", b"zstd"]))
def test_blocks_are_the_sum_over_extents_after_any_history(
    changes: list[tuple[str, int, int]], codec: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bench = Bench(tmp_path_factory.mktemp("log"), log_limit=32 * MIB)
    ino = bench.make(b"file")
    run(bench.store.set_xattr(ino, b"user.kvfs.codec", codec))
    for number, (what, offset, size) in enumerate(changes):
        match what:
            case "write":
                bench.write(ino, noise(size, number), offset)
            case "zeros":
                bench.write(ino, bytes(size), offset)
            case "truncate":
                run(bench.store.set_attributes(ino, size=offset))
            case "sync":
                run(bench.store.sync())
            case "checkpoint":
                run(bench.store.checkpoint())
        node: Node = run(bench.store.node(ino))
        assert node.content is not None
        assert node.taken >= round_up(node.content.unsaved)
    run(bench.store.sync())
    items = audit(bench.store)
    node = run(bench.store.node(ino))
    assert node.content is not None
    assert node.content.unsaved == 0
    assert node.taken == stored_of(items, ino)
    run(bench.store.close())
    bench.open()
    assert run(bench.store.node(ino)).taken == stored_of(items, ino)


def test_dirty_bytes_count_before_they_are_in_the_ring(bench: Bench) -> None:
    ino = bench.make(b"file")
    bench.write(ino, noise(3 * BLOCK))
    node = run(bench.store.node(ino))
    assert node.taken == 3 * BLOCK
    bench.write(ino, noise(3 * BLOCK, 1))
    assert node.taken == 3 * BLOCK, "overwritten before it was stored"
    run(bench.store.set_attributes(ino, size=0))
    assert node.taken == 0


def test_compressed_files_take_less(bench: Bench) -> None:
    ino = bench.make(b"file")
    run(bench.store.set_xattr(ino, b"user.kvfs.codec", b"zstd"))
    bench.write(ino, b"text " * 100_000)
    run(bench.store.sync())
    assert run(bench.store.node(ino)).taken < 100_000


def test_who_watches_blocks_is_told_whose_changed(bench: Bench) -> None:
    told: list[int] = []
    bench.store.watch_blocks(told.extend)
    ino, other = bench.make(b"file"), bench.make(b"other")
    bench.write(ino, noise(BLOCK))
    run(bench.store.sync())
    assert told == [ino]
    assert other not in told


# -- liveness --------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 40)), max_size=40))
def test_liveness_is_a_set_of_blocks(ranges: list[tuple[int, int, int]]) -> None:
    """Against a set; what is live cannot be marked again, nor what is dead cleared."""
    size = 100 * BLOCK
    liveness = Liveness(4, size)
    live: set[int] = set()
    marked: list[tuple[int, int, int, set[int]]] = []
    start_of_data = MIB
    for segment, first, count in ranges:
        blocks = set(range(segment * 100 + first, segment * 100 + first + count))
        address = start_of_data + (segment * 100 + first) * BLOCK
        if blocks & live:
            with pytest.raises(AssertionError, match="already"):
                liveness.mark(address, count * BLOCK - 5)
            if blocks != live & blocks:
                with pytest.raises(AssertionError, match="already"):
                    liveness.clear(address, count * BLOCK)
            continue
        liveness.mark(address, count * BLOCK - 5)
        live |= blocks
        marked.append((segment, address, count, blocks))
        assert liveness.is_live(address)
        assert liveness.live_bytes == len(live) * BLOCK
    Random(len(ranges)).shuffle(marked)
    for segment, address, count, blocks in marked:
        live -= blocks
        emptied = liveness.clear(address, count * BLOCK - 5)
        assert emptied == (not any(block // 100 == segment for block in live))
        assert not liveness.is_live(address)
    assert liveness.live_bytes == 0


def test_extent_addresses_are_within_the_device(bench: Bench) -> None:
    fill(bench, 100_000)
    run(bench.store.sync())
    extents = audit(bench.store).extents.values()
    assert extents
    for extent in extents:
        assert extent.blocks_end <= bench.device.size
    assert new_device().size == bench.device.size


def test_files_that_go_while_they_are_held_are_freed_many_at_once(bench: Bench) -> None:
    """As the kernel holds what it has looked up: an operation each would be half of all."""
    store = bench.store
    inos = [bench.make(b"%d" % number) for number in range(200)]
    for number, ino in enumerate(inos):
        store.pin(ino)
        run(store.unlink(ROOT_INODE, b"%d" % number))
    before = store._writer.operation
    for ino in inos:
        run(store.unpin(ino))
    run(store.drop_free())
    assert 1 <= store._writer.operation - before <= 4
    assert store.usage().inodes == 1


def test_a_ring_that_is_turned_over_frees_several_segments_with_two_checkpoints(
    tmpfs: Path,
) -> None:
    """Cleaning begins while there is still room to carry much; else each segment costs two."""
    bench = Bench(tmpfs, new_device(segments=64, segment_size=MIB))
    store = bench.store
    count = int(store.usage().total * 0.8) // 100_000
    draw = Random(5)
    for number in range(count):
        bench.write(bench.make(b"%d" % number), noise(100_000, number))
    before = store.counters
    checkpoints, cleaned = before.checkpoints, before.cleaned_segments
    for turn in range(3 * count):
        name = b"%d" % draw.randrange(count)
        run(store.unlink(ROOT_INODE, name))
        bench.write(bench.make(name), noise(100_000, turn))
    after = store.counters
    assert after.cleaned_segments - cleaned > 64
    assert after.checkpoints - checkpoints < after.cleaned_segments - cleaned

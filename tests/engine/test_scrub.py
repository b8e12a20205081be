"""The scrub: it reads all that is live, finds what is rotten, heals what is still in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.buffers import aligned
from kvfs.engine.check import check
from kvfs.engine.format import (
    BLOCK,
    ROOT_INODE,
    SUPERBLOCK_ADDRESSES,
    Extent,
    Pointer,
)
from kvfs.engine.io import Step, Urgency, run
from kvfs.engine.reader import Target
from kvfs.engine.scrub import Phase, escaped
from kvfs.engine.store import Store
from tests.engine.audit import Items, audit, tree_places
from tests.engine.deferred import DeferredExecutor
from tests.engine.kit import DIRECTORY, MIB, Bench, failure_of, flip, new_device, noise

_STEP = 64 * 1024


def scrubbed(store: Store, step: int = 1 << 40) -> None:
    store.scrub.begin()
    while store.scrub.is_running:
        run(store.scrub.advance(step))


def cold(bench: Bench) -> None:
    """Nothing of it is in memory."""
    run(bench.store.close())
    bench.open()


@pytest.fixture
def filled(bench: Bench) -> Bench:
    """Sessions and a fork, on the device alone."""
    for name in (b"one", b"two"):
        session = bench.make(name, mode=DIRECTORY)
        for layer in range(12):
            ino = bench.make(b"layer.%d" % layer, session)
            bench.write(ino, noise(90_000, layer))
    run(bench.store.fork(bench.find(b"one"), b"branch"))
    cold(bench)
    return bench


def extent_of(bench: Bench, name: bytes, session: bytes = b"one") -> Extent:
    return run(bench.store.extents(bench.find(name, bench.find(session)), 0, 1))[0]


def places(store: Store) -> list[Extent | Pointer]:
    """All that is live: extents, nodes, bitmap, checkpoint."""
    checkpoint = store._writer.index.checkpoint
    nodes = tree_places(store._writer.index.nodes, checkpoint)
    roots = [store.superblock.checkpoint, *checkpoint.bitmap]
    return [*Items.of(store).extents.values(), *nodes, *(p for p in roots if p.stored)]


@pytest.mark.parametrize("step", [1, _STEP, 1 << 40])
def test_all_that_is_live_is_read_and_nothing_is_wrong(filled: Bench, step: int) -> None:
    store = filled.store
    live = places(store)
    store._writer.index.nodes._nodes.clear()
    store.reader._chunks.clear()
    read: set[int] = set()

    def seen(kind: str, address: int, length: int) -> None:
        if kind == "read":
            read.update(range(address // BLOCK, (address + length) // BLOCK))

    filled.device.fail = seen
    scrubbed(store, step)
    scrub = store.scrub
    for place in live:
        assert set(range(place.address // BLOCK, (place.address + place.stored) // BLOCK)) <= read
    assert {address // BLOCK for address in SUPERBLOCK_ADDRESSES} <= read
    assert (scrub.passes, scrub.errors, scrub.found, scrub.rotten) == (1, 0, 0, [])
    assert scrub.done >= store.usage().live > 0 and scrub.share == 1.0
    assert scrub.finished_ns >= scrub.started_ns > 0 and scrub.phase is Phase.IDLE


def test_it_ends_with_a_bounded_number_of_reads_beside_a_slow_reader(filled: Bench) -> None:
    """Each advance reads about what it may, and the pass comes to its end."""
    scrub = filled.store.scrub
    scrub.begin()
    for _ in range(1000):
        before = scrub.done
        run(scrub.advance(_STEP))
        assert scrub.done - before <= MIB + _STEP
        if not scrub.is_running:
            return
    raise AssertionError("it does not end")


# -- what is rotten


def test_rot_in_data_is_found_with_all_files_it_is_of(
    filled: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    extent = extent_of(filled, b"layer.3")
    flip(filled.device.image, extent.address + 500)
    scrubbed(filled.store, _STEP)
    scrub = filled.store.scrub
    (rot,) = scrub.rotten
    assert (rot.what, rot.address, rot.is_healed) == ("data", extent.address, False)
    assert rot.files is not None
    assert {hurt.path for hurt in rot.files} == {b"one/layer.3", b"branch/layer.3"}
    assert all((hurt.offset, hurt.length) == (0, extent.size) for hurt in rot.files)
    assert (
        f"/one/layer.3 are lost (extent {extent.extent_id} at byte {extent.address}" in caplog.text
    )
    assert filled.store.reader.errors.checksum == 1
    ino = filled.find(b"layer.3", filled.find(b"one"))
    assert failure_of(filled.store.read(ino, 0, 1)) == errno.EIO
    assert filled.store.reader.errors.checksum == 1, "counted when it was found"
    scrubbed(filled.store)
    assert (scrub.passes, scrub.errors, scrub.found) == (2, 1, 2)


def test_each_of_many_rotten_extents_is_found(filled: Bench) -> None:
    """Also those whose neighbours are rotten or cannot be read."""
    hurt = [extent_of(filled, b"layer.%d" % number) for number in range(2, 9)]
    for extent in hurt[:-1]:
        flip(filled.device.image, extent.address)
    refused = hurt[-1].address

    def fail(kind: str, address: int, length: int) -> None:
        if kind == "read" and address <= refused < address + length:
            raise OSError(errno.EIO, "a sector is bad")

    filled.device.fail = fail
    scrubbed(filled.store)
    found = {rot.address for rot in filled.store.scrub.rotten}
    assert found == {extent.address for extent in hurt}
    assert all(rot.files for rot in filled.store.scrub.rotten)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_rotten_superblock_is_written_again(filled: Bench, slot: int) -> None:
    flip(filled.device.image, SUPERBLOCK_ADDRESSES[slot] + 100)
    scrubbed(filled.store)
    (rot,) = filled.store.scrub.rotten
    assert (rot.what, rot.is_healed) == ("superblock", True)
    scrubbed(filled.store)
    assert filled.store.scrub.errors == 0
    audit(filled.store)


@pytest.mark.parametrize("what", ["checkpoint", "part of the bitmap"])
def test_a_rotten_checkpoint_or_bitmap_is_written_again(filled: Bench, what: str) -> None:
    store = filled.store
    is_record = what == "checkpoint"
    record, parts = store.superblock.checkpoint, store._writer.index.checkpoint.bitmap
    flip(filled.device.image, (record if is_record else parts[0]).address + 3)
    scrubbed(store)
    assert [(rot.what, rot.is_healed) for rot in store.scrub.rotten] == [(what, True)]
    run(store.close())
    assert check(filled.device, "ring").is_clean


def test_a_rotten_node_that_is_in_memory_is_written_elsewhere(filled: Bench) -> None:
    nodes = [p for p in places(filled.store) if isinstance(p, Pointer)][:-2]
    assert len(nodes) >= 2
    for node in nodes:
        flip(filled.device.image, node.address + 9)
    scrubbed(filled.store)
    assert {rot.what for rot in filled.store.scrub.rotten} == {"node of the index"}
    assert all(rot.is_healed for rot in filled.store.scrub.rotten)
    scrubbed(filled.store)
    assert filled.store.scrub.errors == 0
    run(filled.store.close())
    assert check(filled.device, "ring").is_clean


def test_a_rotten_node_that_is_not_in_memory_is_told(filled: Bench) -> None:
    """What leads to it, and what lies beside it, is read all the same."""
    store = filled.store
    index = store._writer.index
    root = index.checkpoint.names
    flip(filled.device.image, root.address + 9)
    extent = extent_of(filled, b"layer.5")
    flip(filled.device.image, extent.address)
    index.nodes._nodes.clear()
    index.nodes.held = 0
    scrubbed(store)
    found = {(rot.what, rot.address, rot.is_healed) for rot in store.scrub.rotten}
    assert found == {("node of the index", root.address, False), ("data", extent.address, False)}
    assert store.index_errors == 1


# -- what is healed


def test_what_warm_memory_has_whole_is_written_anew(bench: Bench) -> None:
    """For the file and its fork."""
    session = bench.make(b"one", mode=DIRECTORY)
    ino = bench.make(b"layer", session)
    bench.write(ino, noise(300_000))
    run(bench.store.sync())
    run(bench.store.fork(session, b"branch"))
    run(bench.store.checkpoint())
    old = run(bench.store.extents(ino, 0, 300_000))
    for extent in old:
        flip(bench.device.image, extent.address + 7)
    scrubbed(bench.store)
    scrub = bench.store.scrub
    assert (scrub.errors, scrub.healed) == (len(old), len(old))
    cold(bench)
    assert bench.read(ino) == noise(300_000)
    assert bench.read(bench.find(b"layer", bench.find(b"branch"))) == noise(300_000)
    scrubbed(bench.store)
    assert bench.store.scrub.errors == 0
    audit(bench.store)


def test_a_read_only_mount_is_scrubbed_and_left_as_it_is(filled: Bench) -> None:
    extent = extent_of(filled, b"layer.3")
    run(filled.store.close())
    flip(filled.device.image, extent.address)
    flip(filled.device.image, SUPERBLOCK_ADDRESSES[0] + 100)
    filled.device.read_only = True
    filled.open()
    before = bytes(filled.device.image)
    scrubbed(filled.store)
    assert {rot.what for rot in filled.store.scrub.rotten} == {"data", "superblock"}
    assert filled.store.scrub.healed == 0
    assert filled.device.image == before


# -- beside all that changes


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_nothing_that_happens_beside_it_looks_like_rot(tmpfs: Path, seed: int) -> None:
    """Files are written, forked and removed, segments cleaned and used again, checkpoints
    written, in any order with its reads; and what was rotten all the time is found."""
    random = Random(seed)
    device = new_device(12)
    executor = DeferredExecutor(device, random)
    bench = Bench(tmpfs / f"{seed}", device, boot=f"{seed}", make_executor=lambda: executor)
    store = bench.store
    lasting = executor.run(store.create(ROOT_INODE, b"lasting", 0o100644, 0, 0)).inode.ino
    executor.run(store.write(lasting, 0, noise(100_000)))
    executor.run(store.sync())
    executor.run(store.checkpoint())
    (extent,) = executor.run(store.extents(lasting, 0, 100_000))
    bench.warm.evict_extents([extent.extent_id])
    bench.warm.evict_unit(0)
    flip(device.image, extent.address + 50)
    store.scrub.begin()
    scrub = executor.begin(store.scrub.advance(1 << 40))
    for number in range(12):
        name = b"%d" % (number % 3)
        if number >= 3:
            executor.run(store.unlink(ROOT_INODE, name))
        ino = executor.run(store.create(ROOT_INODE, name, 0o100644, 0, 0)).inode.ino
        executor.run(store.write(ino, 0, noise(random.randrange(1, 600_000), number)))
        executor.run(random.choice([store.sync, store.checkpoint, store.clean])())
    executor.finish(scrub)
    assert not store.scrub.is_running
    rotten = {rot.extent.extent_id for rot in store.scrub.rotten if rot.extent is not None}
    assert rotten == {extent.extent_id} and store.scrub.errors == 1
    assert not store._appender.ring._readers, "nothing stays pinned"
    executor.run(store.close())


@dataclass(slots=True)
class HeldBack(DeferredExecutor):
    """What runs in the background does not happen while `holds`."""

    holds: Callable[[], bool] = lambda: False

    @property
    def held(self) -> list[Any]:
        return [work for work in self._asked if work.urgency is Urgency.BACKGROUND]

    def happen(self) -> bool:
        held = self.held if self.holds() else []
        self._asked = [work for work in self._asked if work not in held]
        happened = DeferredExecutor.happen(self)
        self._asked += held
        return happened


def turn_over(run: Callable[[Step[Any]], Any], store: Store) -> None:
    """All that is live is carried elsewhere, and where it lay is used again."""
    start = store.counters.device_written
    cleaned = store.counters.cleaned_segments
    while store.counters.device_written - start < 3 * 12 * MIB:
        ino = run(store.create(ROOT_INODE, b"rubbish", 0o100644, 0, 0)).inode.ino
        run(store.write(ino, 0, noise(600_000, store.counters.frames)))
        run(store.sync())
        run(store.unlink(ROOT_INODE, b"rubbish"))
        run(store.checkpoint())
        run(store.clean())
        run(store.checkpoint())
    assert store.counters.cleaned_segments > cleaned + 3


@pytest.mark.parametrize("phase", [Phase.ROOTS, Phase.NAMES, Phase.TABLE, Phase.DATA])
def test_what_is_being_read_is_not_written_over(tmpfs: Path, phase: Phase) -> None:
    """A read of the scrub lasts while the ring is turned over three times."""
    device = new_device(12)
    executor = HeldBack(device)
    store = Bench(tmpfs, device, make_executor=lambda: executor).store
    lasting = executor.run(store.create(ROOT_INODE, b"lasting", 0o100644, 0, 0)).inode.ino
    executor.run(store.write(lasting, 0, noise(50_000)))
    executor.run(store.sync())
    executor.run(store.checkpoint())
    executor.holds = lambda: store.scrub.phase is phase
    store.scrub.begin()
    scrub = executor.begin(store.scrub.advance(1 << 40))
    while not (executor.holds() and executor.held):
        assert executor.happen()
    turn_over(executor.run, store)
    assert executor.held and store.scrub.phase is phase
    executor.holds = lambda: False
    executor.finish(scrub)
    assert (store.scrub.passes, store.scrub.errors) == (1, 0)
    assert not store._appender.ring._readers, "nothing stays pinned"
    executor.run(store.close())


def test_what_was_moved_or_removed_since_it_was_listed_is_no_rot(tmpfs: Path) -> None:
    bench = Bench(tmpfs, new_device(12))
    store = bench.store
    for number in range(40):
        bench.write(bench.make(b"%d" % number), noise(80_000, number))
    run(store.sync())
    store.scrub.begin()
    while not store.scrub._groups:
        run(store.scrub.advance(1))
        assert store.scrub.is_running
    for number in range(0, 40, 3):
        run(store.unlink(ROOT_INODE, b"%d" % number))
    turn_over(run, store)
    assert store.scrub._groups
    while store.scrub.is_running:
        run(store.scrub.advance(1))
    assert (store.scrub.passes, store.scrub.errors) == (1, 0)
    audit(store)


def test_memory_stays_bounded_however_many_extents_there_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.engine.scrub._SCANNED_AT_ONCE", 20)
    for number in range(300):
        bench.write(bench.make(b"%d" % number), noise(3000, number))
    cold(bench)
    scrub = bench.store.scrub
    scrub.begin()
    while scrub.is_running:
        run(scrub.advance(1))
        assert sum(map(len, scrub._groups)) <= 20
    assert scrub.done >= 300 * BLOCK


# -- readers meet it


def test_a_reader_counts_and_tells_of_a_rotten_extent_once(
    filled: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is read, and whoever does."""
    store = filled.store
    extent = extent_of(filled, b"layer.3")
    flip(filled.device.image, extent.address)
    for session in (b"one", b"branch", b"one"):
        ino = filled.find(b"layer.3", filled.find(session))
        assert failure_of(store.read(ino, 0, 1)) == errno.EIO
        for chunk in list(store.reader._chunks.values()):
            store.reader._evict(chunk)
    memory = aligned(-(-extent.size // BLOCK) * BLOCK)
    assert store.reader.read_into([Target(extent, memory)], Urgency.DEMAND).result() == []
    assert store.reader.errors.checksum == 1
    assert caplog.text.count("fails its checksum") == 1


def test_a_promotion_that_meets_rot_first_counts_it(filled: Bench) -> None:
    extent = extent_of(filled, b"layer.3")
    flip(filled.device.image, extent.address)
    memory = aligned(-(-extent.size // BLOCK) * BLOCK)
    reading = filled.store.reader.read_into([Target(extent, memory)], Urgency.DEMAND)
    assert reading.result() == []
    assert filled.store.reader.errors.checksum == 1


def test_paths_are_escaped_for_a_log() -> None:
    assert escaped(b"a/\xffb\n\x1b[2J") == "/a/\\udcffb\\n\\x1b[2J"

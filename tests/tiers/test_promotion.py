"""A session comes up in one pass, whatever happens to its files meanwhile."""

from __future__ import annotations

import errno
import gc
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine.io import DeadlineExceeded, Step, Urgency
from kvfs.tiers import oplog, promotion, warm
from kvfs.tiers.mapping import watch
from kvfs.tiers.migrate import Migration
from kvfs.tiers.promotion import windows
from kvfs.tiers.warm import WarmTier
from tests.engine.audit import audit
from tests.engine.deferred import Task
from tests.engine.kit import DIRECTORY, FILE, MIB, new_device
from tests.engine.test_writer import DeferredBench, make_deferred

LAYERS = 4
WINDOW_SIZE = 192 * 1024  # small, so that a pass has several


@contextmanager
def cold_session(seed: int, rounds: list[int]) -> Iterator[Session]:
    """One whose layers grew in turns, by so many bytes each, and went down to the ring."""
    made = Path(tempfile.mkdtemp(prefix="kvfs-promote-", dir="/dev/shm"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(oplog, "CHUNK_SIZE", MIB)
            patch.setattr(warm, "CHUNK_SIZE", MIB)
            patch.setattr(promotion, "_WINDOW_SIZE", WINDOW_SIZE)
            session = Session(make_deferred(made, seed, new_device(segments=48)), Random(seed))
            for size in rounds:
                for ino in session.layers:
                    session.write(ino, len(session.layers[ino]), size)
                session.bench.go(session.bench.store.write_back())
            session.go_down()
            yield session
    finally:
        shutil.rmtree(made)


@dataclass
class Session:
    """Its layers, by inode, and what each has to hold. `reads` are those of the device."""

    bench: DeferredBench
    random: Random
    directory: int = 0
    layers: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    reads: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        store = self.bench.store
        made = self.bench.go(store.create(1, b"agent", DIRECTORY, 0, 0))
        self.directory = made.inode.ino
        for number in range(LAYERS):
            name = b"layer.%03d" % number
            ino = self.bench.go(store.create(self.directory, name, FILE, 0, 0)).inode.ino
            self.layers[ino], self.names[ino] = bytearray(), name
        self.migration = Migration(store, self.bench.warm, self.bench.executor)
        self.bench.device.fail = self._saw

    def _saw(self, kind: str, address: int, length: int) -> None:
        if kind == "read":
            self.reads.append((address, length))

    def write(self, ino: int, at: int, size: int) -> None:
        data = self.random.randbytes(size)
        self.bench.go(self._write(ino, at, data))

    def _write(self, ino: int, at: int, data: bytes) -> Step[None]:
        yield from self.bench.store.write(ino, at, data)
        content = self.layers[ino]
        content.extend(bytes(max(0, at - len(content))))
        content[at : at + len(data)] = data

    def truncate(self, ino: int, size: int) -> None:
        size = min(size, len(self.layers[ino]))
        self.bench.go(self.bench.store.set_attributes(ino, size=size))
        del self.layers[ino][size:]

    def remove(self, ino: int) -> None:
        self.bench.go(self.bench.store.unlink(self.directory, self.names[ino]))
        del self.layers[ino]

    def go_down(self) -> None:
        self.bench.go(self.migration.demote(self.directory))
        self.bench.executor.settle()

    def check(self, *, is_warm: bool) -> None:
        """Every byte, at once: if all is warm, without the device."""
        store = self.bench.store
        self.reads.clear()
        for ino, content in self.layers.items():
            assert bytes(self.bench.go(store.read(ino, 0, len(content) + 1))) == bytes(content)
        assert not (is_warm and self.reads), "what is warm is answered from memory"
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        self.bench.executor.settle()
        assert not self.migration._migrating and not self.migration._coming
        assert all(kvmap.users == 0 for kvmap in self.bench.warm._kvmaps.values()), "a leak"

    def data_reads(self) -> list[int]:
        """How often each extent of the layers was read."""
        counts = []
        for ino, content in self.layers.items():
            for extent in self.bench.go(self.bench.store.extents(ino, 0, len(content))):
                at = extent.address
                counts.append(sum(start <= at < start + length for start, length in self.reads))
        return counts


SIZES = st.sampled_from([100, 4096, 5000, 65_536, 70_000, 200_000])
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "truncate", "remove", "promote", "map"]),
        st.integers(0, LAYERS - 1),
        SIZES,
        st.integers(0, 12),
    ),
    max_size=8,
)


@given(st.integers(0, 1000), st.lists(SIZES, min_size=1, max_size=4), CHANGES)
@settings(max_examples=60, deadline=None)
def test_all_of_a_session_is_right_and_warm_after_a_pass(
    seed: int, rounds: list[int], changes: list[tuple[str, int, int, int]]
) -> None:
    with cold_session(seed, rounds) as session:
        bench, migration = session.bench, session.migration
        whole = bench.begin(migration.promote(session.directory))
        others: list[Task[object]] = []
        for what, number, size, happenings in changes:
            for _ in range(happenings):
                bench.executor.happen()
            ino = list(session.names)[number]
            if ino not in session.layers:
                continue
            match what:
                case "write":
                    session.write(ino, size // 3, size)
                case "append":
                    session.write(ino, len(session.layers[ino]), size)
                case "truncate":
                    session.truncate(ino, size)
                case "remove":
                    session.remove(ino)
                case "promote":
                    others.append(bench.begin(migration.promote(ino)))
                case _:
                    others.append(bench.begin(migration.promote(session.directory)))
        for task in (whole, *others):
            bench.executor.finish(task)
        assert whole.completion.result()
        session.check(is_warm=True)
        bench.go(bench.store.sync())
        bench.executor.settle()
        audit(bench.store)


@given(st.integers(0, 1000), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_what_finds_no_room_stays_in_the_ring(seed: int, limit: int) -> None:
    with cold_session(seed, [200_000, 300_000]) as session:
        session.bench.warm.limit = limit * MIB
        complete = session.bench.go(session.migration.promote(session.directory))
        is_warm = session.bench.go(session.migration.tier(session.directory)) == "warm"
        assert complete == is_warm
        session.check(is_warm=False)
        session.bench.warm.limit = 64 * MIB
        assert session.bench.go(session.migration.promote(session.directory))
        session.check(is_warm=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_session_and_its_fork_share_what_is_read(seed: int) -> None:
    with cold_session(seed, [100_000, 50_000]) as session:
        bench, migration = session.bench, session.migration
        fork = bench.go(bench.store.fork(session.directory, b"fork")).inode.ino
        bench.executor.settle()
        session.reads.clear()
        both = [bench.begin(migration.promote(one)) for one in (session.directory, fork)]
        for task in both:
            bench.executor.finish(task)
            assert task.completion.result()
        assert set(session.data_reads()) == {1}
        assert bench.go(migration.tier(fork)) == "warm"
        session.check(is_warm=True)


@pytest.mark.parametrize("rounds", [[20_000], [5000, 7000, 100], [4096] * 5])
def test_neighbours_come_with_one_read_whichever_file_they_are_of(rounds: list[int]) -> None:
    """What was written in one turn lies together, and each file is one piece in memory."""
    with cold_session(1, rounds) as session:
        session.reads.clear()
        assert session.bench.go(session.migration.promote(session.directory))
        assert set(session.data_reads()) == {1}
        assert len(session.reads) == len(rounds)
        for ino in session.layers:
            mapped = session.bench.go(session.migration.map(ino))
            assert mapped is not None
            assert len(mapped.segments) == 1
        session.check(is_warm=True)


@pytest.mark.parametrize("urgency", [Urgency.DEMAND, Urgency.BACKGROUND])
def test_a_guess_asks_for_memory_as_one(urgency: Urgency, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves touched memory to who writes."""
    make_ready, asked = WarmTier.make_ready, []

    def seen(tier: WarmTier, unit: int, size: int, *, is_guess: bool) -> Step[None]:
        asked.append(is_guess)
        return make_ready(tier, unit, size, is_guess=is_guess)

    with cold_session(0, [50_000]) as session:
        monkeypatch.setattr(WarmTier, "make_ready", seen)
        session.bench.go(session.migration.promote(session.directory, urgency))
    assert set(asked) == {urgency == Urgency.BACKGROUND}


def test_nobody_looks_at_the_memory_of_what_came_up_any_longer() -> None:
    """Not until the collector comes: it could not be used again."""
    with cold_session(1, [200_000, 5000]) as session:
        gc.collect()
        gc.disable()
        try:
            assert session.bench.go(session.migration.promote(session.directory))
            session.bench.executor.settle()
            views = [
                watch(r) for kvmap in session.bench.warm._kvmaps.values() for r in kvmap.regions
            ]
            session.go_down()
            assert views
            assert all(view() is None for view in views)
        finally:
            gc.enable()


@pytest.mark.parametrize("seed", range(8))
def test_a_pass_that_is_given_up_leaves_nothing_behind(seed: int) -> None:
    with cold_session(seed, [200_000, 150_000]) as session:
        executor, migration = session.bench.executor, session.migration
        step = migration.promote(session.directory)
        waits_for = next(step)
        for _ in range(seed):
            while not waits_for.done:
                assert executor.happen()
            waits_for = next(step)
        with pytest.raises(DeadlineExceeded):
            step.throw(DeadlineExceeded())
        session.check_nothing_is_left()
        assert session.bench.go(migration.promote(session.directory))
        session.check(is_warm=True)


def test_a_device_that_fails_is_told_of_and_leaves_nothing_behind() -> None:
    with cold_session(1, [300_000]) as session:

        def fail(kind: str, address: int, length: int) -> None:
            raise OSError(errno.EIO, "the device")

        session.bench.device.fail = fail
        with pytest.raises(OSError, match="the device"):
            session.bench.go(session.migration.promote(session.directory))
        session.check_nothing_is_left()
        session.bench.device.fail = session._saw
        assert session.bench.go(session.migration.promote(session.directory))
        session.check(is_warm=True)


@given(st.lists(st.integers(0, 80 * MIB), max_size=600))
def test_windows_have_every_byte_once_and_in_order(sizes: list[int]) -> None:
    found = dict.fromkeys(range(len(sizes)), 0)
    for window in windows(enumerate(sizes)):
        assert 0 < sum(part.length for part in window) <= promotion._WINDOW_SIZE
        assert len(window) <= promotion._WINDOW_RANGES
        for part in window:
            assert part.offset == found[part.ino]
            found[part.ino] += part.length
    assert list(found.values()) == sizes

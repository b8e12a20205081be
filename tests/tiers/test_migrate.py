"""Migration beside readers and writers: old or new, never a mixture, never a lost write.

Nothing happens by itself: seeds stand for the order in which reads of the device, copies,
write-back, checkpoints and what waits for them go on between each other.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from kvfs.engine.io import Step, Urgency
from kvfs.tiers import oplog, warm
from kvfs.tiers.migrate import Migration
from kvfs.tiers.sessions import WarmSessions
from tests.engine.audit import audit
from tests.engine.deferred import Task
from tests.engine.kit import DIRECTORY, FILE, MIB, new_device, noise
from tests.engine.test_writer import DeferredBench, make_deferred

SIZE_MAX = 300_000


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvfs-migrate-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@dataclass
class Session:
    """A session of some layers, and what each has to hold: all contents since a read began."""

    bench: DeferredBench
    random: Random
    name: bytes = b"agent"
    directory: int = 0
    layers: dict[int, bytearray] = field(default_factory=dict)
    reads: list[tuple[Task[bytes], int, int, int, list[bytes]]] = field(default_factory=list)
    others: list[Task[object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        bench = self.bench
        made = bench.go(bench.store.create(1, self.name, DIRECTORY, 0, 0))
        self.directory = made.inode.ino
        for number in range(3):
            name = b"layer.%03d" % number
            node = bench.go(bench.store.create(self.directory, name, FILE, 0, 0))
            self.layers[node.inode.ino] = bytearray()
        self.migration = Migration(bench.store, bench.warm, bench.executor)

    def pick(self) -> int:
        return self.random.choice(list(self.layers))

    def write(self) -> None:
        """Mostly appends, as an agent does, and now and then something in the middle."""
        ino = self.pick()
        content = self.layers[ino]
        data = self.random.randbytes(self.random.choice([100, 4096, 5000, 65536, 70_000]))
        at = len(content) if self.random.random() < 0.7 else self.random.randrange(SIZE_MAX // 2)
        at = min(at, len(content), SIZE_MAX)
        self.bench.go(self._write(ino, at, data))

    def _write(self, ino: int, at: int, data: bytes) -> Step[None]:
        yield from self.bench.store.write(ino, at, data)
        self.layers[ino][at : at + len(data)] = data
        self._changed(ino)

    def truncate(self) -> None:
        ino = self.pick()
        size = self.random.randrange(len(self.layers[ino]) + 1)
        self.bench.go(self._truncate(ino, size))

    def _truncate(self, ino: int, size: int) -> Step[None]:
        yield from self.bench.store.set_attributes(ino, size=size)
        del self.layers[ino][size:]
        self._changed(ino)

    def _changed(self, ino: int) -> None:
        for _, read_ino, offset, length, seen in self.reads:
            if read_ino == ino:
                seen.append(bytes(self.layers[ino][offset : offset + length]))

    def begin_read(self) -> None:
        ino = self.pick()
        offset = self.random.randrange(len(self.layers[ino]) + 1)
        length = self.random.choice([1, 4096, 100_000, SIZE_MAX])
        seen = [bytes(self.layers[ino][offset : offset + length])]
        task = self.bench.begin(self._read(ino, offset, length))
        self.reads.append((task, ino, offset, length, seen))

    def _read(self, ino: int, offset: int, length: int) -> Step[bytes]:
        return bytes((yield from self.bench.store.read(ino, offset, length)))

    def begin_migration(self) -> None:
        migration, ino = self.migration, self.pick()
        target = self.directory if self.random.random() < 0.3 else ino
        if self.random.random() < 0.1:
            self.bench.store.opened(ino)
        steps = [
            lambda: migration.promote(target),
            lambda: migration.demote(target),
            lambda: migration.demote_group([self.directory]),
            lambda: self.bench.store.checkpoint(),
            lambda: self.bench.store.clean(),
            lambda: migration.map(ino),
        ]
        self.others.append(self.bench.begin(self.random.choice(steps)()))

    def end_leases(self) -> None:
        store = self.bench.store
        for ino in self.layers:
            while store.units.opened[ino]:
                store.closed(ino)
            self.bench.warm.leases.end(ino)

    def go_on(self) -> None:
        match self.random.randrange(10):
            case 0 | 1 | 2:
                self.write()
            case 3 if self.random.random() < 0.3:
                self.truncate()
            case 4 | 5:
                self.begin_read()
            case 6 | 7:
                self.begin_migration()
            case 8:
                self.end_leases()
            case _:
                for _ in range(self.random.randrange(20)):
                    self.bench.executor.happen()

    def kill(self) -> None:
        """The daemon, and mount again."""
        bench = self.bench
        bench.executor.stops()
        bench.open()
        self.migration = Migration(bench.store, bench.warm, bench.executor)
        self.reads, self.others = [], []

    def check_reads(self, *, finish: bool) -> None:
        for read in list(self.reads):
            task, _, _, _, seen = read
            if finish:
                self.bench.executor.finish(task)
            if task.done:
                assert task.completion.result() in seen, "a mixture, or bytes of another time"
                self.reads.remove(read)
        for other in list(self.others):
            if finish:
                self.bench.executor.finish(other)
            if other.done:
                other.completion.result()
                self.others.remove(other)


@pytest.mark.parametrize("seed", range(8))
def test_readers_writers_and_migrations_at_once(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(oplog, "CHUNK_SIZE", MIB)
    monkeypatch.setattr(warm, "CHUNK_SIZE", MIB)
    random = Random(seed)
    bench = make_deferred(tmpfs, seed, new_device(segments=48))
    bench.warm.limit = random.choice([4 * MIB, 12 * MIB, 64 * MIB])
    session = Session(bench, random)
    for _ in range(100):
        session.go_on()
        session.check_reads(finish=False)
    session.check_reads(finish=True)
    bench.executor.settle()
    for ino, content in session.layers.items():
        assert bytes(bench.go(bench.store.read(ino, 0, SIZE_MAX * 2))) == bytes(content)
    bench.go(bench.store.sync())
    bench.executor.settle()
    audit(bench.store)
    session.end_leases()
    assert all(kvmap.users == 0 for kvmap in bench.warm._kvmaps.values()), "a leak"
    bench.open()  # as after SIGKILL
    for ino, content in session.layers.items():
        assert bytes(bench.go(bench.store.read(ino, 0, SIZE_MAX * 2))) == bytes(content)


@pytest.mark.parametrize("seed", range(6))
def test_killed_again_and_again_amid_migrations_nothing_that_was_answered_is_lost(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(oplog, "CHUNK_SIZE", MIB)
    monkeypatch.setattr(warm, "CHUNK_SIZE", MIB)
    random = Random(seed)
    bench = make_deferred(tmpfs, seed, new_device(segments=48))
    session = Session(bench, random)
    for _ in range(4):
        bench.warm.limit = random.choice([4 * MIB, 12 * MIB, 64 * MIB])
        for _ in range(50):
            session.go_on()
        session.kill()
        for ino, content in session.layers.items():
            assert bytes(bench.go(bench.store.read(ino, 0, SIZE_MAX * 2))) == bytes(content)


@pytest.mark.parametrize("seed", range(6))
def test_a_group_that_goes_down_is_cold_and_comes_up_again(tmpfs: Path, seed: int) -> None:
    random = Random(seed)
    bench = make_deferred(tmpfs, seed, new_device(segments=48))
    session = Session(bench, random)
    for _ in range(40):
        session.write()
    migration = session.migration
    assert bench.go(migration.tier(session.directory)) == "warm"
    assert bench.go(migration.demote_group([session.directory])) > 0
    assert bench.go(migration.tier(session.directory)) == "cold"
    for ino, content in session.layers.items():
        extents = bench.go(bench.store.extents(ino, 0, len(content)))
        assert len(extents) <= 2 * max(1, -(-len(content) // (128 * 1024))) + 1, "it is packed"
    assert bench.go(migration.promote(session.directory))
    assert bench.go(migration.tier(session.directory)) == "warm"
    reads: list[int] = []
    bench.device.fail = lambda kind, address, length: reads.append(address)
    for ino, content in session.layers.items():
        assert bytes(bench.go(bench.store.read(ino, 0, SIZE_MAX * 2))) == bytes(content)
    assert reads == [], "what is warm is answered from memory"
    bench.executor.settle()
    bench.go(bench.store.sync())
    audit(bench.store)


def test_layers_that_were_written_in_order_go_down_without_being_written_again(
    tmpfs: Path,
) -> None:
    """Of 300 kB in extents of 128 KiB, and of 1 MiB in what extents of this ring are at most."""
    bench = make_deferred(tmpfs, 1, new_device(segments=48))
    directory = bench.go(bench.store.create(1, b"s", 0o40700, 0, 0)).inode.ino
    for number, size in enumerate((300_000, 1 << 20)):
        name = b"layer.%d" % number
        ino = bench.go(bench.store.create(directory, name, 0o100600, 0, 0)).inode.ino
        bench.go(bench.store.write(ino, 0, bytes(size)))
    bench.go(bench.store.sync())
    written = bench.store.counters.payload_written
    migration = Migration(bench.store, bench.warm, bench.executor)
    assert bench.go(migration.demote_group([directory])) > 0
    assert bench.store.counters.payload_written == written


def test_who_needs_what_is_brought_in_on_a_guess_does_not_wait_behind_all_demand(
    tmpfs: Path,
) -> None:
    bench = make_deferred(tmpfs, 1, new_device(segments=48))
    session = Session(bench, Random(1))
    ino = session.pick()
    content = bytes(Random(2).randbytes(3 * MIB))
    bench.go(bench.store.write(ino, 0, content))
    bench.go(session.migration.demote(ino))
    bench.executor.settle()
    guess = bench.begin(session.migration.promote(ino, Urgency.BACKGROUND))
    while Urgency.BACKGROUND not in bench.executor.asked_for:
        assert bench.executor.happen()
    needed = bench.begin(session.migration.map(ino))
    assert Urgency.BACKGROUND not in bench.executor.asked_for
    while not guess.done:
        assert bench.executor.happen()
        assert Urgency.BACKGROUND not in bench.executor.asked_for
    bench.executor.finish(needed)
    assert needed.completion.result() is not None
    assert bytes(bench.go(bench.store.read(ino, 0, 4 * MIB))) == content


def test_a_guess_that_does_not_fit_drives_nobody_out(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oplog, "CHUNK_SIZE", MIB)
    monkeypatch.setattr(warm, "CHUNK_SIZE", MIB)
    bench = make_deferred(tmpfs, 1, new_device(segments=64))
    small, large = Session(bench, Random(1)), Session(bench, Random(2), b"large")
    bench.go(bench.store.set_xattr(large.directory, b"user.kvfs.unit", b"session"))
    for ino in large.layers:
        for at in range(4):
            bench.go(bench.store.write(ino, at * MIB, large.random.randbytes(MIB)))
    bench.go(bench.store.write(small.pick(), 0, small.random.randbytes(MIB)))
    bench.go(large.migration.demote(large.directory))
    bench.executor.settle()
    bench.go(bench.store.checkpoint())  # books what sessions take
    bench.warm.limit = 12 * MIB
    sessions = WarmSessions(large.migration)
    assert bench.go(sessions.promote(large.directory)) == 0
    assert bench.go(large.migration.tier(small.directory)) == "warm"
    bench.go(large.migration.demote(small.directory))
    assert bench.go(sessions.promote(small.directory)) > 0
    assert sessions.is_whole(small.directory)


def test_a_deep_tree_goes_down_and_comes_up(tmpfs: Path) -> None:
    bench = make_deferred(tmpfs, 1, new_device(segments=48))
    session = Session(bench, Random(1))
    migration, store, directory = session.migration, bench.store, session.directory
    for _ in range(sys.getrecursionlimit()):
        directory = bench.go(store.create(directory, b"d", DIRECTORY, 0, 0)).inode.ino
    ino = bench.go(store.create(directory, b"file", FILE, 0, 0)).inode.ino
    bench.go(store.write(ino, 0, content := Random(2).randbytes(5000)))
    assert bench.go(migration.demote(session.directory)) > 0
    assert bench.go(migration.tier(session.directory)) == "cold"
    assert bench.go(migration.promote(session.directory))
    assert bench.go(migration.tier(session.directory)) == "warm"
    assert bytes(bench.go(store.read(ino, 0, 5000))) == content


def test_who_closes_a_file_that_is_brought_in_for_it_leaves_no_lease(tmpfs: Path) -> None:
    """It may have been killed while it asked."""
    bench = make_deferred(tmpfs, 1, new_device(segments=48))
    session = Session(bench, Random(1))
    ino = session.pick()
    bench.go(bench.store.write(ino, 0, Random(2).randbytes(MIB)))
    bench.go(session.migration.demote(ino))
    bench.store.opened(ino)
    asked = bench.begin(session.migration.map(ino))
    assert not asked.done
    session.end_leases()
    bench.executor.finish(asked)
    assert asked.completion.result() is not None
    assert bench.warm.leases.total == 0
    assert bench.go(session.migration.demote(ino)) > 0


def test_what_is_written_anew_from_the_log_is_not_what_comes_after_it_there(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of the log is used again once the ring has what it held the first time."""
    bench = make_deferred(tmpfs, 1, new_device(segments=48))
    monkeypatch.setattr(warm.WarmTier, "_room_for", lambda tier, place, length: None)
    session = Session(bench, Random(1))
    ino = session.pick()
    store, content = bench.store, Random(2).randbytes(200_000)
    bench.go(store.write(ino, 0, content))
    on_its_way = bench.begin(store.write_back())
    anew = bench.begin(store.rewrite(ino, 0, len(content)))
    bench.executor.finish(on_its_way)
    bench.executor.finish(anew)
    for _ in range(20):
        bench.go(store.write(session.pick(), MIB, Random(3).randbytes(500_000)))
    bench.go(store.write_back())
    assert bytes(bench.go(store.read(ino, 0, len(content)))) == content


# -- when warm memory stays full -------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oplog, "CHUNK_SIZE", MIB)
    monkeypatch.setattr(warm, "CHUNK_SIZE", MIB)


@dataclass
class Full:
    """Two sessions of a MiB in a tier of which they take more than 88 %; one goes at once, the
    older one first. `strain` looks as often as 2 minutes want."""

    tmpfs: Path
    now: float = 0.0

    def __post_init__(self) -> None:
        self.bench = make_deferred(self.tmpfs, 1, new_device(segments=64))
        self.busy, self.idle = Session(self.bench, Random(1)), Session(self.bench, Random(2), b"b")
        for session in (self.busy, self.idle):
            self.bench.go(self.bench.store.write(session.pick(), 0, noise(MIB)))
        self.bench.go(self.bench.store.write(self.busy.pick(), 0, b"has memory ready for more"))
        self.bench.go(self.bench.store.sync())
        self.bench.warm.limit = int(self.bench.warm.usage().taken / 0.9)
        self.migration = Migration(self.bench.store, self.bench.warm, self.bench.executor, group=1)

    def strain(self) -> None:
        for _ in range(121):
            assert not self.migration.is_strained
            self.look()
        assert self.migration.is_strained

    def look(self) -> None:
        self.migration.look(self.now)
        self.now += 1.0

    def relieve(self) -> None:
        """The older session is written to just before it would go, so that it cannot."""
        store = self.bench.store

        def write_back_and_write() -> Step[None]:
            yield from type(store).write_back(store)
            yield from store.write(self.busy.pick(), 0, b"more")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "write_back", write_back_and_write)
            self.bench.go(self.migration.relieve())

    def tier_of(self, session: Session) -> str:
        return self.bench.go(self.migration.tier(session.directory))


@pytest.mark.usefixtures("small_chunks")
def test_a_group_that_cannot_go_is_got_past_once_memory_was_full_for_two_minutes(
    tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    full = Full(tmpfs)
    full.relieve()
    assert full.bench.warm.fill_pct > 88
    assert full.tier_of(full.idle) == "warm"
    full.strain()
    full.relieve()
    assert full.tier_of(full.idle) == "cold"
    full.look()
    assert not full.migration.is_strained
    told = [record.levelname for record in caplog.records if "88 %" in record.message]
    assert told == ["WARNING", "INFO"], "once, and once that it is over"


@pytest.mark.usefixtures("small_chunks")
def test_nothing_is_brought_in_on_a_guess_as_long_as_memory_is_full(tmpfs: Path) -> None:
    full = Full(tmpfs)
    bench, migration = full.bench, full.migration
    bench.go(migration.demote(full.idle.directory))
    bench.warm.limit = int(bench.warm.usage().taken / 0.9)
    full.strain()
    bench.warm.limit *= 4  # there is room now, which the next look sees
    assert WarmSessions(migration).is_strained
    migration.prefetch(full.idle.directory)
    bench.executor.settle()
    assert full.tier_of(full.idle) == "cold"
    full.look()
    migration.prefetch(full.idle.directory)
    bench.executor.settle()
    assert full.tier_of(full.idle) == "warm"

"""Memory of warm files that waits for its next use, and that nobody sees old bytes in it."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.buffer import Kept, Place
from kvfs.engine.format import BLOCK, KVMAP_DATA_START, KvmapEntry
from kvfs.engine.io import Completion, InlineExecutor, Step, Urgency
from kvfs.tiers import kvmap, oplog, spares, warm
from kvfs.tiers.kvmap import Kvmap
from kvfs.tiers.spares import Spares, set_aside
from kvfs.tiers.warm import MapSegment, WarmTier
from tests.tiers.test_warm import (
    FILE,
    MIB,
    SESSION,
    TOKEN,
    UUID,
    commit,
    extent_of,
    found,
    kvmaps,
    opened,
    put,
)

T = TypeVar("T")
NOTE = Kvmap.note
OTHER = SESSION + 1


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvfs-spares-", dir="/dev/shm"))
    yield made / "ring"
    shutil.rmtree(made)


@dataclass
class Threads(InlineExecutor):
    """What is submitted waits until it is told to go on."""

    waiting: list[tuple[Callable[[], Any], Completion[Any]]] = field(default_factory=list)

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Completion[T]:
        completion: Completion[T] = Completion()
        self.waiting.append((work, completion))
        return completion

    def go_on(self, number: int = 0) -> None:
        work, completion = self.waiting.pop(number % len(self.waiting))
        try:
            value = work()
        except Exception as error:
            completion.finish(error=error)
        else:
            completion.finish(value)

    def finish(self) -> None:
        while self.waiting:
            self.go_on()

    def drive(self, step: Step[T]) -> T:
        try:
            while True:
                if not next(step).done:
                    self.finish()
        except StopIteration as stop:
            result: T = stop.value
            return result


def made(waiting: Spares, size: int) -> Path:
    coming = waiting.stock(size)
    assert coming is not None and coming.result()
    return list(waiting._spares)[-1]


def on_disk(directory: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in directory.rglob("*") if p.is_file())


# -- the files alone -------------------------------------------------------------------


def test_no_more_wait_than_may(directory: Path) -> None:
    waiting = Spares(directory, 80 * MIB, InlineExecutor())
    assert waiting.expect(MIB) is None, "not worth a file"
    first = waiting.expect(7 * MIB)
    assert first is not None and first.size == 6 * MIB
    second = waiting.expect(64 * MIB)
    assert second is not None and second.size == 4 * MIB
    assert waiting.expect(2 * MIB) is None
    waiting.came(first, is_there=False)
    assert waiting.held == 4 * MIB
    assert not waiting.has(64 * MIB), "that one is not there yet"


def test_the_smallest_that_has_enough_is_taken(directory: Path) -> None:
    waiting = Spares(directory, 512 * MIB, InlineExecutor())
    sizes = {made(waiting, size * MIB): size * MIB for size in (8, 4, 16, 2)}
    taken = [waiting.take(*asked) for asked in [(3 * MIB, 64 * MIB), (MIB, 64 * MIB)]]
    assert [spare and spare.size for spare in taken] == [4 * MIB, 2 * MIB]
    largest = waiting.take(64 * MIB, 8 * MIB)
    assert largest is not None and largest.size == sizes[largest.path] == 8 * MIB
    assert waiting.take(MIB, 8 * MIB) is None and waiting.held == 16 * MIB


def test_the_oldest_are_given_back_first_and_in_part(directory: Path) -> None:
    waiting = Spares(directory, 512 * MIB, InlineExecutor())
    paths = [made(waiting, 4 * MIB) for _ in range(3)]
    waiting.give_back(5 * MIB)
    assert [path.exists() for path in paths] == [False, True, True]
    assert [path.stat().st_size for path in paths[1:]] == [2 * MIB, 4 * MIB]
    assert waiting.held == on_disk(directory) == 6 * MIB


def test_what_nobody_takes_is_given_back_to_the_floor(directory: Path) -> None:
    now = [0.0]
    waiting = Spares(directory, 128 * MIB, InlineExecutor(), lambda: now[0])
    assert waiting.lacks == 8 * MIB
    old = made(waiting, 6 * MIB)
    now[0] = 50.0
    made(waiting, 10 * MIB)
    waiting.give_back_idle()
    assert waiting.held == 16 * MIB
    now[0] = 61.0
    waiting.give_back_idle()
    assert not old.exists() and waiting.held == 10 * MIB
    now[0] = 120.0
    waiting.give_back_idle()
    assert waiting.held == 8 * MIB and waiting.lacks == 0


def test_one_that_is_set_aside_is_nobodys(directory: Path) -> None:
    directory.mkdir()
    waiting = Spares(directory / "spare", 80 * MIB, InlineExecutor())
    (directory / "file").write_bytes(bytes(range(256)) * (3 * MIB // 256))
    spare = waiting.expect(3 * MIB)
    assert spare is not None
    assert set_aside(directory / "file", spare)
    assert not (directory / "file").exists()
    content = spare.path.read_bytes()
    assert len(content) == 2 * MIB
    assert content[:KVMAP_DATA_START] == bytes(KVMAP_DATA_START)
    assert not set_aside(directory / "none", spare)


def test_a_full_tmpfs_leaves_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, base: int, length: int) -> memoryview:
        raise OSError(28, "full")

    monkeypatch.setattr(spares, "make_span", full)
    waiting = Spares(directory, 80 * MIB, InlineExecutor())
    coming = waiting.stock(4 * MIB)
    assert coming is not None and not coming.result()
    assert waiting.held == 0 and list(directory.iterdir()) == []


# -- in the tier -----------------------------------------------------------------------


@dataclass
class Tier:
    directory: Path
    limit: int = 512 * MIB
    now: float = 0.0
    sequence: int = 0

    def __post_init__(self) -> None:
        executor = InlineExecutor()
        self.tier = WarmTier(self.directory, self.limit, executor, clock=lambda: self.now)
        assert list(self.tier.open(UUID, TOKEN, 0)) == []
        self.tier.begin(TOKEN)

    def save(self, unit: int, mib: int, data: bytes | None = None) -> list[Kept]:
        """So many extents, and what is kept of them."""
        kept = []
        data = data or os.urandom(MIB)
        for number in range(mib):
            self.sequence += 1
            kept.append(put(self.tier, self.sequence, data, number * MIB, unit)[1])
            commit(self.tier, self.sequence, extent_of(self.sequence, data), kept[-1:])
        return kept

    @property
    def inodes(self) -> set[int]:
        return {path.stat().st_ino for path in kvmaps(self.directory)}

    @property
    def spare(self) -> int:
        return self.tier.usage().spare


@pytest.mark.parametrize(("unit", "size"), [(OTHER, MIB), (0, MIB // 64)])
def test_who_is_likely_to_write_more_begins_in_memory_that_was_used(
    directory: Path, unit: int, size: int
) -> None:
    it = Tier(directory)
    it.save(SESSION, 10)
    before = it.inodes
    it.tier.evict_unit(SESSION)
    it.save(unit, 1, os.urandom(size))
    assert it.inodes == before
    assert on_disk(directory) == it.tier.usage().taken + it.spare


def test_memory_that_was_given_up_is_used_again(directory: Path) -> None:
    it = Tier(directory)
    it.save(SESSION, 10)
    before, taken = it.inodes, it.tier.usage().taken
    it.tier.evict_unit(SESSION)
    assert it.inodes == set() and it.spare >= 8 * MIB
    assert it.tier.usage().taken <= taken - 10 * MIB
    it.save(OTHER, 1, os.urandom(MIB // 4))
    assert not it.inodes & before, "it is not known to be large yet"
    it.save(OTHER, 10)
    assert it.inodes >= before and it.spare < 8 * MIB
    assert on_disk(directory) == it.tier.usage().taken + it.spare


def test_what_is_brought_in_takes_it_too(directory: Path) -> None:
    it = Tier(directory)
    it.save(SESSION, 10)
    before = it.inodes
    it.tier.evict_unit(SESSION)
    assert InlineExecutor().spawn(it.tier.make_ready(OTHER, 6 * MIB)).done
    assert it.inodes == before
    filling = Threads().drive(it.tier.reserve(Place(OTHER, FILE, 0), 5 * MIB))
    assert filling is not None and it.inodes == before
    it.tier.filled(filling, [])


@pytest.mark.parametrize("is_leased", [True, False])
def test_what_others_were_told_of_is_not_used_again(directory: Path, is_leased: bool) -> None:
    it = Tier(directory)
    kept = it.save(SESSION, 10)
    assert it.tier.lease(FILE, kept) if is_leased else it.tier.segments(kept)
    del kept
    it.tier.leases.end(FILE)
    assert it.tier.evict_unit(SESSION) and it.spare == 0


def test_what_somebody_looks_at_is_not_used_again(directory: Path) -> None:
    it = Tier(directory)
    data = os.urandom(MIB)
    kept = it.save(SESSION, 10, data)
    view = kept[3].data[100:200]
    del kept
    assert it.tier.evict_unit(SESSION) and it.spare == 0
    it.save(OTHER, 10)
    assert view == data[100:200]


def test_what_an_earlier_process_made_is_not_used_again(directory: Path) -> None:
    """It may have told others of it."""
    it = Tier(directory)
    it.save(SESSION, 10)
    tier, _ = opened(directory, sequence=it.sequence, limit=it.limit)
    assert tier.evict_unit(SESSION) and tier.usage().spare == 0


def test_a_session_that_is_removed_leaves_its_memory(directory: Path) -> None:
    it = Tier(directory)
    data = os.urandom(MIB)
    it.save(SESSION, 10, data)
    it.tier.forget([extent_of(number, data) for number in range(1, 11)])
    assert it.spare >= 8 * MIB


def test_nothing_of_the_file_before_is_found_after_a_kill(directory: Path) -> None:
    """Not in its first table, and not in one that lies where the data of another was."""
    it = Tier(directory)
    stale = KvmapEntry(1, 12345, 0, KVMAP_DATA_START, BLOCK, 1, 1).pack()
    data = stale * (MIB // len(stale))
    it.save(SESSION, 30, data)
    before = it.inodes
    it.tier.evict_unit(SESSION)
    it.save(OTHER, 7)
    assert it.inodes & before
    for number in range(1500):  # more than a table has
        it.sequence += 1
        kept = put(it.tier, it.sequence, b"%04d" % number, 4 * number, OTHER)[1]
        commit(it.tier, it.sequence, extent_of(it.sequence, b"%04d" % number), [kept])
    held = set(it.tier._held)
    tier, left = opened(directory, sequence=it.sequence, limit=it.limit)
    assert left == [] and set(tier._held) == held
    assert found(tier, extent_of(it.sequence, b"%04d" % number)) == b"%04d" % number
    assert list((directory / "spare").iterdir()) == [] and tier.usage().spare == 0


def test_memory_that_a_thread_still_makes_is_not_used_again(directory: Path) -> None:
    """It may have opened the file already, and would make more of it."""
    threads = Threads()
    tier = WarmTier(directory, 512 * MIB, threads)
    assert list(tier.open(UUID, TOKEN, 0)) == []
    data = os.urandom(MIB)
    number = 0
    while number < 6 or not threads.waiting:
        threads.finish()
        number += 1
        kept = [put(tier, number, data, MIB * number)[1]]
        commit(tier, number, extent_of(number, data), kept)
    del kept
    assert tier.evict_unit(SESSION)
    threads.finish()
    assert tier.usage().spare == 0


def test_a_guess_leaves_spares_to_who_writes(directory: Path) -> None:
    it = Tier(directory)
    it.save(SESSION, 10)
    it.tier.evict_unit(SESSION)
    spare = it.spare
    assert spare
    assert InlineExecutor().spawn(it.tier.make_ready(OTHER, 6 * MIB, is_guess=True)).done
    assert it.spare == spare
    assert it.tier.usage().taken > 6 * MIB


def test_spares_give_way_to_tables(directory: Path) -> None:
    it = Tier(directory)
    it.save(SESSION, 10)
    it.tier.evict_unit(SESSION)
    (kept,) = it.save(OTHER, 1, b"data" * 1000)
    it.tier.limit = it.tier.usage().taken + it.spare
    for number in range(2, 5000):
        commit(it.tier, it.sequence, extent_of(number, bytes(kept.data)), [kept])
    assert it.tier.usage().taken + it.spare <= it.tier.limit
    assert 0 < it.spare


def test_spares_give_way_to_the_log(directory: Path) -> None:
    it = Tier(directory)
    it.save(SESSION, 20)
    it.tier.evict_unit(SESSION)
    it.tier.limit = it.tier.usage().taken + it.spare
    spare = it.spare
    for _ in range(20):
        it.sequence += 1
        assert it.tier.has_room(MIB)
        it.tier.append(it.sequence, b"operation", bytes(MIB))
        assert it.tier.usage().taken + it.spare <= it.tier.limit
    assert 0 < it.spare < spare


@pytest.mark.parametrize("keep", [True, False])
def test_an_end_leaves_none(directory: Path, keep: bool) -> None:
    it = Tier(directory)
    it.save(SESSION, 10)
    it.save(OTHER, 1)
    it.tier.evict_unit(SESSION)
    assert it.spare
    it.tier.close(keep=keep)
    assert directory.exists() == keep
    assert not (directory / "spare").exists()
    it.tier.tick()
    assert not (directory / "spare").exists(), "also a thread, or a tick, that comes late"


def test_an_end_leaves_no_directory_that_was_emptied_before_a_kill(directory: Path) -> None:
    (directory / "7").mkdir(parents=True)
    tier, _ = opened(directory)
    tier.close(keep=False)
    assert not directory.exists()


@pytest.mark.parametrize("first", ["thread", "close"])
def test_an_end_leaves_none_of_what_threads_were_to_make(directory: Path, first: str) -> None:
    threads = Threads()
    tier = WarmTier(directory, 256 * MIB, threads)
    assert list(tier.open(UUID, TOKEN, 0)) == []
    data = os.urandom(MIB)
    for number in range(1, 9):
        kept = [put(tier, number, data, MIB * number)[1]]
        threads.finish()
        commit(tier, number, extent_of(number, data), kept)
    del kept
    tier._taken_before = tier._taken
    tier.tick()
    assert tier.evict_unit(SESSION) and tier.usage().spare >= 12 * MIB
    if first == "thread":
        while threads.waiting and tier._spares.has(64 * MIB) is False:
            threads.go_on(-1)
    tier.close(keep=False)
    threads.finish()
    assert not directory.exists()


def test_spares_go_before_anything_else_does(directory: Path) -> None:
    it = Tier(directory)
    it.save(SESSION, 10)
    it.save(OTHER, 10)
    it.tier.evict_unit(SESSION)
    evicted, spare = it.tier.counters.evicted, it.spare
    free = it.limit - it.tier.usage().taken
    assert it.tier.make_room(free - 10 * MIB)
    assert 0 < it.spare < spare
    assert it.tier.make_room(free) and it.spare == 0
    assert it.tier.counters.evicted == evicted
    assert it.tier.make_room(free + MIB) and it.spare == 0
    assert it.tier.counters.evicted > evicted


def test_who_does_not_write_on_gives_back_what_it_did_not_use(directory: Path) -> None:
    it = Tier(directory, limit=512 * MIB)
    it.save(SESSION, 40)
    it.tier.evict_unit(SESSION)
    assert it.spare > 30 * MIB
    data = os.urandom(MIB)
    it.save(OTHER, 12, data)
    taken = it.tier.usage().taken
    it.tier.tick()
    it.now += 9
    it.save(OTHER, 1, data)
    it.tier.tick()
    it.now += 9
    it.tier.tick()
    assert it.tier.usage().taken == taken
    it.now += 2
    it.tier.tick()
    it.tier.tick()
    assert it.tier.usage().taken < taken - 10 * MIB
    assert on_disk(directory) == it.tier.usage().taken + it.spare
    assert found(it.tier, extent_of(it.sequence, data)) == data
    it.save(OTHER, 8, data)
    assert found(it.tier, extent_of(it.sequence, data)) == data


def test_some_memory_is_made_ready_while_nobody_takes_any(directory: Path) -> None:
    it = Tier(directory, limit=1024 * MIB)
    it.save(SESSION, 3)
    it.tier.tick()
    assert it.spare == 0, "somebody writes"
    it.tier.tick()
    assert it.spare == 64 * MIB
    before = {path.stat().st_ino for path in (directory / "spare").iterdir()}
    it.save(SESSION, 6)
    assert it.inodes & before
    it.tier.limit = it.tier.usage().taken * 2 - 1
    it.tier.tick()
    it.tier.tick()
    assert it.spare == 48 * MIB, "there is little room"


def test_an_extent_across_two_files_is_put_together(directory: Path) -> None:
    it = Tier(directory)
    kept = []
    data = os.urandom(MIB // 4)
    it.save(SESSION, 10)
    it.tier.evict_unit(SESSION)
    while len(it.inodes) < 2:
        it.sequence += 1
        kept.append(put(it.tier, it.sequence, data, len(kept) * len(data), OTHER)[1])
    whole = extent_of(999, data * 3)
    commit(it.tier, it.sequence, whole, kept[-3:])
    assert found(it.tier, whole) == data * 3


# -- all of it, in any order -----------------------------------------------------------

WHAT = (
    *["put"] * 4, *["commit"] * 3, *["save"] * 3, *["evict"] * 2, *["tick"] * 3, *["thread"] * 3,
    "forget", "look", "look_away", "lease", "end_lease", "promote",
)  # fmt: skip
STEPS = 150


@dataclass
class Client:
    """Has mapped what it was told of, and keeps that whether or not it has the file open."""

    data: bytes
    segments: list[tuple[mmap.mmap, MapSegment]]

    @classmethod
    def of(cls, data: bytes, segments: list[MapSegment]) -> Client:
        mapped = []
        for segment in segments:
            with open(segment.path, "rb") as file:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.append((view, segment))
        return cls(data, mapped)

    def sees(self) -> bytes:
        return b"".join(view[s.offset : s.offset + s.length] for view, s in self.segments)


class Machine:
    """The tier, and what has to be true of it."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit, self.now = directory, limit, 0.0
        self.threads = Threads()
        self.tier = WarmTier(directory, limit, self.threads, clock=lambda: self.now)
        assert list(self.tier.open(UUID, TOKEN, 0)) == []
        self.tier.begin(TOKEN)
        self.sequence = self.released = self.promoted = 0
        self.dirty: list[tuple[Any, Kept, int]] = []
        self.extents: dict[int, bytes] = {}
        self.views: list[tuple[Kept, bytes]] = []
        self.clients: list[Client] = []
        self.leased: list[int] = []
        self.noted: defaultdict[int, set[int]] = defaultdict(set)

    def note(self, one: Kvmap, entry: KvmapEntry, tokens: int) -> None:
        self.noted[one.header.serial].add(entry.extent_id)
        NOTE(one, entry, tokens)

    def put(self, number: int, size: int) -> None:
        if not self.tier.has_room(size + BLOCK):
            return
        self.sequence += 1
        data = self.sequence.to_bytes(8, "little") * (size // 8 + 1)
        unit = SESSION + number if number else 0
        record, kept = put(self.tier, self.sequence, data, self.sequence * MIB, unit)
        self.dirty.append((record, kept, self.sequence))

    def commit(self, number: int, size: int) -> None:
        """One or two as one extent."""
        group = self.dirty[: 1 + size % 2]
        if not group:
            return
        del self.dirty[: len(group)]
        self.released = group[-1][2]
        self.extents[self.released] = data = b"".join(record[2] for record, _, _ in group)
        pieces = [kept for _, kept, _ in group]
        commit(self.tier, self.released, extent_of(self.released, data), pieces)

    def save(self, number: int, size: int) -> None:
        """A session that is large."""
        for _ in range(6):
            self.put(number, size)
            self.commit(0, 0)

    def forget(self, number: int, size: int) -> None:
        if self.extents:
            one = list(self.extents)[size % len(self.extents)]
            self.tier.forget([extent_of(one, self.extents.pop(one))])

    def evict(self, number: int, size: int) -> None:
        self.tier.evict_unit(SESSION + number if number else 0)

    def _kept(self, size: int) -> tuple[int, bytes, list[Kept]]:
        for one in list(self.extents)[size % max(len(self.extents), 1) :]:
            pieces = self.tier.find(extent_of(one, self.extents[one]), is_use=False)
            if pieces is not None:
                return one, self.extents[one], list(pieces)
        return 0, b"", []

    def look(self, number: int, size: int) -> None:
        _, data, kept = self._kept(size)
        at = 0
        for piece in kept:
            self.views.append((piece, data[at : at + len(piece)]))
            at += len(piece)

    def look_away(self, number: int, size: int) -> None:
        del self.views[: 1 + number]

    def lease(self, number: int, size: int) -> None:
        ino, data, kept = self._kept(size)
        segments = self.tier.lease(ino, kept) if kept else None
        if segments is not None:
            self.clients.append(Client.of(data, segments))
            self.leased.append(ino)

    def end_lease(self, number: int, size: int) -> None:
        if self.leased:
            self.tier.leases.end(self.leased.pop(0))

    def promote(self, number: int, size: int) -> None:
        place = Place(SESSION + number, FILE, 0)
        if size % 2:
            self.threads.drive(self.tier.make_ready(place.unit, size))
        filling = self.threads.drive(self.tier.reserve(place, size))
        if filling is not None:
            data = os.urandom(size)
            filling.kept.data[:] = data
            self.promoted += 1
            self.extents[10**6 + self.promoted] = data
            self.tier.filled(filling, [(0, extent_of(10**6 + self.promoted, data), 0)])

    def tick(self, number: int, size: int) -> None:
        self.now += (1, 20, 70)[number]
        self.tier.tick()

    def thread(self, number: int, size: int) -> None:
        if self.threads.waiting:
            self.threads.go_on(size)

    def check(self) -> None:
        tier = self.tier
        for number, data in self.extents.items():
            assert found(tier, extent_of(number, data)) in (None, data)
        assert all(kept.data == data for kept, data in self.views)
        assert all(kept.data == record[2] for record, kept, _ in self.dirty)
        assert all(client.sees() == client.data for client in self.clients)

    def count(self) -> None:
        tier = self.tier
        usage = tier.usage()
        assert usage.taken + usage.spare <= self.limit
        assert tier._taken == sum(kvmap.taken for kvmap in tier._kvmaps.values())
        assert usage.spare == sum(spare.size for spare in tier._spares._spares.values())
        assert 0 <= usage.spare <= self.limit // 2

    def end(self, *, killed: bool) -> None:
        self.threads.finish()
        self.count()
        self.check()
        usage = self.tier.usage()
        assert on_disk(self.directory) <= usage.taken + usage.spare
        if not killed:
            self.tier.close(keep=False)
            assert not self.directory.exists()
            return
        again, left = opened(self.directory, sequence=self.released, limit=self.limit)
        assert left == [record for record, _, _ in self.dirty]
        for number, data in self.extents.items():
            assert found(again, extent_of(number, data)) in (None, data)
        for one in again._kvmaps.values():
            assert {entry.extent_id for entry in one.entries()} <= self.noted[one.header.serial]
        assert again.counters.damaged == 0
        assert list((self.directory / "spare").glob("*")) == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), killed=st.booleans())
def test_nobody_sees_other_bytes_and_the_limit_holds(
    monkeypatch: pytest.MonkeyPatch, seed: int, killed: bool
) -> None:
    """Sizes are small, so that all of it happens in few steps; a seed stands for these, since
    lists of them would seldom be long."""
    random = Random(seed)
    for module in (oplog, warm):
        monkeypatch.setattr(module, "CHUNK_SIZE", 512 * 1024)
    for module in (spares, warm):
        monkeypatch.setattr(module, "UNIT", 512 * 1024)
    monkeypatch.setattr(kvmap, "_LARGE_PAGE", 512 * 1024)
    monkeypatch.setattr(spares, "_STOCK_SIZE", 1024 * 1024)
    monkeypatch.setattr(spares, "_FLOOR_SHARE", 8)
    monkeypatch.setattr(spares, "_CAP_SHARE", 2)
    monkeypatch.setattr(warm, "_SESSION_SHARE", 2)
    monkeypatch.setattr(warm, "_GROWING_SECONDS", 0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        machine = Machine(Path(made, "ring"), limit=12 * MIB)
        monkeypatch.setattr(Kvmap, "note", lambda *noted: machine.note(*noted))
        for step in range(STEPS):
            what, number, size = random.choice(WHAT), random.randrange(3), random.randrange(450_000)
            getattr(machine, what)(number, size + 1)
            machine.count()
            if step % 5 == 0:
                machine.check()
        machine.end(killed=killed)

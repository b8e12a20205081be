"""The warm tier alone: where writes land, what survives the process, what is given up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.buffer import InRing, Kept, Place
from kvfs.engine.format import BLOCK, KVMAP_LAYOUT_AT, Extent, KvmapLayout, checksum
from kvfs.engine.io import Completion, InlineExecutor, Urgency, run
from kvfs.tiers import kvmap, oplog, warm
from kvfs.tiers.kvmap import Kvmap
from kvfs.tiers.warm import WarmTier

UUID, TOKEN, OTHER = b"u" * 16, b"t" * 16, b"o" * 16
MIB = 1024 * 1024
SESSION, FILE = 1000, 2000
Record = tuple[int, bytes, bytes]


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvfs-warm-", dir="/dev/shm"))
    yield made / "ring"
    shutil.rmtree(made)


def opened(
    directory: Path, token: bytes = TOKEN, sequence: int = 0, limit: int = 64 * MIB
) -> tuple[WarmTier, list[Record]]:
    tier = WarmTier(directory, limit, InlineExecutor())
    left = [(r.sequence, r.operation, bytes(r.kept.data)) for r in tier.open(UUID, token, sequence)]
    tier.begin(token)
    return tier, left


def put(
    tier: WarmTier, sequence: int, data: bytes, offset: int = 0, unit: int = SESSION
) -> tuple[Record, Kept]:
    operation = b"op %d" % sequence
    kept = tier.append(sequence, operation, data, Place(unit, FILE, offset))
    assert bytes(kept.data) == data
    return (sequence, operation, data), kept


def extent_of(number: int, data: bytes) -> Extent:
    return Extent(number, 4096 * number, len(data), len(data), 0, 1, checksum(data))


def commit(tier: WarmTier, sequence: int, extent: Extent, pieces: list[Kept]) -> None:
    tier.in_ring([InRing(extent, FILE, 0, pieces, 100)])
    tier.release(sequence)


def found(tier: WarmTier, extent: Extent) -> bytes | None:
    pieces = tier.find(extent, is_use=True)
    return None if pieces is None else b"".join(piece.data for piece in pieces)


def kvmaps(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kvmap"))


# -- what survives the process ---------------------------------------------------------


def test_what_was_answered_survives_and_lies_in_the_sessions_file(directory: Path) -> None:
    tier, left = opened(directory)
    assert left == []
    records = [put(tier, n, os.urandom(5000), 5000 * (n - 1))[0] for n in range(1, 30)]
    (path,) = kvmaps(directory)
    assert path.name.startswith(f"{SESSION}.")
    assert path.stat().st_mode & 0o777 == 0o600
    assert opened(directory)[1] == records


def test_what_is_in_the_ring_is_found_by_the_next_process(directory: Path) -> None:
    tier, _ = opened(directory)
    data = os.urandom(200_000)
    _, kept = put(tier, 1, data)
    extent = extent_of(7, data)
    commit(tier, 1, extent, [kept])
    assert found(tier, extent) == data
    again, left = opened(directory, sequence=1)
    assert left == []
    assert found(again, extent) == data
    assert again.counters.taken_over == len(data)


def test_an_extent_in_pieces_is_found_too(directory: Path) -> None:
    tier, _ = opened(directory)
    parts = [os.urandom(30_000) for _ in range(8)]
    kept = [put(tier, n, part, 30_000 * (n - 1))[1] for n, part in enumerate(parts, 1)]
    put(tier, 9, b"other", 10**6)
    kept.append(put(tier, 10, parts[0], 240_000)[1])
    extent = extent_of(7, b"".join([*parts, parts[0]]))
    commit(tier, 10, extent, kept)
    assert found(tier, extent) == b"".join([*parts, parts[0]])
    assert found(opened(directory, sequence=10)[0], extent) == b"".join([*parts, parts[0]])


def test_what_comes_into_the_ring_after_a_kill_overwrites_nothing(directory: Path) -> None:
    """It is noted in the tables of a file that an earlier process made, and in new ones."""
    tier, _ = opened(directory, limit=256 * MIB)
    clean = os.urandom(5000)
    extents = {extent_of(1, clean): clean}
    commit(tier, 1, extent_of(1, clean), [put(tier, 1, clean, unit=0)[1]])
    for number in range(2, 2500):  # more than two tables can hold
        put(tier, number, os.urandom(100), 10_000 * number, unit=0)
    tier = WarmTier(directory, 256 * MIB, InlineExecutor())
    left = list(tier.open(UUID, TOKEN, 1))
    tier.begin(TOKEN)
    before = [bytes(record.kept.data) for record in left]
    for record, data in zip(left, before, strict=True):
        extents[extent_of(record.sequence, data)] = data
        commit(tier, 1, extent_of(record.sequence, data), [record.kept])
    assert [bytes(record.kept.data) for record in left] == before
    again, dirty = opened(directory, sequence=1, limit=256 * MIB)
    assert len(dirty) == len(left)
    assert all(found(again, extent) == data for extent, data in extents.items())
    assert again.counters.damaged == 0


def test_of_another_mount_nothing_is_found(directory: Path) -> None:
    tier, _ = opened(directory)
    data = os.urandom(5000)
    _, kept = put(tier, 1, data)
    commit(tier, 1, extent_of(7, data), [kept])
    again, left = opened(directory, token=OTHER)
    assert left == []
    assert found(again, extent_of(7, data)) is None
    assert kvmaps(directory) == []


def test_an_extent_that_is_another_by_its_checksum_is_not_found(directory: Path) -> None:
    """A copy of the image may have gone another way."""
    tier, _ = opened(directory)
    data = os.urandom(5000)
    _, kept = put(tier, 1, data)
    commit(tier, 1, extent_of(7, data), [kept])
    assert found(tier, extent_of(7, os.urandom(5000))) is None


@pytest.mark.parametrize("at", [0, 4096, 4096 + 63, 65536, 65536 + 100, 65536 + 70_000])
def test_a_changed_byte_costs_clean_data_alone_or_ends_the_log(directory: Path, at: int) -> None:
    """What it never does is to show other bytes."""
    tier, _ = opened(directory)
    clean, dirty = os.urandom(70_000), os.urandom(70_000)
    _, kept = put(tier, 1, clean)
    extent = extent_of(7, clean)
    commit(tier, 1, extent, [kept])
    record, _ = put(tier, 2, dirty, 70_000)
    (path,) = kvmaps(directory)
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))
    again, left = opened(directory, sequence=1)
    assert left == ([] if at in (0, 65536 + 70_000) else [record])
    assert found(again, extent) == (clean if at == 65536 + 70_000 else None)


def test_a_torn_layout_costs_what_is_clean_alone(directory: Path) -> None:
    tier, _ = opened(directory)
    data = os.urandom(5000)
    _, kept = put(tier, 1, data)
    commit(tier, 1, extent_of(7, data), [kept])
    record, _ = put(tier, 2, data, 5000)
    (path,) = kvmaps(directory)
    with open(path, "r+b") as file:
        file.seek(KVMAP_LAYOUT_AT)
        file.write(bytes(KvmapLayout.SIZE))
    again, left = opened(directory, sequence=1)
    assert left == [record]
    assert found(again, extent_of(7, data)) in (None, data)


def test_a_clean_end_leaves_nothing(directory: Path) -> None:
    tier, _ = opened(directory)
    put(tier, 1, b"data")
    tier.close(keep=False)
    assert not directory.exists()


def test_a_clean_end_leaves_nothing_of_what_threads_were_to_remove(directory: Path) -> None:
    class Busy(InlineExecutor):
        def submit(self, work: Any, urgency: Urgency = Urgency.DEMAND) -> Completion[Any]:
            return Completion()

    tier = WarmTier(directory, 64 * MIB, Busy())
    assert list(tier.open(UUID, TOKEN, 0)) == []
    _, kept = put(tier, 1, data := os.urandom(5000))
    commit(tier, 1, extent_of(1, data), [kept])
    assert tier.evict_unit(SESSION)
    tier.close(keep=False)
    assert not directory.exists()


# -- where things lie ------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 4096, 5000, 65536 + 17])
def test_data_lies_as_in_the_blocks_of_its_file(directory: Path, offset: int) -> None:
    """Direct I/O takes it from there."""
    tier, _ = opened(directory)
    _, kept = put(tier, 1, bytes(70_000), offset)
    address = np.frombuffer(kept.data, np.uint8).ctypes.data
    assert address % BLOCK == offset % BLOCK


def test_what_is_appended_in_small_parts_lies_in_one(directory: Path) -> None:
    tier, _ = opened(directory)
    pieces: list[Kept] = []
    for number in range(256):
        _, kept = put(tier, number + 1, bytes([number]) * 4096, 4096 * number)
        joined = pieces[-1].joined(kept) if pieces else None
        pieces = [*pieces[:-1], joined] if joined else [*pieces, kept]
    assert len(pieces) <= 6


def test_memory_for_large_writes_is_made_ready_by_threads(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind small ones, for which less was made ready. The loop is held by the first."""
    made = []
    make_span = kvmap.make_span
    monkeypatch.setattr(kvmap, "make_span", lambda *span: made.append(span) or make_span(*span))
    prepare = Kvmap.prepare
    prepared = []
    monkeypatch.setattr(Kvmap, "prepare", lambda *its: prepared.append(its) or prepare(*its))
    tier, _ = opened(directory, limit=512 * MIB)
    sizes = [5000, MIB // 8, *[MIB] * 20]
    for number, size in enumerate(sizes, 1):
        put(tier, number, bytes(size), sum(sizes[: number - 1]))
    assert len(made) - len(prepared) <= 3


def test_files_of_pools_share_warm_files_by_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_POOL_FILE_MAX", MIB)
    tier, _ = opened(directory)
    for number in range(40):
        put(tier, number + 1, os.urandom(100_000), 0, unit=0)
    names = [path.name for path in kvmaps(directory)]
    assert 4 <= len(names) <= 8
    assert all(name.startswith("pool.") for name in names)


def test_memory_outlives_who_looks_at_it_when_the_collector_ends_it(directory: Path) -> None:
    """A step that was left waits in the same garbage as the memory that it was to fill."""
    directory.mkdir()
    (directory / "file").write_bytes(bytes(MIB))
    script = (
        "import gc, sys; from pathlib import Path; from kvfs.tiers.mapping import map_shared\n"
        "def step(me):\n"
        "    view = map_shared(Path(sys.argv[1]), 0, 1 << 20)\n"
        "    try: yield\n"
        "    finally: view[0] = 1\n"
        "me = []; me.append(step(me)); next(me[0]); del me\n"
        "gc.collect()\n"
    )
    result = subprocess.run([sys.executable, "-c", script, directory / "file"], check=False)
    assert result.returncode == 0
    assert (directory / "file").read_bytes()[0] == 1


# -- what is given up ------------------------------------------------------------------


def test_what_was_not_used_for_the_longest_time_goes_first(directory: Path) -> None:
    tier, _ = opened(directory, limit=32 * MIB)
    extents = {}
    for number in range(1, 4):
        data = os.urandom(MIB)
        _, kept = put(tier, number, data, unit=SESSION + number)
        extents[number] = extent_of(number, data)
        commit(tier, number, extents[number], [kept])
    tier.policy.touch([SESSION + 1], 1.0)
    assert tier.next_to_go(2) == [SESSION + 2, SESSION + 3]
    assert tier.evict_unit(SESSION + 2) > MIB
    assert found(tier, extents[2]) is None
    assert found(tier, extents[3]) is not None


def test_what_the_ring_lacks_stays(directory: Path) -> None:
    tier, _ = opened(directory)
    record, _ = put(tier, 1, os.urandom(MIB))
    assert tier.evict_unit(SESSION) == 0
    assert not tier.make_room(64 * MIB)
    assert opened(directory)[1] == [record]


@pytest.mark.parametrize("size", [10_000, MIB // 8])
def test_what_is_written_to_a_clean_file_does_not_go_with_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Its own file is the only one that could make room for what is written, or for what may
    follow that. After a kill it must be there."""
    monkeypatch.setattr(WarmTier, "_file_max", lambda tier, unit: 64 * MIB)
    for count in range(1, 20):
        shutil.rmtree(directory, ignore_errors=True)
        tier, _ = opened(directory)
        for sequence in range(1, count):
            _, kept = put(tier, sequence, data := os.urandom(size), size * sequence)
            commit(tier, sequence, extent_of(sequence, data), [kept])
        tier.limit = tier.usage().taken
        written = [put(tier, n, os.urandom(size), size * n)[0] for n in range(count, count + 9)]
        assert tier._taken == sum(kvmap.taken for kvmap in tier._kvmaps.values())
        assert opened(directory, sequence=count - 1)[1] == written


def test_who_has_mapped_memory_keeps_it(directory: Path) -> None:
    tier, _ = opened(directory)
    data = os.urandom(MIB)
    _, kept = put(tier, 1, data)
    commit(tier, 1, extent_of(7, data), [kept])
    assert tier.lease(FILE, [kept]) is not None
    assert tier.evict_unit(SESSION) == 0
    tier.leases.end(FILE)
    assert tier.evict_unit(SESSION) > 0
    assert bytes(kept.data) == data, "a view outlives the file"


def test_room_is_not_looked_for_again_before_more_is_in_the_ring(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Very many sessions may be dirty: not each write looks at all of them."""
    tier, _ = opened(directory)
    assert not tier.make_room(65 * MIB)
    filling = run(tier.reserve(Place(SESSION, FILE, 0), MIB))
    assert filling is not None
    tier.filled(filling, [])
    assert tier.make_room(55 * MIB), "what came meanwhile may go"
    for number in range(1, 20):
        put(tier, number, bytes(5000), unit=SESSION + number)
    looked: list[int] = []
    victims = tier.policy.victims
    monkeypatch.setattr(
        tier.policy, "victims", lambda count, now: looked.append(count) or victims(count, now)
    )
    assert [tier.make_room(47 * MIB) for _ in range(9)] == [False] * 9
    assert len(looked) == 1
    tier.release(19)
    assert tier.make_room(47 * MIB)


def test_pools_go_in_parts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the policy they are one: it names them as often as a mount has nothing else."""
    monkeypatch.setattr(warm, "_POOL_FILE_MAX", MIB)
    tier, _ = opened(directory)
    extents = {}
    for number in range(1, 21):
        _, kept = put(tier, number, data := os.urandom(MIB // 2), unit=0)
        extents[number] = extent_of(number, data)
        commit(tier, number, extents[number], [kept])
    assert found(tier, extents[1]), "used last"
    before = tier.usage().taken
    assert tier.next_to_go(10) == [0]
    assert 0 < tier.evict_unit(0) < before // 2
    assert found(tier, extents[1]) is not None
    assert found(tier, extents[2]) is None


def test_a_part_of_the_pools_that_is_mapped_does_not_keep_the_rest(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_POOL_FILE_MAX", MIB)
    tier, _ = opened(directory)
    for number in range(1, 21):
        _, kept = put(tier, number, data := os.urandom(MIB // 2), unit=0)
        commit(tier, number, extent_of(number, data), [kept])
        if number <= 4:
            assert tier.lease(FILE + number, [kept]) is not None
    while tier.next_to_go(1) == [0]:
        before = tier.usage().taken
        assert tier.evict_unit(0) > 0
        assert tier.usage().taken < before
    assert tier.next_to_go(1) == []
    assert 0 < tier._taken == tier.leases.total, "what is mapped stays"


def test_sessions_without_memory_are_not_named(directory: Path) -> None:
    """Each read of any session is told to the policy: it must not name those in vain."""
    tier, _ = opened(directory)
    tier.policy.touch([5, 6, 7], 1.0)
    _, kept = put(tier, 1, data := os.urandom(MIB))
    commit(tier, 1, extent_of(1, data), [kept])
    assert tier.next_to_go(2) == [SESSION]
    tier.policy.touch([5, 6, 7], 1.0)
    assert tier.evict_unit(SESSION)
    assert tier.next_to_go(2) == []


def test_what_is_leased_does_not_grow_beyond_half(directory: Path) -> None:
    """Agents map what they go on to append to."""
    tier, _ = opened(directory)
    for number in range(1, 160):
        unit = number % 8
        _, kept = put(tier, number, data := os.urandom(MIB // 2), unit=SESSION + unit)
        commit(tier, number, extent_of(number, data), [kept])
        tier.lease(FILE + unit, [kept])
        assert tier.usage().leased <= tier.limit // 2


def test_what_is_shown_counts_as_leased_for_a_while_and_may_go(directory: Path) -> None:
    now = 0.0
    tier = WarmTier(directory, 64 * MIB, InlineExecutor(), clock=lambda: now)
    list(tier.open(UUID, TOKEN, 0))
    shown = {}
    for number in range(1, 9):
        _, kept = put(tier, number, data := os.urandom(4 * MIB), unit=SESSION + number)
        commit(tier, number, extent_of(number, data), [kept])
        (shown[number],) = tier.show([[kept]])
        assert tier.usage().leased <= tier.limit // 2
    refused = [number for number, segments in shown.items() if segments is None]
    assert shown[1] is not None and refused and refused == list(range(refused[0], 9))
    assert tier.evict_unit(SESSION + 1) > 0, "it is no lease that keeps it"
    now += 60
    assert tier.usage().leased == 0
    assert tier.show([[kept]]) != [None]


def test_the_log_has_room_when_all_else_is_in_use(directory: Path) -> None:
    """Before its first operation too: who makes a directory gets no ENOSPC."""
    tier, _ = opened(directory, limit=32 * MIB)
    fillings = []
    for number in range(100):
        place = Place(SESSION + number, FILE, 0)
        if (filling := run(tier.reserve(place, MIB))) is not None:
            fillings.append(filling)
    assert len(fillings) > 10
    assert tier.has_room(BLOCK)
    tier.append(1, b"operation")
    assert tier.usage().taken <= tier.limit
    for filling in fillings:
        tier.filled(filling, [])


@pytest.mark.parametrize("offset", [1, 4097, 70_003])
def test_memory_to_be_filled_by_direct_reads_is_aligned(directory: Path, offset: int) -> None:
    """Also behind a write that ended anywhere."""
    tier, _ = opened(directory)
    put(tier, 1, bytes(offset))
    filling = run(tier.reserve(Place(SESSION, FILE, offset), 2 * BLOCK))
    assert filling is not None
    assert np.frombuffer(filling.kept.data, np.uint8).ctypes.data % BLOCK == 0
    tier.filled(filling, [])


def test_the_log_gives_back_what_it_took_in_a_burst(directory: Path) -> None:
    """Where there is little memory, what it kept would be all of it."""
    tier, _ = opened(directory, limit=32 * MIB)
    released = 0
    for sequence in range(1, 200):
        while not tier.has_room(MIB + BLOCK):
            tier.release(released := released + 8)
        put(tier, sequence, bytes(MIB), unit=SESSION + sequence % 5)
    tier.release(sequence)
    assert tier.make_room(16 * MIB)


def test_an_extent_of_another_history_is_replaced(directory: Path) -> None:
    """The image was restored from a copy: its ids go another way from there."""
    tier, _ = opened(directory)
    old, new = os.urandom(5000), os.urandom(6000)
    commit(tier, 1, extent_of(7, old), [put(tier, 1, old)[1]])
    tier, _ = opened(directory, sequence=1)
    commit(tier, 2, extent_of(7, new), [put(tier, 2, new)[1]])
    assert found(tier, extent_of(7, new)) == new
    tier.forget([extent_of(7, new)])
    tier.evict_unit(SESSION)
    assert kvmaps(directory) == []


def test_a_name_that_was_told_is_not_that_of_another_file(directory: Path) -> None:
    """Who maps without an open file may come late: then it must not be there."""
    tier, _ = opened(directory)
    names = set()
    for number in range(1, 5):
        _, kept = put(tier, number, data := os.urandom(5000))
        commit(tier, number, extent_of(number, data), [kept])
        names.update(path.name for path in kvmaps(directory))
        tier.evict_unit(SESSION)
    assert len(names) == 4


@pytest.mark.parametrize("unit", [0, SESSION])
def test_a_name_that_was_told_is_not_that_of_another_file_after_a_new_mount(
    directory: Path, unit: int
) -> None:
    """The memory of before was given up, and the process has ended, well or not."""
    names = set()
    for keep in (True, False, True, False):
        tier, _ = opened(directory)
        _, kept = put(tier, 1, data := os.urandom(5000), unit=unit)
        commit(tier, 1, extent_of(1, data), [kept])
        names.update(path.name for path in kvmaps(directory))
        tier.evict_unit(unit)
        tier.close(keep=keep)
    assert len(names) == 4


def test_memory_of_what_was_removed_before_it_came_into_the_ring_is_given_up(
    directory: Path,
) -> None:
    """No extent tells of it."""
    tier, _ = opened(directory)
    put(tier, 1, os.urandom(5000))
    tier.tick()
    tier.tick()
    assert kvmaps(directory), "the ring lacks it"
    tier.release(1)
    tier.tick()
    tier.tick()
    assert kvmaps(directory) == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "commit", "forget", "find", "evict"]),
        st.integers(0, 4),
        st.integers(1, 300_000),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_it_holds_the_limit_and_shows_right_bytes(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, int]]
) -> None:
    """Against a model: what is in the ring, what is not, and that room which was promised is
    there."""
    monkeypatch.setattr(oplog, "CHUNK_SIZE", 512 * 1024)
    monkeypatch.setattr(warm, "CHUNK_SIZE", 512 * 1024)
    limit = 4 * MIB
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        directory = Path(made, "ring")
        tier, _ = opened(directory, limit=limit)
        sequence = released = 0
        dirty: list[tuple[Record, Kept, int]] = []
        extents: dict[int, tuple[Extent, bytes]] = {}
        for what, number, size in steps:
            if what == "put" and tier.has_room(size + BLOCK):
                sequence += 1
                data = bytes([sequence % 251]) * size
                record, kept = put(tier, sequence, data, unit=SESSION + number if number else 0)
                dirty.append((record, kept, sequence))
            elif what == "commit" and dirty:
                (_, _, data), kept, released = dirty.pop(0)
                extent = extent_of(released, data)
                extents[released] = (extent, data)
                commit(tier, released, extent, [kept])
            elif what == "forget" and extents:
                extent, _ = extents.pop(min(extents))
                tier.forget([extent])
                assert found(tier, extent) is None
            elif what == "evict":
                tier.evict_unit(SESSION + number)
            for extent, data in extents.values():
                assert found(tier, extent) in (None, data)
            assert tier.usage().taken <= limit
            on_disk = sum(p.stat().st_blocks * 512 for p in directory.rglob("*") if p.is_file())
            assert on_disk <= limit
        again, left = opened(directory, sequence=released, limit=limit)
        assert left == [record for record, _, _ in dirty]
        for extent, data in extents.values():
            assert found(again, extent) in (None, data)

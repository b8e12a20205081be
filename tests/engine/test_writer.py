"""Batches, flushes and checkpoints with several things under way at once.

Nothing happens here by itself (see deferred.py): each test lets happen what it is about,
and seeds stand for the order of the rest.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from kvfs.engine.codec import Codec
from kvfs.engine.format import DATA_START, SUPERBLOCK_ADDRESSES
from kvfs.engine.io import Step, run
from tests.engine.audit import audit
from tests.engine.deferred import DeferredExecutor, Task
from tests.engine.kit import FILE, MIB, Bench, new_device, noise
from tests.support import encrypted
from tests.support.devices import RecordingDevice, Written, everything_survives

T = TypeVar("T")
SEEDS = range(8)


class DeferredBench(Bench):
    """A store whose device work waits until it is let happen."""

    @property
    def executor(self) -> DeferredExecutor:
        executor: DeferredExecutor = self.store._executor  # type: ignore[assignment]
        return executor

    def go(self, step: Step[T]) -> T:
        return self.executor.run(step)

    def begin(self, step: Step[T]) -> Task[T]:
        return self.executor.begin(step)

    def error_of(self, step: Step[Any]) -> int | None:
        task = self.begin(step)
        self.executor.finish(task)
        return outcome(task)

    def names_now(self) -> list[bytes]:
        return [entry.name for _, entry in self.go(self.store.list_directory(1, 0, 1000))]

    def make_file(self, name: bytes) -> int:
        return self.go(self.store.create(1, name, FILE, 0, 0)).inode.ino


@pytest.fixture(params=SEEDS)
def deferred(tmpfs: Path, request: pytest.FixtureRequest) -> DeferredBench:
    return make_deferred(tmpfs, request.param)


def make_deferred(
    directory: Path, seed: int, device: RecordingDevice | None = None
) -> DeferredBench:
    used = device or new_device()
    made = DeferredBench(
        directory, used, make_executor=lambda: DeferredExecutor(used, Random(seed))
    )
    made.executor.settle()
    return made


def after_power_cut(bench: Bench) -> dict[bytes, bytes]:
    """What is on the device when nothing survives but what was flushed."""
    image = bench.device.image_after(len(bench.device.events), lambda write: iter(()))
    store = bench.open_image(image)
    assert store.damage is None
    found = {}
    for _, entry in run(store.list_directory(1, 0, 1000)):
        size = run(store.node(entry.ino)).inode.size
        found[entry.name] = bytes(run(store.read(entry.ino, 0, size)))
    return found


# -- checkpoints -----------------------------------------------------------------------


def until_checkpoint_is_written(bench: DeferredBench) -> Task[None]:
    """One is under way: its state is taken, the first of its frames is on the device."""
    bench.go(bench.store.sync())
    bench.executor.settle()
    writes, generation = bench.device.writes, bench.store.superblock.generation
    task = bench.begin(bench.store.checkpoint())
    while bench.device.writes == writes:
        assert bench.executor.happen()
    assert bench.store.superblock.generation == generation
    assert not task.done
    return task


def test_a_checkpoint_asked_for_during_another_describes_what_came_between(
    deferred: DeferredBench,
) -> None:
    first = until_checkpoint_is_written(deferred)
    ino = deferred.make_file(b"between")
    deferred.go(deferred.store.write(ino, 0, b"data"))
    deferred.go(deferred.store.checkpoint())
    assert first.done
    assert deferred.store.superblock.operation >= 2
    assert after_power_cut(deferred) == {b"between": b"data"}


def test_a_close_during_a_checkpoint_loses_nothing(deferred: DeferredBench) -> None:
    ino = deferred.make_file(b"before")
    until_checkpoint_is_written(deferred)
    deferred.go(deferred.store.write(ino, 0, noise(100_000)))
    deferred.make_file(b"between")
    deferred.go(deferred.store.close())
    assert not (deferred.directory / "log").exists(), "nothing is left to be done again"
    assert after_power_cut(deferred) == {b"before": noise(100_000), b"between": b""}


def test_nothing_is_written_after_a_close(deferred: DeferredBench) -> None:
    """The device may be given to somebody else."""
    ino = deferred.make_file(b"file")
    deferred.begin(deferred.store.sync())
    deferred.begin(deferred.store.checkpoint())
    deferred.go(deferred.store.write(ino, 0, noise(MIB)))
    deferred.go(deferred.store.close())
    writes = deferred.device.writes
    deferred.executor.settle()
    assert deferred.device.writes == writes


def test_a_new_ring_that_is_closed_at_once_is_clean(deferred: DeferredBench) -> None:
    deferred.go(deferred.store.close())
    assert deferred.open().counters.replayed_frames == 0


def test_checkpoints_and_operations_at_the_same_time(deferred: DeferredBench) -> None:
    inos = [deferred.make_file(b"file %d" % number) for number in range(3)]
    tasks = []
    for number in range(12):
        deferred.go(deferred.store.write(inos[number % 3], number * 10_000, noise(15_000, number)))
        tasks.append(deferred.begin(deferred.store.checkpoint()))
        for _ in range(number):
            deferred.executor.happen()
    deferred.executor.settle()
    assert all(task.done and task.completion.error is None for task in tasks)
    audit(deferred.store)


# -- syncs -----------------------------------------------------------------------------


def test_each_of_many_syncs_covers_what_was_answered_before_it(deferred: DeferredBench) -> None:
    syncs: list[Task[None]] = []
    for number in range(6):
        deferred.make_file(b"%d" % number)
        syncs.append(deferred.begin(deferred.store.sync()))
        for _ in range(5):
            deferred.executor.happen()
    for number, sync in enumerate(syncs):
        deferred.executor.finish(sync)
        assert {b"%d" % n for n in range(number + 1)} <= after_power_cut(deferred).keys()


def test_a_sync_without_anything_new_writes_nothing(deferred: DeferredBench) -> None:
    deferred.make_file(b"file")
    deferred.go(deferred.store.sync())
    before = deferred.device.bytes_written
    deferred.go(deferred.store.sync())
    assert deferred.device.bytes_written == before


def test_many_syncs_at_once_share_flushes(deferred: DeferredBench) -> None:
    deferred.make_file(b"file")
    before = deferred.device.flushes
    syncs = [deferred.begin(deferred.store.sync()) for _ in range(50)]
    for sync in syncs:
        deferred.executor.finish(sync)
    assert deferred.device.flushes - before <= 3


# -- a device that fails ---------------------------------------------------------------


def failing(kind: str, times: int = 1_000_000) -> Callable[[str, int, int], None]:
    left = [times]

    def fail(what: str, _address: int, _length: int) -> None:
        if what == kind and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, "the device is broken")

    return fail


def outcome(task: Task[Any]) -> int | None:
    assert task.done
    failure = task.completion.error
    assert failure is None or isinstance(failure, OSError)
    return failure.errno if failure else None


def test_a_flush_that_fails_once_fails_every_sync(deferred: DeferredBench) -> None:
    """The bytes that it was for may be lost: a later flush that succeeds proves nothing."""
    deferred.make_file(b"file")
    deferred.device.fail = failing("flush", times=1)
    syncs = [deferred.begin(deferred.store.sync()) for _ in range(4)]
    deferred.executor.settle()
    assert {outcome(sync) for sync in syncs} == {errno.EIO}
    assert deferred.error_of(deferred.store.sync()) == errno.EIO


def test_no_superblock_is_written_after_a_flush_that_failed(deferred: DeferredBench) -> None:
    deferred.make_file(b"file")
    before = superblock_writes(deferred.device)
    deferred.device.fail = failing("flush", times=1)
    checkpoint = deferred.begin(deferred.store.checkpoint())
    sync = deferred.begin(deferred.store.sync())
    deferred.executor.settle()
    assert outcome(checkpoint) == outcome(sync) == errno.EIO
    assert superblock_writes(deferred.device) == before


def superblock_writes(device: RecordingDevice) -> list[Written]:
    return [
        e for e in device.events if isinstance(e, Written) and e.address in SUPERBLOCK_ADDRESSES
    ]


@pytest.mark.parametrize("kind", ["write", "flush"])
def test_what_was_answered_survives_a_device_that_fails(deferred: DeferredBench, kind: str) -> None:
    """It stays in the operation log, and is done again on the next mount."""
    ino = deferred.make_file(b"file")
    deferred.go(deferred.store.write(ino, 0, noise(300_000)))
    deferred.device.fail = failing(kind)
    assert deferred.error_of(deferred.store.sync()) == errno.EIO
    assert deferred.error_of(deferred.store.write(ino, 0, b"more")) == errno.EIO
    assert bytes(deferred.go(deferred.store.read(ino, 0, 300_000))) == noise(300_000)
    assert deferred.error_of(deferred.store.close()) == errno.EIO
    deferred.device.fail = lambda what, address, length: None
    deferred.open()
    assert bytes(deferred.go(deferred.store.read(ino, 0, 300_000))) == noise(300_000)
    deferred.go(deferred.store.close())


def test_a_failure_is_told_to_all_who_wait(deferred: DeferredBench) -> None:
    ino = deferred.make_file(b"file")
    tasks: list[Task[Any]] = [
        deferred.begin(deferred.store.write(ino, 0, noise(MIB))),
        deferred.begin(deferred.store.sync()),
        deferred.begin(deferred.store.checkpoint()),
    ]
    deferred.device.fail = failing("write")
    deferred.executor.settle()
    assert [outcome(task) for task in tasks] == [None, errno.EIO, errno.EIO]
    assert deferred.store.failure


# -- a ring that is nearly full --------------------------------------------------------


def begin_many(bench: DeferredBench, steps: list[Step[Any]]) -> list[int | None]:
    """All at once, as requests of many clients; their outcomes."""
    tasks = [bench.begin(step) for step in steps]
    for task in tasks:
        bench.executor.finish(task)
    bench.executor.settle()
    return [outcome(task) for task in tasks]


@pytest.mark.parametrize("size", [4096, 100_000, MIB])
def test_many_writers_at_once_meet_enospc_and_nothing_worse(tmpfs: Path, size: int) -> None:
    bench = make_deferred(tmpfs, 1, new_device(segments=12))
    inos = [bench.make_file(b"%d" % number) for number in range(8)]
    count = 9 * MIB // size + 8
    steps = [
        bench.store.write(inos[number % 8], number // 8 * size, noise(size, number))
        for number in range(min(count, 400))
    ]
    outcomes = begin_many(bench, steps)
    assert bench.store.failure is None
    assert set(outcomes) <= {None, errno.ENOSPC}
    assert (errno.ENOSPC in outcomes) == (size > 4096)
    bench.go(bench.store.checkpoint())
    bench.executor.settle()
    audit(bench.store)
    content = [bytes(bench.go(bench.store.read(ino, 0, 99 * MIB))) for ino in inos]
    bench.go(bench.store.close())
    bench.open()
    assert [bytes(bench.go(bench.store.read(ino, 0, 99 * MIB))) for ino in inos] == content


def test_large_xattrs_fill_the_ring_and_nothing_worse(tmpfs: Path) -> None:
    """They are kept in the index, which has to fit into the ring twice more."""
    bench = make_deferred(tmpfs, 2, new_device(segments=12))
    inos = [bench.make_file(b"%d" % number) for number in range(300)]
    steps = [
        bench.store.set_xattr(ino, b"user.large", noise(65536, number))
        for number, ino in enumerate(inos)
    ]
    outcomes = begin_many(bench, steps)
    assert bench.store.failure is None
    assert errno.ENOSPC in outcomes
    for _ in range(6):
        bench.go(bench.store.checkpoint())
    bench.executor.settle()
    assert bench.store.failure is None
    audit(bench.store)
    for ino, result in zip(inos, outcomes, strict=True):
        value = bench.go(bench.store.xattr(ino, b"user.large"))
        assert (value is None) == (result == errno.ENOSPC)
    for number, _ in enumerate(inos):
        bench.go(bench.store.unlink(1, b"%d" % number))
    bench.go(bench.store.close())


def test_a_killed_store_that_was_nearly_full_does_all_of_it_again(tmpfs: Path) -> None:
    """The operations in the log were admitted once; what was half written must not stand
    in their way."""
    for seed in range(12):
        directory = tmpfs / str(seed)
        directory.mkdir()
        bench = make_deferred(directory, seed, new_device(segments=12))
        inos = [bench.make_file(b"%d" % number) for number in range(2)]
        for number in range(16):
            task = bench.begin(bench.store.write(inos[number % 2], number // 2 * MIB, noise(MIB)))
            bench.executor.finish(task)
            if outcome(task) == errno.ENOSPC:
                break
        sizes = [bench.go(bench.store.node(ino)).inode.size for ino in inos]
        bench.executor.stops()
        bench.open()
        bench.executor.settle()
        assert bench.store.failure is None
        assert [bench.go(bench.store.node(ino)).inode.size for ino in inos] == sizes
        bench.go(bench.store.sync())
        bench.go(bench.store.close())


# -- reads and the writer --------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_overwritten_at_once_needs_no_more_space_than_before(
    tmpfs: Path, seed: int
) -> None:
    """More is written over than is free: what is replaced is free once that is in the ring."""
    bench = make_deferred(tmpfs, seed, new_device(segments=32))
    inos = []
    while bench.store.usage().free > bench.store.usage().total // 7:
        inos.append(bench.make_file(b"%d" % len(inos)))
        bench.go(bench.store.write(inos[-1], 0, noise(400_000, len(inos))))
        bench.go(bench.store.sync())
    for round_number in range(3):
        outcomes = begin_many(
            bench, [bench.store.write(ino, 0, noise(400_000, ino + round_number)) for ino in inos]
        )
        assert set(outcomes) == {None}, "each was answered"
    bench.go(bench.store.sync())
    audit(bench.store)


def test_a_read_that_waits_sees_the_file_as_it_is_then(deferred: DeferredBench) -> None:
    """Its extents may be freed and their segment written over before the device answers."""
    ino = deferred.make_file(b"file")
    deferred.go(deferred.store.write(ino, 0, noise(300_000, 1)))
    deferred.go(deferred.store.checkpoint())
    deferred.go(deferred.store.close())
    deferred.open()
    deferred.executor.settle()
    reading = deferred.begin(deferred.store.read(ino, 0, 300_000))
    assert not reading.done
    deferred.go(deferred.store.write(ino, 0, noise(300_000, 2)))
    other = deferred.make_file(b"other")
    for number in range(24):
        deferred.go(deferred.store.write(other, 0, noise(MIB, number)))
        deferred.go(deferred.store.checkpoint())
    deferred.executor.finish(reading)
    assert bytes(reading.completion.result()) == noise(300_000, 2)


def test_a_file_that_is_gone_before_its_batches_are_placed_is_counted_right(
    deferred: DeferredBench,
) -> None:
    """What it takes on the device is part of each state that a power cut may leave."""
    bench, ino = deferred, deferred.make_file(b"file")
    bench.go(bench.store.sync())
    before = len(bench.device.events)
    for change in (
        bench.store.write(ino, 0, noise(300_000)),
        bench.store.set_attributes(ino, size=1000),
        bench.store.write(ino, 0, noise(50_000)),
        bench.store.unlink(1, b"file"),
    ):
        assert bench.begin(change).done, "no batch has its place yet"
        bench.begin(bench.store.sync())
    bench.executor.settle()
    assert bench.store.failure is None
    for moment in range(before, len(bench.device.events) + 1):
        store = bench.open_image(bench.device.image_after(moment, everything_survives))
        run(store.sync())
        audit(store)


def test_what_changed_since_is_not_undone_when_a_batch_is_committed(
    deferred: DeferredBench,
) -> None:
    """A name, an xattr and bytes that are on their way to the ring change once more."""
    ino = deferred.make_file(b"gone")
    other = deferred.make_file(b"other")
    deferred.go(deferred.store.set_xattr(other, b"user.x", b"old"))
    deferred.go(deferred.store.write(ino, 0, b"old"))
    deferred.go(deferred.store.write(other, 0, b"old"))
    sync = deferred.begin(deferred.store.sync())
    deferred.go(deferred.store.unlink(1, b"gone"))
    deferred.go(deferred.store.set_xattr(other, b"user.x", b"new"))
    deferred.go(deferred.store.write(other, 0, b"new"))
    while not sync.done:
        assert deferred.executor.happen()
        assert deferred.names_now() == [b"other"]
        assert deferred.go(deferred.store.xattr(other, b"user.x")) == b"new"
        assert bytes(deferred.go(deferred.store.read(other, 0, 9))) == b"new"
        assert deferred.error_of(deferred.store.node(ino)) == errno.ENOENT


def test_dirty_sealed_and_stored_bytes_are_read_as_one(deferred: DeferredBench) -> None:
    """While batches are encoded, placed, written and committed, in any order."""
    ino = deferred.make_file(b"file")
    expected = bytearray(400_000)
    random = Random(5)
    deferred.go(deferred.store.write(ino, 0, bytes(expected)))
    for number in range(60):
        offset, size = random.randrange(390_000), random.randrange(1, 10_000)
        data = noise(size, number)
        deferred.go(deferred.store.write(ino, offset, data))
        expected[offset : offset + size] = data
        del expected[400_000:]
        if number % 4 == 0:
            deferred.begin(deferred.store.sync())
        for _ in range(random.randrange(6)):
            deferred.executor.happen()
        assert bytes(deferred.go(deferred.store.read(ino, 0, 400_000))) == expected


def test_frames_lie_where_the_ring_is(deferred: DeferredBench) -> None:
    """No write outside of the superblock slots and the segments."""
    ino = deferred.make_file(b"file")
    for number in range(16):
        deferred.go(deferred.store.write(ino, number * MIB // 2, noise(MIB // 2, number)))
    deferred.go(deferred.store.close())
    for event in deferred.device.events:
        if isinstance(event, Written):
            assert event.address in SUPERBLOCK_ADDRESSES or event.address >= DATA_START


def test_the_latency_of_each_frame_is_counted_by_the_unit_if_it_is_longer(
    deferred: DeferredBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that takes 1 ms, and 2 ms for each MiB. A ring this small has no long frames."""
    now, lengths, unit = [0.0], list[int](), MIB // 8

    def took(kind: str, address: int, length: int) -> None:
        if kind == "write" and address >= DATA_START:
            now[0] += 0.001 + 0.002 * length / MIB
            lengths.append(length)

    monkeypatch.setattr("kvfs.engine.appender._LATENCY_UNIT", unit)
    monkeypatch.setattr("kvfs.engine.appender.time.perf_counter", lambda: now[0])
    deferred.device.fail = took
    before = deferred.store.counters.frames
    for number, size in enumerate((5000, 4 * MIB)):
        ino = deferred.make_file(b"file%d" % number)
        deferred.go(deferred.store.write(ino, 0, noise(size, number)))
        deferred.go(deferred.store.sync())
    seen = deferred.store.write_latencies
    assert sum(seen.counts) == len(lengths) == deferred.store.counters.frames - before
    assert max(lengths) > unit > min(lengths)
    each = [(0.001 + 0.002 * length / MIB) / max(1, length / unit) for length in lengths]
    assert seen.total == pytest.approx(sum(each))


def test_a_frame_that_could_not_be_written_has_no_latency(deferred: DeferredBench) -> None:
    deferred.go(deferred.store.sync())
    before = sum(deferred.store.write_latencies.counts)
    deferred.device.fail = lambda kind, address, length: fail(kind == "write")
    ino = deferred.make_file(b"file")
    deferred.go(deferred.store.write(ino, 0, noise(5000)))
    assert deferred.error_of(deferred.store.sync()) == errno.EIO
    assert sum(deferred.store.write_latencies.counts) == before


def fail(does: bool) -> None:
    if does:
        raise OSError(errno.EIO, "the device fails")


def test_what_goes_to_the_ring_as_it_lies_takes_no_memory(tmpfs: Path) -> None:
    if encrypted.by_option is not None:
        pytest.skip("all of it is enciphered")
    bench = Bench(tmpfs)
    arenas = bench.store._writer._arenas
    for choice, is_used in ((b"none", False), (b"zstd", True)):
        ino = bench.make(choice)
        run(bench.store.set_xattr(ino, b"user.kvfs.codec", choice))
        bench.write(ino, bytes(MIB))
        run(bench.store.sync())
        assert bool(arenas._idle) == is_used


def test_a_probe_of_the_codec_is_the_largest_extent_alone(tmpfs: Path) -> None:
    bench = Bench(tmpfs)
    inos = [bench.make(b"%d" % number) for number in range(3)]
    for ino, size in zip(inos, (50_000, 100_000, 70_000), strict=True):
        bench.write(ino, bytes(size))
    run(bench.store.sync())
    found = [run(bench.store.extents(ino, 0, MIB)) for ino in inos]
    assert [extent.codec != Codec.NONE for (extent,) in found] == [False, True, False]

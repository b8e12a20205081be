"""A device that fails, or does not answer, and what is known of it when it is back."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from kvfs.engine import failover as failover_module
from kvfs.engine.format import BLOCK
from kvfs.engine.io import run
from kvfs.engine.writeback import EncodeBatch
from tests.crash.machine import Clock
from tests.engine.audit import audit
from tests.engine.deferred import DeferredExecutor
from tests.engine.kit import MIB, OPTIONS, Bench, new_device, noise
from tests.engine.test_writer import (
    DeferredBench,
    after_power_cut,
    failing,
    make_deferred,
    outcome,
)
from tests.support.devices import nothing_survives


class HangingExecutor(DeferredExecutor):
    """Work for which `hangs` is true is not done."""

    hangs: Callable[[Any], bool] = staticmethod(lambda call: False)

    def happen(self) -> bool:
        asked = self._asked
        self._asked = [work for work in asked if not self.hangs(work.call)]
        stuck = [work for work in asked if self.hangs(work.call)]
        try:
            return super().happen()
        finally:
            self._asked = [*stuck, *self._asked]


def needs_device(call: Any) -> bool:
    return not isinstance(call, EncodeBatch)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with patch.object(failover_module, "time", clock):
        yield clock


@pytest.fixture(params=range(4))
def shadowed(tmpfs: Path, clock: Clock, request: pytest.FixtureRequest) -> DeferredBench:
    device = new_device()
    bench = DeferredBench(
        tmpfs,
        device,
        make_executor=lambda: HangingExecutor(device, Random(request.param)),
        options=replace(OPTIONS, shadow=4 * MIB),
    )
    bench.executor.settle()
    return bench


def look(bench: DeferredBench, clock: Clock, seconds: float = 40) -> None:
    clock.now += seconds
    bench.store.look()
    bench.executor.settle()


def test_a_device_that_does_not_answer_has_failed_and_nothing_more_is_asked_of_it(
    shadowed: DeferredBench, clock: Clock
) -> None:
    bench = shadowed
    executor = bench.executor
    assert isinstance(executor, HangingExecutor)
    ino = bench.make_file(b"file")
    bench.go(bench.store.write(ino, 0, noise(300_000, 1)))
    sync = bench.begin(bench.store.sync())
    executor.settle()
    assert sync.done
    bench.go(bench.store.write(ino, 0, noise(300_000, 2)))
    executor.hangs = needs_device
    waits = bench.begin(bench.store.sync())
    executor.settle()
    look(bench, clock, seconds=20)
    assert not waits.done and bench.store.failure is None
    look(bench, clock, seconds=20)
    assert outcome(waits) == errno.EIO
    assert "no answer within 30 s" in str(bench.store.failure)
    asked = len(executor.asked_for)
    for number in range(5):
        bench.go(bench.store.write(ino, 300_000 + number * 1000, noise(1000, number)))
        assert bench.error_of(bench.store.sync()) == errno.EIO
        look(bench, clock)
    assert len(executor.asked_for) == asked
    assert bytes(bench.go(bench.store.read(ino, 0, 300_000))) == noise(300_000, 2)

    executor.hangs = lambda call: False
    executor.settle()
    assert bench.store.failure is not None, "what it did late proves nothing"
    look(bench, clock)
    assert bench.store.failure is None
    bench.go(bench.store.sync())
    assert bench.store.failover.used == 0
    expected = noise(300_000, 2) + b"".join(noise(1000, number) for number in range(5))
    assert after_power_cut(bench) == {b"file": expected}
    audit(bench.store)


def test_a_flush_that_ends_well_beside_a_failure_proves_nothing(
    shadowed: DeferredBench, clock: Clock
) -> None:
    """The reset that failed the other call may have emptied the cache before it."""
    bench = shadowed
    executor = bench.executor
    assert isinstance(executor, HangingExecutor)
    ino = bench.make_file(b"file")
    bench.go(bench.store.write(ino, 0, noise(100_000, 1)))
    executor.hangs = lambda call: call == bench.device.flush
    first = bench.begin(bench.store.sync())
    executor.settle()
    flushed = bench.store._appender.ring.flushed
    bench.device.fail = failing("write")
    bench.go(bench.store.write(ino, 100_000, noise(100_000, 2)))
    second = bench.begin(bench.store.sync())
    executor.settle()
    assert outcome(first) == outcome(second) == errno.EIO
    executor.hangs = lambda call: False
    executor.settle()
    assert bench.store._appender.ring.flushed == flushed
    bench.device.lose_unflushed(nothing_survives)
    bench.device.fail = lambda kind, address, length: None
    look(bench, clock)
    bench.go(bench.store.sync())
    assert after_power_cut(bench) == {b"file": noise(100_000, 1) + noise(100_000, 2)}


def test_only_the_shadow_is_filled_and_removing_goes_a_little_further(
    shadowed: DeferredBench, clock: Clock
) -> None:
    bench = shadowed
    ino = bench.make_file(b"file")
    names = [b"%d" % number for number in range(20)]
    for name in names:
        bench.make_file(name)
    bench.go(bench.store.sync())
    bench.device.fail = failing("write")
    bench.go(bench.store.write(ino, 0, b"noticed"))
    assert bench.error_of(bench.store.sync()) == errno.EIO
    outcomes = [
        bench.error_of(bench.store.write(ino, number * MIB // 2, noise(MIB // 2, number)))
        for number in range(10)
    ]
    assert outcomes == [None] * 7 + [errno.ENOSPC] * 3
    small = 0
    while bench.error_of(bench.store.write(ino, 0, noise(30_000))) is None:
        small += 1
    assert 10 < small < 40
    for name in names:
        bench.go(bench.store.unlink(1, name))
    bench.device.fail = lambda kind, address, length: None
    look(bench, clock)
    bench.go(bench.store.sync())
    assert bench.names_now() == [b"file"]
    assert bench.error_of(bench.store.write(ino, 0, noise(MIB))) is None


def test_an_older_copy_of_the_ring_is_not_taken_for_it(
    shadowed: DeferredBench, clock: Clock
) -> None:
    """Its superblocks are the same; the last frame that had been flushed is not there."""
    bench = shadowed
    ino = bench.make_file(b"file")
    copy = bytes(bench.device.image)
    bench.go(bench.store.write(ino, 0, noise(100_000)))
    bench.go(bench.store.sync())
    bench.device.fail = failing("flush")
    bench.go(bench.store.write(ino, 0, b"more"))
    assert bench.error_of(bench.store.sync()) == errno.EIO
    bench.device.image[:] = copy
    bench.device.fail = lambda kind, address, length: None
    for _ in range(3):
        look(bench, clock)
    assert bench.store.failover.gave_up
    assert bytes(bench.device.image) == copy, "nothing is written to it"
    assert bench.error_of(bench.store.sync()) == errno.EIO


def test_nothing_is_asked_of_a_device_that_is_away_after_the_end(
    shadowed: DeferredBench, clock: Clock
) -> None:
    bench = shadowed
    ino = bench.make_file(b"file")
    bench.device.fail = failing("write")
    assert bench.error_of(bench.store.sync()) == errno.EIO
    bench.go(bench.store.write(ino, 0, noise(100_000)))
    assert bench.error_of(bench.store.close()) == errno.EIO
    bench.device.fail = lambda kind, address, length: None
    before = bytes(bench.device.image)
    look(bench, clock)
    assert bytes(bench.device.image) == before
    bench.open()
    assert bytes(bench.go(bench.store.read(ino, 0, 100_000))) == noise(100_000)


# -- reads that fail -----------------------------------------------------------------------


def bad_at(start: int, end: int) -> Callable[[str, int, int], None]:
    def fail(kind: str, address: int, length: int) -> None:
        if kind == "read" and address < end and address + length > start:
            raise OSError(errno.EIO, "a bad place")

    return fail


def test_who_waits_for_what_is_read_ahead_is_not_failed_by_a_bad_place_beside_it(
    tmpfs: Path,
) -> None:
    bench = make_deferred(tmpfs, 1)
    ino = bench.make_file(b"file")
    bench.go(bench.store.set_xattr(ino, b"user.kvfs.codec", b"none"))
    bench.go(bench.store.write(ino, 0, noise(500_000)))
    bench.go(bench.store.close())
    bench.open()
    extents = bench.go(bench.store.extents(ino, 0, 500_000))
    assert len(extents) > 2
    first, bad = extents[:2]
    bench.device.fail = bad_at(bad.address, bad.address + BLOCK)
    behind = first.size + bad.size
    for offset, size in ((0, first.size), (behind, 500_000 - behind)):
        bench.store.reader.read_ahead(extents, 99)
        read = bench.begin(bench.store.read(ino, offset, size))
        bench.executor.finish(read)
        assert bytes(read.completion.result()) == noise(500_000)[offset : offset + size]
    assert bench.store.reader.errors.device == 1
    assert bench.error_of(bench.store.read(ino, 0, 500_000)) == errno.EIO
    bench.device.fail = lambda kind, address, length: None
    whole = bench.go(bench.store.read(ino, 0, 500_000))
    assert bytes(whole) == noise(500_000), "who asks again asks the device"


def test_a_segment_with_a_bad_place_is_not_cleaned_and_everything_else_goes_on(
    bench: Bench,
) -> None:
    names = [b"%d" % number for number in range(40)]
    for number, name in enumerate(names):
        bench.write(bench.make(name), noise(100_000, number))
    run(bench.store.sync())
    for name in names:
        if int(name) % 4:
            run(bench.store.unlink(1, name))
    for _ in range(2):
        run(bench.store.checkpoint())
    ring = bench.store._appender.ring
    victim = ring.victim()
    assert victim is not None
    start = ring.geometry.address(victim)
    bench.device.fail = bad_at(start, start + MIB)
    run(bench.store.clean())
    assert bench.store.failure is None
    assert ring.unmovable == {victim}
    bench.write(bench.make(b"new"), noise(100_000, 3))
    run(bench.store.checkpoint())
    bench.device.fail = lambda kind, address, length: None
    for name in names[::4]:
        assert bench.read(bench.find(name)) == noise(100_000, int(name))
    audit(bench.store)

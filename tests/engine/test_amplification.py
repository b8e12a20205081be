"""How much is written on the device for what was written to files.

A model of 32 layers appends 4 KiB to each layer file a step; a turn has 64 steps and
ends with a sync. The recording device counts every byte, superblocks included.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.engine.format import DATA_START
from kvfs.engine.io import run
from tests.engine.deferred import DeferredExecutor
from tests.engine.kit import DIRECTORY, FILE, MIB, Bench, new_device, noise
from tests.engine.test_writer import DeferredBench
from tests.support.devices import Written

LAYERS, STEPS, TURNS, APPEND = 32, 64, 4, 4096
PAYLOAD = LAYERS * STEPS * APPEND  # of a turn
LIMIT = 1.1


def append_turns(bench: Bench) -> None:
    """Incompressible data: what a codec saves must not hide what else is written."""
    session = bench.make(b"session", mode=DIRECTORY)
    layers = [bench.make(b"layer.%03d" % n, session, FILE) for n in range(LAYERS)]
    for turn in range(TURNS):
        for step in range(STEPS):
            at = (turn * STEPS + step) * APPEND
            for layer in layers:
                bench.write(layer, noise(APPEND, at + layer), at)
        run(bench.store.sync())


@pytest.fixture
def large(tmpfs: Path) -> Bench:
    return Bench(tmpfs, new_device(segments=16, segment_size=8 * MIB))


def test_small_appends_reach_the_device_as_large_frames(large: Bench) -> None:
    """Without the checkpoint: all that the syncs of the turns wrote."""
    append_turns(large)
    assert large.device.bytes_written <= LIMIT * TURNS * PAYLOAD
    assert large.device.bytes_written >= TURNS * PAYLOAD
    assert large.store.counters.payload_written == TURNS * PAYLOAD
    assert large.store.counters.frames <= 4 * TURNS


def test_the_checkpoint_at_the_end_is_included(large: Bench) -> None:
    append_turns(large)
    run(large.store.close())
    assert large.device.bytes_written <= LIMIT * TURNS * PAYLOAD


def test_a_sync_writes_each_byte_once_with_writes_in_flight(tmpfs: Path) -> None:
    """As in a mount, where batches are sealed while others are on their way."""
    device = new_device(segments=16, segment_size=8 * MIB)
    bench = DeferredBench(tmpfs, device, make_executor=lambda: DeferredExecutor(device))
    bench.executor.settle()
    layers = [bench.make_file(b"layer.%03d" % n) for n in range(LAYERS)]
    for turn in range(TURNS):
        for step in range(STEPS):
            at = (turn * STEPS + step) * APPEND
            for layer in layers:
                bench.go(bench.store.write(layer, at, noise(APPEND, at + layer)))
            bench.executor.happen()
        bench.go(bench.store.sync())
    assert bench.device.bytes_written <= LIMIT * TURNS * PAYLOAD


def test_what_is_told_is_what_was_written(large: Bench) -> None:
    """The counters that an operator sees are those of the device, but for superblocks."""
    append_turns(large)
    outside = sum(
        len(event.data)
        for event in large.device.events
        if isinstance(event, Written) and event.address < DATA_START
    )
    assert large.store.counters.device_written == large.device.bytes_written - outside

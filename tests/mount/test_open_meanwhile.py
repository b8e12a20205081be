"""Opening a file while its session is being reclaimed: it stays whole, or cannot be opened."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from kvfs.engine import appender as appender_module
from kvfs.engine import checkpoints as checkpoints_module
from kvfs.engine import reclaim as reclaim_module
from kvfs.engine import store as store_module
from kvfs.engine import writer as writer_module
from kvfs.engine.io import run
from kvfs.mount.config import MountConfig
from kvfs.mount.control import Mounted
from kvfs.mount.fuse import Filesystem
from kvfs.mount.protocol import Call
from kvfs.mount.scrubbing import Scrubbing
from kvfs.tiers.budget import Budget
from kvfs.tiers.migrate import Migration
from kvfs.tiers.planner import Planner
from kvfs.tiers.policy import LRU
from kvfs.tiers.predict import PredictOptions, Predictor
from kvfs.tiers.prefetch import LookAhead
from kvfs.tiers.sessions import WarmSessions
from kvfs.tiers.uses import Uses
from tests.crash.machine import Clock
from tests.engine.deferred import DeferredExecutor
from tests.engine.kit import DIRECTORY, MIB, Bench, new_device, noise

SESSIONS = 6


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    patches = [
        patch.object(module, "time", clock)
        for module in (
            reclaim_module,
            store_module,
            appender_module,
            checkpoints_module,
            writer_module,
        )
    ]
    for each in patches:
        each.start()
    yield clock
    for each in patches:
        each.stop()


def filesystem(bench: Bench, executor: DeferredExecutor) -> Filesystem:
    store = bench.store
    migration = Migration(store, bench.warm, executor)
    planner = Planner(
        WarmSessions(migration), Predictor(PredictOptions()), Budget(), 10, executor.spawn,
        lambda: False, lambda: 0,
    )  # fmt: skip
    config = MountConfig(bench.directory, bench.directory, bench.directory)
    uses = Uses(LRU(), lambda: 0.0)
    mounted = Mounted(store, migration, planner, uses, config, False, False)
    scrubbing = Scrubbing(store, config.scrub, lambda: False)
    look_ahead = LookAhead(store, MIB)
    return Filesystem(
        store, look_ahead, migration, planner, uses, scrubbing, mounted, executor.submit
    )


@pytest.mark.parametrize("seed", range(12))
def test_what_could_be_opened_can_be_read(tmp_path: Path, clock: Clock, seed: int) -> None:
    device = new_device(segments=32)
    executor = DeferredExecutor(device, Random(seed))
    bench = Bench(tmp_path, device)
    layers = []
    for number in range(SESSIONS):
        session = bench.make(b"session-%d" % number, mode=DIRECTORY)
        bench.make(b"session.json", session)
        layers.append(bench.make(b"layer.000", session))
        bench.write(layers[-1], noise(100_000, number))
        run(bench.store.set_xattr(session, b"user.kvfs.ttl", b"50"))
    run(bench.store.close())
    bench.make_executor = lambda: executor
    store = bench.open()
    executor.settle()
    served = filesystem(bench, executor)
    calls = [Call(ino, 0, 0, os.getpid()) for ino in layers]
    for call in calls:
        executor.run(served.getattr(call))
        store.pin(call.inode)  # the kernel knows it
    clock.now += 100
    ticking = executor.begin(store.tick())
    for _ in range(seed):
        executor.happen()
    opening = [executor.begin(served.open(call, os.O_RDONLY, False)) for call in calls]
    executor.finish(ticking)
    executor.settle()
    for call, task in zip(calls, opening, strict=True):
        if task.completion.error is None:
            (handle,) = struct.unpack_from("<Q", task.completion.result())
            assert len(executor.run(served.read(call, handle, 0, 200_000))) == 100_000
        else:
            assert isinstance(task.completion.error, OSError)
            assert task.completion.error.errno == errno.ENOENT
            assert call.inode not in store.units.opened

"""What lost its last name while it was open, and was open when the daemon was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.engine.format import ROOT_INODE
from kvfs.engine.io import run
from tests.engine.deferred import DeferredExecutor
from tests.engine.kit import Bench


@pytest.mark.parametrize("seed", range(8))
def test_all_of_it_is_dropped_though_some_is_dropped_by_others_meanwhile(
    tmpfs: Path, seed: int
) -> None:
    bench = Bench(tmpfs)
    files = [bench.make(b"%03d" % number * 60) for number in range(200)]
    held = [files[0], files[100], files[199]]
    for ino in held:
        bench.store.pin(ino)

    def remove(number: int) -> None:
        run(bench.store.unlink(ROOT_INODE, b"%03d" % number * 60))

    remove(0)
    remove(199)
    run(bench.store.checkpoint())
    remove(100)  # the operation log alone knows of it
    bench.make_executor = lambda: DeferredExecutor(bench.device)
    bench.open()
    executor = bench.store._executor
    assert isinstance(executor, DeferredExecutor)
    executor.random.seed(seed)
    for _ in range(seed):
        executor.happen()
    executor.run(bench.store.drop_free())
    executor.settle()
    assert bench.store.usage().inodes == 1 + len(files) - len(held)

"""Row 4: one random layer of 256 KiB, its file open, nothing of it in any memory: p50, p99.

Sessions of 32 layers, all their files open; the layers are read in random order over all
sessions, each once, in batches that take turns with as many random reads of a raw file. Sessions
and raw file are new in each round: neither was read before.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.bench.disk import direct, drop_caches, fio_latency, pwritev, touched
from scripts.bench.layers import check, close_all, cut, layer_paths, noise, open_all, save
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, cost_row

LAYERS, LAYER_SIZE = 32, 256 << 10
BATCH = 100


@dataclass(frozen=True, slots=True)
class Latency:
    """In ms."""

    p50: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Latency:
        return cls(float(np.percentile(samples, 50)), float(np.percentile(samples, 99)))


@dataclass(frozen=True, slots=True)
class Round:
    """`from_memory`: how many layers were found in the daemon's warm memory."""

    raw: Latency
    fio: Latency
    ours: Latency
    from_memory: int


def measure(plan: Plan) -> list[Row]:
    sessions = plan.pick(40, 12)
    data = noise(sessions * LAYERS * LAYER_SIZE)
    with fresh_mount(plan.directory, "8G") as mount:
        raw_file = plan.directory / "raw"
        rounds = [one_round(mount, raw_file, data) for _ in range(plan.rounds + 1)][1:]
    count = sessions * LAYERS
    found = max(r.from_memory for r in rounds)
    what = f"{count} samples a round, each layer read once; from warm memory at most {found}"
    return [
        cost_row(
            "4a", "one random layer of 256 KiB, file open, cold: p50", 2.2,
            Series("KVFS", [r.ours.p50 for r in rounds]),
            Series("raw p50", [r.raw.p50 for r in rounds]),
            unit="ms", peers=[Series("fio p50", [r.fio.p50 for r in rounds])], remark=what,
        ),
        cost_row(
            "4b", "  p99", 2.5,
            Series("KVFS", [r.ours.p99 for r in rounds]),
            Series("raw p99", [r.raw.p99 for r in rounds]),
            unit="ms", peers=[Series("fio p99", [r.fio.p99 for r in rounds])],
        ),
    ]  # fmt: skip


def one_round(mount: Mount, raw_file: Path, data: memoryview) -> Round:
    layers = cut(data, LAYER_SIZE)
    sessions = [mount.point / f"session-{n:02}" for n in range(len(layers) // LAYERS)]
    paths = [path for session in sessions for path in layer_paths(session, LAYERS)]
    for session in sessions:
        session.mkdir()
    pwritev(raw_file, len(data))
    save(paths, layers)
    fds = open_all(paths)
    mount.make_cold(*sessions)
    before = mount.stats()["warm"]["hits"]
    raw, ours = _take_turns(raw_file, fds, layers)
    from_memory = mount.stats()["warm"]["hits"] - before
    close_all(fds)
    drop_caches()
    fio = Latency(*fio_latency(raw_file, len(data), LAYER_SIZE, len(layers)))
    raw_file.unlink()
    for session in sessions:
        shutil.rmtree(session)
    return Round(Latency.of(raw), fio, Latency.of(ours), from_memory)


def _take_turns(
    raw_file: Path, fds: Sequence[int], layers: Sequence[memoryview]
) -> tuple[list[float], list[float]]:
    """Milliseconds of each read of the raw file and of a layer."""
    buffer = touched(LAYER_SIZE)
    raw: list[float] = []
    ours: list[float] = []
    with direct(raw_file) as fd:
        blocks, order = (random.sample(range(len(layers)), len(layers)) for _ in range(2))
        for start in range(0, len(layers), BATCH):
            for block in blocks[start : start + BATCH]:
                raw.append(_read_ms(fd, block * LAYER_SIZE, buffer))
            for layer in order[start : start + BATCH]:
                ours.append(_read_ms(fds[layer], 0, buffer))
                check(buffer, layers[layer])
    return raw, ours


def _read_ms(fd: int, offset: int, buffer: memoryview) -> float:
    started = time.perf_counter()
    count = os.preadv(fd, [buffer], offset)
    elapsed = time.perf_counter() - started
    if count != len(buffer):
        raise SystemExit("short read")
    return 1000 * elapsed

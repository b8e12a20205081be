"""Row 7: decoding: 8 sessions x 32 layers x 4 KiB a step, an fsync each turn of 64 steps.

The sessions take turns, step by step; a step is the 32 writes of one session. What is written for
it is counted when all have called fsync, before anything was packed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.bench.disk import pwritev
from scripts.bench.layers import check, close_all, layer_paths, noise
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, cost_row

SESSIONS, LAYERS, STEPS, WRITE_SIZE = 8, 32, 64, 4096
TURN_SIZE = STEPS * SESSIONS * LAYERS * WRITE_SIZE


@dataclass(slots=True)
class Times:
    """In ms: of each step, and of the fsyncs of all sessions at the end of each turn."""

    steps: list[float] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Round:
    """`device` and `payload` in bytes; the others in ms, `raw_sync` of as many bytes as a turn
    appends, written and flushed."""

    device: int
    payload: int
    p50: float
    p99: float
    sync: float
    raw_sync: float
    checkpoints: int


def measure(plan: Plan) -> list[Row]:
    turns = plan.pick(8, 2)
    data = noise(TURN_SIZE)
    with fresh_mount(plan.directory, "16G") as mount:
        rounds = [
            _one_round(mount, plan.directory / "raw", n, turns, data)
            for n in range(plan.rounds + 1)
        ][1:]
    steps = turns * STEPS * SESSIONS
    checkpoints = sum(r.checkpoints for r in rounds)
    return [
        cost_row(
            "7a", "appends, 8 sessions x 32 layers x 4 KiB: written to the device", 1.1,
            Series("KVFS", [r.device for r in rounds]),
            Series("payload", [r.payload for r in rounds]),
            unit="bytes", remark=f"{checkpoints} checkpoints among it",
        ),
        cost_row(
            "7b", "  p99 of a step (32 writes) without fsync", 2,
            Series("KVFS", [r.p99 for r in rounds]),
            Series("median of a step", [r.p50 for r in rounds]),
            unit="ms", remark=f"{steps} steps a round",
        ),
        cost_row(
            "7c", "  the fsyncs of a turn, one a session", None,
            Series("KVFS", [r.sync for r in rounds]),
            Series("64 MiB raw, written and flushed", [r.raw_sync for r in rounds]),
            unit="ms",
        ),
    ]  # fmt: skip


def _one_round(mount: Mount, raw: Path, number: int, turns: int, data: memoryview) -> Round:
    sessions = [mount.point / f"{number}-{session}" for session in range(SESSIONS)]
    for session in sessions:
        session.mkdir()
    before = mount.stats()["counters"]
    times = _append(sessions, turns, data)
    after = mount.stats()["counters"]
    device, checkpoints = (after[name] - before[name] for name in ("device_written", "checkpoints"))
    _verify(sessions, turns, data)
    raw_sync = 1000 * TURN_SIZE / 1e6 / pwritev(raw, TURN_SIZE)
    raw.unlink()
    p50, p99 = np.percentile(times.steps, [50, 99])
    sync = float(np.median(times.syncs))
    return Round(device, turns * TURN_SIZE, float(p50), float(p99), sync, raw_sync, checkpoints)


def _append(sessions: Sequence[Path], turns: int, data: memoryview) -> Times:
    times = Times()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    fds = [[os.open(path, flags, 0o600) for path in layer_paths(s, LAYERS)] for s in sessions]
    for _ in range(turns):
        at = 0
        for _ in range(STEPS):
            for layers in fds:
                started = time.perf_counter()
                for fd in layers:
                    os.write(fd, data[at : at + WRITE_SIZE])
                    at += WRITE_SIZE
                times.steps.append(1000 * (time.perf_counter() - started))
        started = time.perf_counter()
        for layers in fds:
            os.fsync(layers[0])
        times.syncs.append(1000 * (time.perf_counter() - started))
    for layers in fds:
        close_all(layers)
    return times


def _verify(sessions: Sequence[Path], turns: int, data: memoryview) -> None:
    written = np.frombuffer(data, np.uint8).reshape(STEPS, SESSIONS, LAYERS, WRITE_SIZE)
    for number, session in enumerate(sessions):
        for layer, path in enumerate(layer_paths(session, LAYERS)):
            expected = written[:, number, layer].tobytes() * turns
            check(memoryview(path.read_bytes()), memoryview(expected))

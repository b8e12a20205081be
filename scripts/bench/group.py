"""Row 15: a group of ten sessions (87 MB), all dirty, down to the ring, and up again.

Down by `user.kvfs.demote`: they are in the ring and their memory is given up. Up by
`user.kvfs.prefetch`, until all of it can be mapped. Once with all of the disk's bandwidth, once
with 500 MB/s of it, as a throttled disk shows what is not bound by the processor.

Write-back begins at once. So that most of the group is still dirty when it goes down, the disk is
held back while it is written. What counts is what was dirty; it is said in the remark.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.bench import mapped
from scripts.bench.disk import read_limit, speed, write_limit
from scripts.bench.layers import check, cut, layer_paths, noise
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, speed_row
from scripts.bench.throttle import Throttle, throttle

SESSIONS, LAYERS, LAYER_SIZE = 10, 30, 290_000
SIZE = SESSIONS * LAYERS * LAYER_SIZE
HELD_BACK = 50  # MB/s
THROTTLED = 500  # MB/s


@dataclass(frozen=True, slots=True)
class Round:
    """MB/s; `dirty` in bytes, when it went down."""

    raw_write: float
    raw_read: float
    down: float
    up: float
    dirty: int


def measure(plan: Plan) -> list[Row]:
    data = noise(SIZE)
    with throttle(plan.directory) as disk, fresh_mount(plan.directory, "8G") as mount:
        raw = plan.directory / "raw"
        free, throttled = (
            [_one_round(mount, raw, disk, mb_s, data) for _ in range(plan.rounds + 1)][1:]
            for mb_s in (0, THROTTLED if disk.works else 0)
        )
    what = f", disk at {THROTTLED} MB/s"
    rows = _rows("15a", "15b", "", 0.8, free)
    return rows + _rows("15c", "15d", what, None, throttled) if disk.works else rows


def _rows(
    down: str, up: str, condition: str, share: float | None, rounds: Sequence[Round]
) -> list[Row]:
    dirty = min(r.dirty for r in rounds) / 1e6
    return [
        speed_row(
            down, f"group of 10 sessions down{condition}", share,
            Series("KVFS", [r.down for r in rounds]),
            Series("raw write", [r.raw_write for r in rounds]),
            remark=f"at least {dirty:.0f} of {SIZE / 1e6:.0f} MB were dirty",
        ),
        speed_row(
            up, f"group up, until it can be mapped{condition}", share,
            Series("KVFS", [r.up for r in rounds]),
            Series("raw read", [r.raw_read for r in rounds]),
        ),
    ]  # fmt: skip


def _one_round(
    mount: Mount, raw_file: Path, disk: Throttle, mb_s: float, data: memoryview
) -> Round:
    disk.limit_both(mb_s)
    raw_write, raw_read = write_limit(raw_file, SIZE), read_limit(raw_file, SIZE)
    raw_file.unlink()
    sessions = [mount.point / f"session-{n}" for n in range(SESSIONS)]
    disk.limit("write", HELD_BACK)
    _write(sessions, data)
    dirty = int(mount.stats()["unsaved"])
    disk.limit("write", mb_s)
    down = speed(dirty, lambda: _tell(sessions, "demote"))
    up, parts = _bring_up(sessions)
    _verify(parts, data)
    for session in sessions:
        shutil.rmtree(session)
    return Round(raw_write, raw_read, down, up, dirty)


def _write(sessions: Sequence[Path], data: memoryview) -> None:
    layers = iter(cut(data, LAYER_SIZE))
    for session in sessions:
        session.mkdir()
        for path in layer_paths(session, LAYERS):
            path.write_bytes(next(layers))


def _tell(sessions: Sequence[Path], what: str) -> None:
    for session in sessions:
        os.setxattr(session, f"user.kvfs.{what}", b"1")


def _bring_up(sessions: Sequence[Path]) -> tuple[float, list[list[mapped.Part]]]:
    """MB/s until all of it is in memory, and where its layers lie there is known."""
    started = time.perf_counter()
    _tell(sessions, "prefetch")
    parts = []
    for session in sessions:
        # Answers once the last of its layers is there.
        os.getxattr(layer_paths(session, LAYERS)[-1], mapped.MAP)
        parts += mapped.shown([session], LAYERS)
    return SIZE / (time.perf_counter() - started) / 1e6, parts


def _verify(parts: Sequence[Sequence[mapped.Part]], data: memoryview) -> None:
    found = np.zeros(SIZE, np.uint8)
    targets = [found[at : at + LAYER_SIZE] for at in range(0, SIZE, LAYER_SIZE)]
    mapped.copy_out(parts, mapped.map_files(parts), targets)
    check(found.data, data)

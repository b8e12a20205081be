"""Row 8: restore a session that grew by 50 turns while others did, cold.

Each turn appends 160 KiB to each of 30 layers, in three rounds of pieces, then calls fsync; four
sessions take turns. Restored is one of them: as the turns left it, and after it was packed, which
its agent has KVFS do by saying that it will not be needed soon.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.disk import drop_caches, pwritev, read_limit, speed, touched
from scripts.bench.layers import check, close_all, cut, layer_paths, noise, restore
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, speed_row

SESSIONS, LAYERS, TURNS = 4, 30, 50
PIECES = [64 << 10, 64 << 10, 32 << 10]
LAYER_SIZE = TURNS * sum(PIECES)
SIZE = LAYERS * LAYER_SIZE
_WAIT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Restored:
    """`extents`: of a layer, the median of the layers."""

    mb_s: float
    extents: float


@dataclass(frozen=True, slots=True)
class Round:
    raw: float
    grown: Restored
    packed: Restored
    packed_after_seconds: float


def measure(plan: Plan) -> list[Row]:
    data = noise(SIZE)
    with fresh_mount(plan.directory, "8G") as mount:
        raw = plan.directory / "raw"
        rounds = [_one_round(mount, raw, data) for _ in range(plan.rounds + 1)][1:]
    limit = Series("raw sequential", [r.raw for r in rounds])
    grown, packed = (
        statistics.median(one.extents for one in each)
        for each in ([r.grown for r in rounds], [r.packed for r in rounds])
    )
    seconds = statistics.median(r.packed_after_seconds for r in rounds)
    return [
        speed_row(
            "8a", "restore after 50 appended turns, cold, O_DIRECT", 0.7,
            Series("KVFS", [r.grown.mb_s for r in rounds]), limit,
            remark=f"not packed: {grown:g} extents a layer",
        ),
        speed_row(
            "8b", "  after it was packed", None,
            Series("KVFS", [r.packed.mb_s for r in rounds]), limit,
            remark=f"{packed:g} extents a layer, {seconds:.1f} s after the hint "
            "turn_expected=3600",
        ),
    ]  # fmt: skip


def _one_round(mount: Mount, raw_file: Path, data: memoryview) -> Round:
    sessions = [mount.point / f"session-{n}" for n in range(SESSIONS)]
    # Before them, and read after them: a disk may remember for a while what was just written.
    pwritev(raw_file, SIZE)
    _grow(sessions, cut(data, LAYER_SIZE))
    drop_caches()
    raw = read_limit(raw_file, SIZE)
    raw_file.unlink()
    mount.make_cold(*sessions)
    grown = _restore(sessions[0], data)
    mount.make_warm(sessions[0])
    seconds = _pack(mount, sessions[0])
    packed = _restore(sessions[0], data)
    for session in sessions:
        shutil.rmtree(session)
    return Round(raw, grown, packed, seconds)


def _grow(sessions: Sequence[Path], layers: Sequence[memoryview]) -> None:
    for session in sessions:
        session.mkdir()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    fds = [[os.open(path, flags, 0o600) for path in layer_paths(s, LAYERS)] for s in sessions]
    at = 0
    for _ in range(TURNS):
        for layer_fds in fds:
            begin = at
            for size in PIECES:
                for fd, layer in zip(layer_fds, layers, strict=True):
                    os.write(fd, layer[begin : begin + size])
                begin += size
            os.fsync(layer_fds[0])
        at += sum(PIECES)
    for layer_fds in fds:
        close_all(layer_fds)


def _restore(session: Path, data: memoryview) -> Restored:
    paths, found = layer_paths(session, LAYERS), touched(SIZE)
    extents = statistics.median(_extents(path) for path in paths)
    mb_s = speed(SIZE, lambda: restore(paths, cut(found, LAYER_SIZE), direct=True))
    check(found, data)
    return Restored(mb_s, extents)


def _extents(path: Path) -> int:
    return len(json.loads(os.getxattr(path, "user.kvfs.extents")))


def _pack(mount: Mount, session: Path) -> float:
    """Seconds until it was written anew and left the warm tier."""
    started = time.monotonic()
    os.setxattr(session, "user.kvfs.hint", b"turn_expected=3600")
    while os.getxattr(session, "user.kvfs.tier") != b"cold":
        if time.monotonic() - started > _WAIT_SECONDS:
            raise SystemExit(f"{session} is not cold {_WAIT_SECONDS} s after the hint")
        time.sleep(0.1)
    seconds = time.monotonic() - started
    mount.make_cold(session)
    return seconds

"""Row 6: save a session of 30 layers x 8 MiB with one fsync; what the device is given for it."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.bench import null_filesystem
from scripts.bench.disk import MIB, speed, touched, write_limit
from scripts.bench.layers import check, cut, layer_paths, noise, restore, save
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, cost_row, speed_row

LAYERS, LAYER_SIZE = 30, 8 * MIB
SIZE = LAYERS * LAYER_SIZE


@dataclass(frozen=True, slots=True)
class Round:
    """MB/s, but `device` and `blocks`: bytes written to the device for the first session, and
    what stat says that it takes there."""

    raw: float
    dropped: float
    kept: float
    ours: float
    by_four: float
    device: float
    blocks: float


def measure(plan: Plan) -> list[Row]:
    data = noise(SIZE)
    with ExitStack() as stack:
        dropping, keeping = plan.directory / "dropping", plan.directory / "keeping"
        mount = stack.enter_context(fresh_mount(plan.directory, "8G"))
        stack.enter_context(null_filesystem.mounted(dropping))
        stack.enter_context(null_filesystem.mounted(keeping, "--keep", plan.directory / "kept"))

        def one_round() -> Round:
            raw = write_limit(plan.directory / "raw", SIZE)
            (plan.directory / "raw").unlink()
            return Round(
                raw, _save(dropping, data), _save(keeping, data), *_save_twice(mount, data)
            )

        rounds = [one_round() for _ in range(plan.rounds + 1)][1:]
    raw = Series("raw sequential write", [r.raw for r in rounds])
    peers = [
        Series("FUSE, bytes dropped", [r.dropped for r in rounds]),
        Series("FUSE, bytes kept and written, no filesystem", [r.kept for r in rounds]),
    ]
    payload = Series("payload", [SIZE] * len(rounds))
    return [
        speed_row(
            "6a", "save 30 x 8 MiB, one fsync", 0.9,
            Series("KVFS", [r.ours for r in rounds]), raw, peers=peers,
        ),
        cost_row(
            "6b", "  written to the device for it", 1.05,
            Series("KVFS", [r.device for r in rounds]), payload, unit="bytes",
            peers=[Series("st_blocks", [r.blocks for r in rounds])],
        ),
        speed_row(
            "6c", "  by four writers", None,
            Series("KVFS", [r.by_four for r in rounds]), raw,
        ),
    ]  # fmt: skip


def _save_twice(mount: Mount, data: memoryview) -> tuple[float, float, float, float]:
    """MB/s by one writer and by four; bytes that the first cost the device, and its blocks."""
    sessions = [mount.point / "by-one", mount.point / "by-four"]
    for session in sessions:
        session.mkdir()
    one, four = (layer_paths(session, LAYERS) for session in sessions)
    before = mount.device_written()
    ours = _save(sessions[0], data)
    device = mount.device_written() - before
    by_four = _save(sessions[1], data, writers=4)
    blocks = sum(path.stat().st_blocks * 512 for path in one)
    mount.make_cold(*sessions)
    found = touched(SIZE)
    for paths in (one, four):
        restore(paths, cut(found, LAYER_SIZE), direct=True)
        check(found, data)
    for session in sessions:
        shutil.rmtree(session)
    return ours, by_four, device, blocks


def _save(session: Path, data: memoryview, *, writers: int = 1) -> float:
    """MB/s."""
    paths, layers = layer_paths(session, LAYERS), cut(data, LAYER_SIZE)
    return speed(SIZE, lambda: save(paths, layers, writers=writers))

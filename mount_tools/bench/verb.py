"""`kvfs bench`: the verb."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mount_tools.arguments import Mountpoint
from mount_tools.bench.device import Device, opened_device
from mount_tools.bench.verdict import COMPRESSED, verdict
from mount_tools.bench.work import LAYER, SMALL, Row, Work
from mount_tools.common import (
    CommandError,
    format_size,
    print_json,
    print_table,
    say,
    warn,
)
from mount_tools.mountpoints import Stats, read_stats
from mount_tools.sessions import locate

_LAYERS_MIN, _LAYERS_MAX = 4, 128
_FILES_MIN, _FILES_MAX = 32, 1024
_ROOM_MIN = 4 * (_LAYERS_MIN * LAYER + _FILES_MIN * SMALL)
# A round writes the session twice (once beside the ring) and reads it five times.
_PASSES, _ROUNDS = 8, 4


def bench(
    mountpoint: Mountpoint,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="About how long it measures.")
    ] = 60,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measure a mount beside its device: sessions saved and restored, small files, names.

    \b
    It works in a directory of its own on the mount (MNT may be a directory of a mount), which it
    removes, and with at most a quarter of what is free there. Nothing else is changed; other
    sessions may lose their place in warm memory. The device is read where the same bytes lie on it,
    which its rights must allow; beside an image a file is written and removed.

    \b
    Examples:
      kvfs bench /mnt/kv
      kvfs bench /mnt/kv --seconds 10 --json
    """
    mount, place = locate(mountpoint)
    stats = read_stats(mount.mountpoint)
    _refuse(stats, mount.mountpoint)
    try:
        with _own_directory(place) as directory:
            report = _measure(directory, stats, seconds)
    except KeyboardInterrupt:
        warn("interrupted; what it wrote is removed")
        return 1
    if json_output:
        print_json(report.as_json())
    else:
        _print(report)
    return 0


@dataclass(frozen=True, slots=True)
class Report:
    mountpoint: Path
    source: Path
    seconds: float
    load: float
    work: Work

    @property
    def verdict(self) -> str:
        return verdict(self.work.rows, self.work.compressed, self.load, self.mountpoint)

    def as_json(self) -> dict[str, Any]:
        return {
            "mountpoint": str(self.mountpoint),
            "source": str(self.source),
            "seconds": round(self.seconds, 1),
            "session_bytes": self.work.size,
            "small_files": self.work.files,
            "compressed": round(self.work.compressed, 2),
            "load": round(self.load, 2),
            "rows": [_as_json(row) for row in self.work.rows.values()],
            "left_out": self.work.device.missing,
            "verdict": self.verdict,
        }


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "rounds": len(row.kvfs),
        "kvfs": round(float(np.median(row.kvfs)), 1),
        "device": round(float(np.median(row.device)), 1) if row.device else None,
        "ratio": None if row.ratio is None else round(row.ratio, 3),
    }


def _refuse(stats: Stats, mountpoint: Path) -> None:
    if stats.read_only:
        raise CommandError(
            f"{mountpoint} is read-only, and nothing can be measured without writing"
        )
    if stats.free < _ROOM_MIN:
        raise CommandError(
            f"{mountpoint} has {format_size(stats.free)} free, and with less than "
            f"{format_size(_ROOM_MIN)} this would make sessions of others go"
        )


@contextmanager
def _own_directory(place: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=".kvfs-bench-", dir=place))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _measure(directory: Path, stats: Stats, seconds: float) -> Report:
    started = time.monotonic()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        opened_device(stats.source, _LAYERS_MAX * LAYER) as device,
        Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar,
    ):  # fmt: skip
        task = bar.add_task("looking how fast it is", total=seconds)
        work = _sized(directory, device, stats, seconds)
        elapsed = last_round = 0.0
        while elapsed + last_round <= seconds:
            for what, step in work.steps():
                bar.update(task, description=what, completed=time.monotonic() - started)
                step()
            last_round = time.monotonic() - started - elapsed
            elapsed = time.monotonic() - started
    mountpoint = Path(stats.document["mountpoint"])
    return Report(mountpoint, stats.source, elapsed, load, work)


def _sized(directory: Path, device: Device, stats: Stats, seconds: float) -> Work:
    """Sessions that are measured several times in so many seconds, and fit: a quarter of what is
    free, and of warm memory, which others use too."""
    smallest = Work(directory, device, _LAYERS_MIN, _FILES_MIN)
    smallest.save(_LAYERS_MIN)
    speed = smallest.size / smallest.save(_LAYERS_MIN)
    limits = (
        speed * seconds / _ROUNDS / _PASSES,
        stats.free / 4,
        stats.document["warm"]["limit"] / 4,
    )
    layers = max(_LAYERS_MIN, min(_LAYERS_MAX, int(min(limits) / LAYER)))
    files = max(_FILES_MIN, min(_FILES_MAX, layers * LAYER // SMALL))
    return Work(directory, device, layers, files)


def _print(report: Report) -> None:
    work = report.work
    is_smaller = work.compressed > COMPRESSED
    stored = f"stored {work.compressed:.2f} times smaller" if is_smaller else "stored as it is"
    size = format_size(work.size)
    say(f"{report.mountpoint} on {report.source}: a session of {size} like bf16 KV, {stored}")
    columns = ("work", "KVFS", "device", "unit", "ratio", "rounds")
    rows = [_cells(row) for row in work.rows.values()]
    print_table(columns, rows, ("KVFS", "device", "ratio", "rounds"))
    for note in work.device.missing:
        say(note)
    say(report.verdict)


def _cells(row: Row) -> list[str]:
    shown = _as_json(row)
    device = "-" if shown["device"] is None else f"{shown['device']:.0f}"
    ratio = "-" if shown["ratio"] is None else f"{shown['ratio']:.2f}"
    return [row.name, f"{shown['kvfs']:.0f}", device, row.unit, ratio, str(shown["rounds"])]

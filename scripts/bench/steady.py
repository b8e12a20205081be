"""Row 9: what a nearly full ring writes for what programs write, and how fast.

A ring of 512 small segments is filled; then units, chosen at random, are removed and written
anew, one writer, O_DIRECT, until the device has taken the ring's size so many times. The
turns are the rounds: the first one, in which the ring is still partly unused, does not count.
An empty ring's speed is that of the fill, behind what touches the warm tier's memory.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench.disk import MIB, touched
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, bound_row, speed_row

SEGMENTS = 512
SHARE_OF_EMPTY = 0.6
_WARM_MIB = 256
_LOOK_EVERY = 16 * MIB
_CHECKED = 64 * MIB


@dataclass(frozen=True, slots=True)
class Workload:
    """Units of so many files of so many bytes, that take `use` of f_blocks. A unit of one file
    lies in a pool, others are directories."""

    what: str
    files: int
    file_size: int
    use: float
    amplification_max: float

    @property
    def size(self) -> int:
        return self.files * self.file_size


def workloads(segment: int) -> list[Workload]:
    return [
        Workload("sessions of 3 segments", 6, segment // 2, 0.85, 1.3),
        Workload("random sessions of 8 MiB", 8, MIB, 0.85, 2.8),
        Workload("random sessions of 1/8 of a segment, as 8 MiB of 64 MiB", 4, segment // 32,
                 0.85, 2.8),
        Workload("random files of 256 KiB", 1, 256 * 1024, 0.70, 2.0),
        Workload("random files of 256 KiB", 1, 256 * 1024, 0.85, 3.8),
    ]  # fmt: skip


@dataclass(slots=True)
class Turned:
    """By turn: bytes on the device for a byte written by programs; MB/s of these."""

    empty_speed: float
    live_share: float = 0.0
    amplifications: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)


def measure(plan: Plan) -> list[Row]:
    segment = plan.pick(8, 4) * MIB
    rows = []
    for letter, workload in zip("acegi", workloads(segment), strict=True):
        turned = turn_over(plan.directory, workload, segment, plan.pick(5, 1))
        rows += _rows(letter, workload, segment, turned)
    return rows


def _rows(letter: str, workload: Workload, segment: int, turned: Turned) -> list[Row]:
    what = f"{workload.what}, {workload.use:.0%} of f_blocks"
    attainable = [turned.empty_speed / value for value in turned.amplifications]
    return [
        bound_row(
            f"9{letter}", f"{what}: bytes on the device for one written",
            turned.amplifications, "x", at_most=workload.amplification_max,
            remark=f"{SEGMENTS} segments of {segment // MIB} MiB, {turned.live_share:.0%} of their "
            f"bytes live; {len(turned.amplifications)} turns",
        ),
        speed_row(
            f"9{chr(ord(letter) + 1)}", f"{what}: written by programs", SHARE_OF_EMPTY,
            Series("steady", turned.speeds),
            Series("an empty ring / that", attainable),
            peers=[Series("an empty ring", [turned.empty_speed])],
        ),
    ]  # fmt: skip


def turn_over(directory: Path, workload: Workload, segment: int, turns: int) -> Turned:
    # Two superblock slots in front.
    size = SEGMENTS * segment + MIB
    options = ("--warm", f"{_WARM_MIB}M", "--no-reclaim")
    mkfs = ("--segment-size", f"{segment // MIB}M")
    with fresh_mount(directory, str(size), *options, mkfs=mkfs) as mount:
        churn = Churn(mount, workload)
        turned = Turned(churn.fill())
        turned.live_share = mount.stats()["space"]["live"] / (SEGMENTS * segment)
        for turn in range(turns + 1):
            amplification, speed = churn.turn(size)
            if turn:
                turned.amplifications.append(amplification)
                turned.speeds.append(speed)
        churn.check()
    return turned


class Churn:
    """The units that are there, in random order, and who replaces them."""

    def __init__(self, mount: Mount, workload: Workload) -> None:
        self._mount = mount
        self._workload = workload
        self._random = random.Random(1)
        self._next = 0
        self._units: list[int] = []
        self._content = touched(32 * MIB + workload.file_size)
        self._content[:] = random.Random(2).randbytes(len(self._content))

    def fill(self) -> float:
        """MB/s, once the memory of the warm tier was used."""
        status = os.statvfs(self._mount.point)
        count = int(self._workload.use * status.f_blocks * status.f_frsize) // self._workload.size
        unmeasured = min(count // 2, 2 * _WARM_MIB * MIB // self._workload.size)
        for _ in range(unmeasured):
            self._add()
        self._sync()
        started = time.perf_counter()
        for _ in range(count - unmeasured):
            self._add()
        self._sync()
        written = (count - unmeasured) * self._workload.size
        return written / (time.perf_counter() - started) / 1e6

    def turn(self, size: int) -> tuple[float, float]:
        """Replace until the device has taken `size` bytes: bytes for one written, MB/s."""
        before, written, started = self._mount.device_written(), 0, time.perf_counter()
        units = max(1, _LOOK_EVERY // self._workload.size)
        while self._mount.device_written() - before < size:
            for _ in range(units):
                self._replace()
            written += units * self._workload.size
        self._sync()
        seconds = time.perf_counter() - started
        return (self._mount.device_written() - before) / written, written / seconds / 1e6

    def check(self) -> None:
        """Some of the units, read with their names and bytes. Exits when one is wrong."""
        for number in self._random.sample(self._units, max(1, _CHECKED // self._workload.size)):
            for index, path in enumerate(self._paths(number)):
                if path.read_bytes() != self._bytes(number, index):
                    raise SystemExit(f"wrong bytes in {path}")

    def _add(self) -> None:
        number, self._next = self._next, self._next + 1
        paths = list(self._paths(number))
        paths[0].parent.mkdir(exist_ok=True)
        for index, path in enumerate(paths):
            _write(path, self._bytes(number, index))
        self._units.append(number)

    def _replace(self) -> None:
        place = self._random.randrange(len(self._units))
        self._units[place], self._units[-1] = self._units[-1], self._units[place]
        number = self._units.pop()
        if self._workload.files > 1:
            shutil.rmtree(self._mount.point / f"session-{number}")
        else:
            next(self._paths(number)).unlink()
        self._add()

    def _paths(self, number: int) -> Iterator[Path]:
        if self._workload.files == 1:
            yield self._mount.point / f"pool-{number % 16}" / f"{number}"
            return
        for index in range(self._workload.files):
            yield self._mount.point / f"session-{number}" / f"layer.{index:03}"

    def _bytes(self, number: int, index: int) -> memoryview:
        """Others for each file, of a block of random bytes."""
        start = (number * self._workload.files + index) * 4096 * 37 % (32 * MIB)
        return self._content[start : start + self._workload.file_size]

    def _sync(self) -> None:
        fd = os.open(self._mount.point, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        if os.write(fd, data) != len(data):
            raise SystemExit(f"{path}: a write was short")
    finally:
        os.close(fd)

"""Row 5: sessions that are in the daemon's memory, through the mount and mapped, beside memcpy.

Layers of 256 KiB (32 a session), asked for whole, and of 8 MiB (30 a session), asked for in pieces
of 1 MiB; their files are open, and read in random order of layers into touched memory that has a
place for each. A memcpy moves as many bytes between two such memories, in pieces of that size and
in that order. All of that memory is in large pages where the kernel has them, as numpy asks for
and the warm tier does. The peers do the same: a pyfuse3 filesystem that answers zeros, and the page
cache of the disk's own filesystem.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.bench import mapped, null_filesystem, null_session
from scripts.bench.disk import MIB, best_speed, speed, touched
from scripts.bench.layers import (
    check,
    close_all,
    cut,
    layer_paths,
    noise,
    open_all,
    read,
    save,
)
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, speed_row


@dataclass(frozen=True, slots=True)
class Shape:
    """`request`: bytes that are asked for at once."""

    sessions: int
    layers: int
    layer_size: int
    request: int

    def paths(self, directory: Path) -> list[Path]:
        return [
            path for one in self.directories(directory) for path in layer_paths(one, self.layers)
        ]

    def directories(self, directory: Path) -> list[Path]:
        return [directory / f"session-{n:02}" for n in range(self.sessions)]


@dataclass(frozen=True, slots=True)
class Round:
    """MB/s. `whole`: a layer at once, however large. `mapped`: what is mapped already;
    `looked_up` begins with the question where it lies, and maps it; `read_out` asks too, and reads
    the warm files."""

    memcpy: float
    memcpy_small_pages: float
    direct: float
    whole: float
    null: float
    own_null: float
    page_cache: float
    mapped: float
    looked_up: float
    read_out: float


def measure(plan: Plan) -> list[Row]:
    small = Shape(plan.pick(40, 16), 32, 256 << 10, 256 << 10)
    large = Shape(1, 30, 8 * MIB, MIB)
    nulls = plan.directory / "null", plan.directory / "own-null"
    with (
        fresh_mount(plan.directory, "8G") as mount,
        null_filesystem.mounted(nulls[0]),
        null_filesystem.mounted(nulls[1], program=null_session.__file__),
    ):
        of_small, of_large = (
            Bench(mount, nulls, plan.directory / f"plain-{shape.request}", shape).measure(
                plan.rounds
            )
            for shape in (small, large)
        )
    return [
        _through_mount("5a", "warm layers of 256 KiB, O_DIRECT, 256 KiB at once", 0.25, of_small),
        _through_mount("5b", "warm layers of 8 MiB, O_DIRECT, 1 MiB at once", 0.4, of_large),
        _mapped("5c", "warm layers of 256 KiB, mapped", of_small),
        _mapped("5d", "warm layers of 8 MiB, mapped", of_large),
    ]


def _through_mount(id: str, what: str, share: float, rounds: Sequence[Round]) -> Row:
    return speed_row(
        id, what, share,
        Series("KVFS", [r.direct for r in rounds]),
        Series("memcpy", [r.memcpy for r in rounds]),
        peers=[
            Series("KVFS, a layer at once", [r.whole for r in rounds]),
            Series("FUSE, zeros", [r.null for r in rounds]),
            Series("FUSE, zeros, requests read as KVFS does", [r.own_null for r in rounds]),
            Series("memcpy, memory in small pages", [r.memcpy_small_pages for r in rounds]),
            Series("page cache, plain files", [r.page_cache for r in rounds]),
        ],
    )  # fmt: skip


def _mapped(id: str, what: str, rounds: Sequence[Round]) -> Row:
    return speed_row(
        id, what, 0.9,
        Series("KVFS", [r.mapped for r in rounds]),
        Series("memcpy", [r.memcpy for r in rounds]),
        peers=[
            Series("asked for and mapped each time", [r.looked_up for r in rounds]),
            Series("asked for, warm files read", [r.read_out for r in rounds]),
        ],
    )  # fmt: skip


class Bench:
    """Sessions of a shape, in the mount and as plain files."""

    def __init__(self, mount: Mount, nulls: tuple[Path, Path], plain: Path, shape: Shape) -> None:
        self._mount, self._nulls, self._plain, self._shape = mount, nulls, plain, shape
        self._top = mount.point / f"layers-of-{shape.layer_size}"
        size = shape.sessions * shape.layers * shape.layer_size
        self._data, self._found = noise(size), touched(size)
        self._sources, self._targets = (
            cut(memory, shape.layer_size) for memory in (self._data, self._found)
        )
        self._in_small_pages = [
            cut(touched(size, large_pages=False), shape.layer_size) for _ in range(2)
        ]
        self._order = random.sample(range(len(self._targets)), len(self._targets))

    def measure(self, rounds: int) -> list[Round]:
        for top in (self._top, self._plain):
            for directory in self._shape.directories(top):
                directory.mkdir(parents=True)
            save(self._shape.paths(top), self._sources)
        for directory in self._shape.directories(self._top):
            self._mount.make_warm(directory)
        return [self._one_round() for _ in range(rounds + 1)][1:]

    def _one_round(self) -> Round:
        shape, direct = self._shape, os.O_DIRECT
        return Round(
            best_speed(len(self._data), lambda: self._copy(self._sources, self._targets)),
            best_speed(len(self._data), lambda: self._copy(*self._in_small_pages)),
            self._through(shape.paths(self._top), direct, shape.request),
            self._through(shape.paths(self._top), direct, shape.layer_size),
            *map(self._zeros, self._nulls),
            self._through(shape.paths(self._plain), 0, shape.request),
            *self._mapped(),
        )

    def _copy(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        for number in self._order:
            source, target = _array(sources[number]), _array(targets[number])
            for at in range(0, len(source), self._shape.request):
                end = at + self._shape.request
                np.copyto(target[at:end], source[at:end])

    def _through(self, paths: Sequence[Path], flags: int, at_once: int) -> float:
        fds = open_all(paths, flags)
        try:
            return self._timed(lambda: self._read(fds, at_once))
        finally:
            close_all(fds)

    def _zeros(self, null: Path) -> float:
        fd = os.open(null / "zeros", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            fds = [fd] * len(self._targets)
            return speed(len(self._data), lambda: self._read(fds, self._shape.request))
        finally:
            os.close(fd)

    def _read(self, fds: Sequence[int], at_once: int) -> None:
        for number in self._order:
            read(fds[number], self._targets[number], at_once=at_once)

    def _mapped(self) -> tuple[float, float, float]:
        """Mapped already, asked for and mapped, asked for and read."""
        parts = self._shown()
        files = mapped.map_files(parts)
        targets = [_array(target) for target in self._targets]
        shuffled = [parts[n] for n in self._order], files, [targets[n] for n in self._order]

        def look_up() -> None:
            parts = self._shown()
            mapped.copy_out(parts, mapped.map_files(parts), targets)

        return (
            self._timed(lambda: mapped.copy_out(*shuffled)),
            self._timed(look_up),
            self._timed(lambda: mapped.read_out(self._shown(), self._targets)),
        )

    def _shown(self) -> list[list[mapped.Part]]:
        return mapped.shown(self._shape.directories(self._top), self._shape.layers)

    def _timed(self, work: Callable[[], None]) -> float:
        """MB/s of what fills all targets."""
        _array(self._found)[:] = 0
        fast = speed(len(self._data), work)
        check(self._found, self._data)
        return fast


def _array(memory: memoryview) -> mapped.Bytes:
    return np.frombuffer(memory, np.uint8)

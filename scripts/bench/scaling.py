"""Row 14: restores by 1 to 16 processes at once, each of another session; and of one among 10
to 10 000 sessions, with the time to list and stat one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Any

import xxhash

from scripts.bench.disk import DEPTH, MIB, drop_caches, fio, preadv, read_limit, timed, write_limit
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.peers import DirectFiles, Layers
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, cost_row, speed_row
from scripts.bench.sessions import Source, Target, verify

LAYER_SIZE = 8 * MIB
READERS = (1, 2, 4, 8, 16)
FLAT = 0.9
START_SECONDS = 60
# Most of many sessions are small, so that the ring holds them; a few are restored.
BULK_LAYER_SIZES = [64 * 1024] * 4
STANDARD_SESSIONS = 4
LISTED_SESSIONS = 20
WARM = "1G"  # four rings are mounted side by side


@dataclass(slots=True)
class Points:
    """What each point of a series gave, round by round; the first round only warms up."""

    ours: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    raw: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, ours: float, raw: float) -> None:
        self.ours[name].append(ours)
        self.raw[name].append(raw)

    def row(self, id: str, what: str) -> Row:
        ours = _counted(self.ours)
        raw = [Series(f"raw, {series.name}", series.values) for series in _counted(self.raw)]
        beside = [series for pair in zip(ours, raw, strict=True) for series in pair]
        return speed_row(id, what, FLAT, ours[-1], ours[0], peers=beside, remark=bend(ours, raw))


def measure(plan: Plan) -> list[Row]:
    sizes = [LAYER_SIZE] * plan.pick(30, 8)
    return [_by_readers(plan, sizes), *_by_sessions(plan, sizes)]


def bend(ours: Sequence[Series], raw: Sequence[Series]) -> str:
    """The first point that falls under the best before it, and what the raw disk does there."""
    for number in range(1, len(ours)):
        best = max(range(number), key=lambda before: ours[before].median)
        share = ours[number].median / ours[best].median
        if share < FLAT:
            raw_share = raw[number].median / raw[best].median
            return (
                f"bends at {ours[number].name}: {share:.2f} of {ours[best].name} "
                f"(raw: {raw_share:.2f})"
            )
    return "does not bend"


def _counted(points: dict[str, list[float]]) -> list[Series]:
    return [Series(name, values[1:]) for name, values in points.items()]


# -- readers


@dataclass(frozen=True, slots=True)
class Restored:
    """Seconds of the clock that all processes share."""

    number: int
    started: float
    ended: float
    digest: str


def _by_readers(plan: Plan, sizes: Sequence[int]) -> Row:
    source, raw, size, most = Source(), plan.directory / "raw", sum(sizes), max(READERS)
    write_limit(raw, size * most)
    points, digests = Points(), []
    with fresh_mount(plan.directory, f"{plan.pick(6, 3)}G") as mount:
        for number in range(most):
            layers = source.session(number, sizes)
            DirectFiles(mount.point).save(str(number), layers)
            digests.append(_digest(layers))
        with _processes(most, mount, sizes) as pool:
            for _ in range(plan.rounds + 1):
                for readers in READERS:
                    name = "1 reader" if readers == 1 else f"{readers} readers"
                    mount.make_cold(*(mount.point / str(number) for number in range(readers)))
                    done = pool.map(_restore, range(readers), chunksize=1)
                    if any(one.digest != digests[one.number] for one in done):
                        raise SystemExit(f"a session came back with other bytes, with {name}")
                    seconds = max(one.ended for one in done) - min(one.started for one in done)
                    points.add(name, size * readers / seconds / 1e6, _raw(raw, size, readers))
    raw.unlink()
    layers = f"{len(sizes)} x 8 MiB"
    return points.row("14a", f"restore {layers}, cold, O_DIRECT: 16 readers beside 1")


def _raw(path: Path, size: int, readers: int) -> float:
    """MB/s of so many readers of the raw file, each in a part of its own."""
    spans = [(reader * size + at, MIB) for at in range(0, size, MIB) for reader in range(readers)]
    return max(fio(path, "read", size, jobs=readers), preadv(path, spans, depth=DEPTH * readers))


@contextlib.contextmanager
def _processes(count: int, mount: Mount, sizes: Sequence[int]) -> Iterator[Pool]:
    """So many that run, and have touched the memory that they restore into."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count + 1)
    with context.Pool(count, _start, (barrier, mount.point, sizes)) as pool:
        barrier.wait(START_SECONDS)
        yield pool


# Of a process that restores.
_restoring: dict[str, Any] = {}


def _start(barrier: Barrier, root: Path, sizes: Sequence[int]) -> None:
    _restoring["peer"] = DirectFiles(root)
    _restoring["target"] = Target(len(sizes), max(sizes))
    _restoring["sizes"] = sizes
    barrier.wait()


def _restore(number: int) -> Restored:
    target, into = _restoring["target"], _restoring["target"].shaped(_restoring["sizes"])
    target.clear()
    started = time.perf_counter()
    _restoring["peer"].restore(str(number), into)
    return Restored(number, started, time.perf_counter(), _digest(into))


def _digest(layers: Layers) -> str:
    digest = xxhash.xxh3_128()
    for data in layers.values():
        digest.update(data)
    return digest.hexdigest()


# -- sessions


def _by_sessions(plan: Plan, sizes: Sequence[int]) -> list[Row]:
    source, target, draw = Source(), Target(len(sizes), max(sizes)), Random(14)
    raw, size = plan.directory / "raw", sum(sizes)
    write_limit(raw, size)
    points, listings = Points(), defaultdict(list)
    counts = [10**power for power in range(1, plan.pick(4, 3) + 1)]
    with contextlib.ExitStack() as stack:
        mounts = [_filled(stack, plan.directory, count, source, sizes) for count in counts]
        for number in range(plan.rounds + 1):
            session = number % STANDARD_SESSIONS
            for count, mount in zip(counts, mounts, strict=True):
                name = f"{count} sessions"
                target.clear()
                mount.make_cold(mount.point / _standard(session))
                into = target.shaped(sizes)
                peer = DirectFiles(mount.point)
                seconds = timed(lambda: peer.restore(_standard(session), into))  # noqa: B023
                verify(into, source.session(session, sizes))
                points.add(name, size / seconds / 1e6, read_limit(raw, size))
                listings[name].append(_list_ms(mount.point, count, draw))
    raw.unlink()
    listed = _counted(listings)
    among = f"{counts[-1]} sessions beside {counts[0]}"
    return [
        points.row("14b", f"restore {len(sizes)} x 8 MiB, cold, O_DIRECT: among {among}"),
        cost_row(
            "14c", f"list one session and stat its files, cold: among {among}", 1 / FLAT,
            listed[-1], listed[0], unit="ms", peers=listed,
        ),
    ]  # fmt: skip


def _filled(
    stack: contextlib.ExitStack, directory: Path, count: int, source: Source, sizes: Sequence[int]
) -> Mount:
    """So many sessions: those of the bulk, and half way the standard ones."""
    inside = directory / f"ring-{count}"
    inside.mkdir()
    ring = "6G" if count > 1000 else "3G"
    mount = stack.enter_context(fresh_mount(inside, ring, "--warm", WARM))
    peer = DirectFiles(mount.point)
    bulk = range(count - STANDARD_SESSIONS)
    for number in bulk:
        if number == len(bulk) // 2:
            for standard in range(STANDARD_SESSIONS):
                peer.save(_standard(standard), source.session(standard, sizes))
        peer.save(_bulk(number), source.session(number, BULK_LAYER_SIZES))
    return mount


def _list_ms(root: Path, count: int, draw: Random) -> float:
    """Of one session, of some that are drawn; the kernel knows none of their names."""
    drop_caches()
    sessions = [
        root / _bulk(draw.randrange(count - STANDARD_SESSIONS)) for _ in range(LISTED_SESSIONS)
    ]
    seconds = timed(lambda: [[entry.stat() for entry in os.scandir(path)] for path in sessions])
    return seconds / LISTED_SESSIONS * 1e3


def _standard(number: int) -> str:
    return f"standard-{number}"


def _bulk(number: int) -> str:
    return f"bulk-{number}"

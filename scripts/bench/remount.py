"""Row 10: a million layer files: how fast they mount, and how much memory serving them takes.

The image is built through the library. Each round mounts it after a clean end, writes sessions
that no checkpoint describes, kills the daemon, and mounts it again. Before each mount all that
the kernel caches is dropped, the interpreter and its modules too; what a mount takes when
these are in memory is told beside it. All that is seen is compared with what was written.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.bench.disk import MIB, drop_caches, timed
from scripts.bench.many_files import LAYERS, anonymous_mib, build, visit_sessions
from scripts.bench.mount import Mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, bound_row

CLEAN_SECONDS_MAX = 1
CRASHED_SECONDS_MAX = 5
ANONYMOUS_MIB_MAX = 200
_UNREPLAYED = 256 * MIB
_LAYER_SIZE = 256 * 1024
_END_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one round. Seconds of a mount with nothing cached, with programs cached, after a
    crash; frames that this one replayed; the daemon's memory after it."""

    clean: float
    beside: float
    crashed: float
    replayed: int
    anonymous_mib: float


def measure(plan: Plan) -> list[Row]:
    sessions, visits = plan.pick(31_250, 1_000), plan.pick(10_000, 500)
    # Nothing but a clean end writes a checkpoint.
    options = ("--warm", "1G", "--checkpoint", "86400")
    mount = Mount(plan.directory / "ring.img", plan.directory / "mnt", options)
    mount.point.mkdir()
    build(mount.image, sessions)
    try:
        timings = [one_round(mount, number) for number in range(plan.rounds + 1)][1:]
        mount.mount()
        visited = visit_sessions(mount.point, _pid(mount), sessions, visits)
    finally:
        mount.end()
    if visited.wrong:
        raise SystemExit(f"wrong after the mounts: {', '.join(visited.wrong[:5])}")
    files = f"{sessions * LAYERS} layer files"
    return [
        bound_row("10a", f"{files}: mount after a clean end, nothing cached",
                  [timing.clean for timing in timings], "s", at_most=CLEAN_SECONDS_MAX),
        bound_row("10b", f"{files}: the same, programs and modules cached",
                  [timing.beside for timing in timings], "s"),
        bound_row("10c", f"{files}: mount after a crash, {_UNREPLAYED // MIB} MiB unreplayed",
                  [timing.crashed for timing in timings], "s", at_most=CRASHED_SECONDS_MAX,
                  remark=f"{timings[-1].replayed} frames"),
        bound_row("10d", f"{files}: RssAnon, at most while {visits} sessions are visited",
                  [max(*(timing.anonymous_mib for timing in timings), *visited.anonymous)], "MiB",
                  at_most=ANONYMOUS_MIB_MAX),
    ]  # fmt: skip


def one_round(mount: Mount, number: int) -> Timing:
    drop_caches()
    clean = timed(mount.mount)
    killed = crash(mount, number)
    drop_caches()
    crashed = timed(mount.mount)
    replayed = check_replayed(mount, killed, number)
    anonymous = anonymous_mib(_pid(mount))
    mount.umount()
    _drop(mount.image)
    beside = timed(mount.mount)
    mount.umount()
    return Timing(clean, beside, crashed, replayed, anonymous)


def crash(mount: Mount, number: int) -> int:
    """Replace the last round's sessions by new ones, have them written, and kill the daemon:
    how many frames no checkpoint describes."""
    for old in mount.point.glob("crashed-*"):
        shutil.rmtree(old)
    frames_before = mount.stats()["counters"]["frames"]
    for path, data in _crashed(mount, number):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    fd = os.open(mount.point, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    counters = mount.stats()["counters"]
    if counters["checkpoints"]:
        raise SystemExit("a checkpoint came between: there is less to replay than is said")
    process = psutil.Process(_pid(mount))
    process.send_signal(signal.SIGKILL)
    # It is not our child, and may be a zombie of the one who reaps slowly.
    deadline = time.monotonic() + _END_SECONDS
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            raise SystemExit(f"the daemon is still there {_END_SECONDS} s after SIGKILL")
        time.sleep(0.02)
    return int(counters["frames"] - frames_before)


def check_replayed(mount: Mount, frames: int, number: int) -> int:
    replayed = int(mount.stats()["counters"]["replayed_frames"])
    if replayed < frames:
        raise SystemExit(f"{replayed} frames were replayed, {frames} were written")
    for path, data in _crashed(mount, number):
        if path.read_bytes() != data:
            raise SystemExit(f"wrong bytes in {path}")
    return replayed


def _crashed(mount: Mount, number: int) -> list[tuple[Path, bytes]]:
    """Files of the sessions that are not in a checkpoint when the daemon is killed."""
    content = random.Random(number).randbytes(_LAYER_SIZE)
    return [
        (
            mount.point / f"crashed-{number}-{file // LAYERS}" / f"layer.{file % LAYERS:03}",
            file.to_bytes(8, "little") + content[8:],
        )
        for file in range(_UNREPLAYED // _LAYER_SIZE)
    ]


def _pid(mount: Mount) -> int:
    return int(mount.stats()["pid"])


def _drop(image: Path) -> None:
    """From the page cache, and nothing else."""
    os.sync()
    fd = os.open(image, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)

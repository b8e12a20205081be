"""A group of ten sessions down to the ring and up again, beside fio on the same disk.

    python scripts/bench_tiers.py [--dir DIR] [--rounds 5] [--disk MB/S] [--json FILE]

87 MB of random bytes in 10 sessions of 30 layers. Each round measures, one after the other:
fio writing and reading as much of a new file (O_DIRECT, 1 MiB, depth 8); the group sent down by
`user.kvfs.demote`, so that it is in the ring and its memory is given up; brought up again by
`user.kvfs.prefetch`, until all of it can be mapped; and all of it copied out of the mapped warm
files, beside a copy of the same bytes from memory to memory. Ratios are medians of the rounds'
ratios.

Write-back begins at once. So that most of the group is still dirty when it goes down, the disk
is held back while it is written, and as of then has all of its bandwidth, or that of `--disk`: by
the controller blkio (cgroup v1, as root). Where there is none most of it is in the ring by then.
What counts is what was dirty; it is printed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench_restore import KVFS, fio

SESSIONS = 10
LAYERS = 30
LAYER_SIZE = 290_000
SIZE = SESSIONS * LAYERS * LAYER_SIZE
BLKIO = Path("/sys/fs/cgroup/blkio")
HELD_BACK = 50  # MB/s
LOOKED_AGAIN_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Round:
    """MB/s (10^6 bytes) of one round."""

    raw_write: float
    raw_read: float
    down: float
    up: float
    mapped: float
    memcpy: float
    dirty: float  # MB, when it went down


@dataclass(frozen=True, slots=True)
class Disk:
    """The bandwidth of the disk under a directory, for this process and all that it starts from
    now on. Without a cgroup it is what it is."""

    device: str
    cgroup: Path | None

    @classmethod
    def under(cls, directory: Path) -> Disk:
        status = directory.stat()
        found = Path(f"/sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}")
        whole = found.resolve().parent if (found / "partition").exists() else found
        cgroup = BLKIO / f"kvfs-bench-{os.getpid()}"
        try:
            device = (whole / "dev").read_text().strip()
            cgroup.mkdir()
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            return cls("", None)
        return cls(device, cgroup)

    def limit(self, what: str, mb_s: float) -> None:
        """`read` or `write`; 0 is no limit."""
        if self.cgroup is not None:
            rule = self.cgroup / f"blkio.throttle.{what}_bps_device"
            rule.write_text(f"{self.device} {mb_s * 1e6:.0f}")

    def let_go(self) -> None:
        if self.cgroup is not None:
            (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
            self.cgroup.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=float, default=0, help="its bandwidth, in MB/s")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        disk = Disk.under(Path(name))
        if arguments.disk and disk.cgroup is None:
            raise SystemExit(f"--disk needs root, and {BLKIO}")
        try:
            rounds = measure(Path(name), arguments.rounds, disk, arguments.disk)
        finally:
            disk.let_go()
    report(rounds, arguments.json)


def measure(directory: Path, rounds: int, disk: Disk, mb_s: float) -> list[Round]:
    image, mountpoint = directory / "ring.img", directory / "mnt"
    mountpoint.mkdir()
    subprocess.run([KVFS, "mkfs", image, "--size", "4G"], check=True, stdout=subprocess.DEVNULL)
    mount = [KVFS, "mount", mountpoint, image, "--log", directory / "log"]
    subprocess.run(mount, check=True, stdout=subprocess.DEVNULL)
    try:
        raw = directory / "raw"
        return [one_round(mountpoint, raw, n, disk, mb_s) for n in range(rounds + 1)][1:]
    finally:
        subprocess.run([KVFS, "umount", mountpoint], check=True, stdout=subprocess.DEVNULL)


def one_round(mountpoint: Path, raw: Path, number: int, disk: Disk, mb_s: float) -> Round:
    disk.limit("read", mb_s)
    disk.limit("write", mb_s)
    raw_write, raw_read = fio(raw, "write", SIZE), fio(raw, "read", SIZE)
    raw.unlink()
    data = os.urandom(LAYER_SIZE)
    sessions = [mountpoint / f"{number}.{one}" for one in range(SESSIONS)]
    layers = [session / f"layer.{layer:03}" for session in sessions for layer in range(LAYERS)]
    for session in sessions:
        session.mkdir()
    disk.limit("write", HELD_BACK)
    for layer in layers:
        layer.write_bytes(data)
    dirty = json.loads((mountpoint / ".kvfs/stats.json").read_text())["unsaved"] / 1e6
    started = time.perf_counter()
    disk.limit("write", mb_s)
    tell(sessions, "demote")
    down = time.perf_counter() - started
    up, maps = bring_up(sessions)
    mapped, memcpy = copy_out(maps, data)
    tell(sessions, "demote")
    speeds = (SIZE / seconds / 1e6 for seconds in (up, mapped, memcpy))
    return Round(raw_write, raw_read, dirty / down, *speeds, dirty)


def bring_up(sessions: list[Path]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until all of it is in memory, and where its layers lie there is known."""
    started = time.perf_counter()
    tell(sessions, "prefetch")
    maps: list[dict[str, Any]] = []
    for session in sessions:
        os.getxattr(session / f"layer.{LAYERS - 1:03}", "user.kvfs.map")  # waits until it is there
        while len(files := json.loads(os.getxattr(session, "user.kvfs.map"))["files"]) < LAYERS:
            time.sleep(LOOKED_AGAIN_SECONDS)
        maps += files.values()
    return time.perf_counter() - started, maps


def tell(sessions: list[Path], what: str) -> None:
    for session in sessions:
        os.setxattr(session, f"user.kvfs.{what}", b"1")


def copy_out(maps: list[dict[str, Any]], expected: bytes) -> tuple[float, float]:
    """Seconds to copy all layers out of their mapped files, and as much from touched memory."""
    target = np.zeros(LAYER_SIZE, np.uint8)
    source = np.frombuffer(os.urandom(SIZE), np.uint8)
    started = time.perf_counter()
    for start in range(0, SIZE, LAYER_SIZE):
        np.copyto(target, source[start : start + LAYER_SIZE])
    memcpy = time.perf_counter() - started
    started = time.perf_counter()
    files: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
    for one in maps:
        for segment in one["segments"]:
            path, offset, length = segment["path"], segment["offset"], segment["length"]
            if path not in files:
                files[path] = map_file(path)
            np.copyto(target[segment["at"] :][:length], files[path][offset : offset + length])
        if target[-1] != expected[-1]:
            raise SystemExit("wrong bytes")
    mapped = time.perf_counter() - started
    if target.tobytes() != expected:
        raise SystemExit("wrong bytes")
    return mapped, memcpy


def map_file(path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ), np.uint8)


def report(rounds: list[Round], path: Path | None) -> None:
    goals = [
        ("group down", "down", "raw_write", 0.87),
        ("group up, until mapped", "up", "raw_read", 0.87),
        ("copy out of mapped warm", "mapped", "memcpy", 0.8),
    ]
    dirty = min(r.dirty for r in rounds)
    print(f"{dirty:.0f} of {SIZE / 1e6:.0f} MB were dirty when the group went down")
    rows = []
    for title, what, limit, goal in goals:
        ratio = statistics.median(getattr(r, what) / getattr(r, limit) for r in rounds)
        measured = statistics.median(getattr(r, what) for r in rounds)
        raw = statistics.median(getattr(r, limit) for r in rounds)
        rows.append({"what": title, "mb_s": measured, "limit_mb_s": raw, "ratio": ratio})
        milliseconds = SIZE / measured / 1e3
        print(
            f"{title:24} {measured:6.0f} MB/s ({milliseconds:4.0f} ms)  limit {raw:6.0f}"
            f"  ratio {ratio:5.2f}  goal {goal}"
        )
    if path is not None:
        path.write_text(json.dumps({"rows": rows, "rounds": [asdict(r) for r in rounds]}, indent=2))


if __name__ == "__main__":
    main()

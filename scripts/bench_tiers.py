"""A group of ten sessions down to the ring and up again, beside fio on the same disk.

    python scripts/bench_tiers.py [--dir DIR] [--rounds 5] [--json FILE]

87 MB of random bytes in 10 sessions of 30 layers. Each round measures, one after the other:
fio writing and reading as much of a new file (O_DIRECT, 1 MiB, depth 8); the group, all
of it dirty, sent down by `user.kvfs.demote`, so that it is in the ring and its memory is
given up; brought up again by `user.kvfs.prefetch`, until all of it can be mapped; and all of
it copied out of the mapped warm files, beside a copy of the same bytes from memory to memory.
Ratios are medians of the rounds' ratios.
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


@dataclass(frozen=True, slots=True)
class Round:
    """MB/s (10^6 bytes) of one round."""

    raw_write: float
    raw_read: float
    down: float
    up: float
    mapped: float
    memcpy: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        rounds = measure(Path(name), arguments.rounds)
    report(rounds, arguments.json)


def measure(directory: Path, rounds: int) -> list[Round]:
    image, mountpoint = directory / "ring.img", directory / "mnt"
    mountpoint.mkdir()
    subprocess.run([KVFS, "mkfs", image, "--size", "4G"], check=True, stdout=subprocess.DEVNULL)
    mount = [KVFS, "mount", mountpoint, image, "--log", directory / "log"]
    subprocess.run(mount, check=True, stdout=subprocess.DEVNULL)
    try:
        return [one_round(mountpoint, directory / "raw", n) for n in range(rounds + 1)][1:]
    finally:
        subprocess.run([KVFS, "umount", mountpoint], check=True, stdout=subprocess.DEVNULL)


def one_round(mountpoint: Path, raw: Path, number: int) -> Round:
    raw_write, raw_read = fio(raw, "write", SIZE), fio(raw, "read", SIZE)
    raw.unlink()
    data = os.urandom(LAYER_SIZE)
    sessions = [mountpoint / f"{number}.{one}" for one in range(SESSIONS)]
    layers = [session / f"layer.{layer:03}" for session in sessions for layer in range(LAYERS)]
    for session in sessions:
        session.mkdir()
    for layer in layers:
        layer.write_bytes(data)
    started = time.perf_counter()
    for session in sessions:
        os.setxattr(session, "user.kvfs.demote", b"1")
    down = time.perf_counter() - started
    started = time.perf_counter()
    for session in sessions:
        os.setxattr(session, "user.kvfs.prefetch", b"1")
    fds = [os.open(layer, os.O_RDONLY) for layer in layers]
    maps = [json.loads(os.getxattr(fd, "user.kvfs.map")) for fd in fds]
    up = time.perf_counter() - started
    mapped, memcpy = copy_out(maps, data)
    for fd in fds:
        os.close(fd)
    for session in sessions:
        os.setxattr(session, "user.kvfs.demote", b"1")
    return Round(raw_write, raw_read, *(SIZE / t / 1e6 for t in (down, up, mapped, memcpy)))


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
        ("group down, all dirty", "down", "raw_write", 0.87),
        ("group up, until mapped", "up", "raw_read", 0.87),
        ("copy out of mapped warm", "mapped", "memcpy", 0.8),
    ]
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

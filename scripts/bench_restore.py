"""Restore and save one session through the mount, beside fio on the same disk.

    python scripts/bench_restore.py [--dir DIR] [--rounds 5] [--json FILE]

A session of 30 layers x 8 MiB of random bytes. Each round measures, one after the
other: fio writing and reading 240 MiB of a new file (O_DIRECT, 1 MiB, depth
8), saving the session with one fsync at the end by one writer and by four, restoring
it with O_DIRECT and with plain buffered reads, the session sent down from the warm tier
and the kernel's page cache dropped before each (needs root), and writing the same to two
filesystems that store nothing: one drops the bytes, the other does only what the promise
of KVFS costs (see bench/null_filesystem.py).
Ratios are medians of the rounds' ratios: the disk drifts, the rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

LAYERS = 30
LAYER_SIZE = 8 * 1024 * 1024
SIZE = LAYERS * LAYER_SIZE
KVFS = str(Path(sys.executable).with_name("kvfs"))


@dataclass(frozen=True, slots=True)
class Round:
    """MB/s (10^6 bytes) of one round."""

    raw_read: float
    raw_write: float
    null_write: float
    keep_write: float
    save: float
    save_by_four: float
    restore_direct: float
    restore_buffered: float


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
    image, mountpoint, raw = directory / "ring.img", directory / "mnt", directory / "raw"
    nulls = [directory / "null", directory / "keep"]
    mountpoint.mkdir()
    subprocess.run([KVFS, "mkfs", image, "--size", "8G"], check=True, stdout=subprocess.DEVNULL)
    mount = [KVFS, "mount", mountpoint, image, "--log", directory / "log"]
    subprocess.run(mount, check=True, stdout=subprocess.DEVNULL)
    script = Path(__file__).with_name("bench") / "null_filesystem.py"
    keep = ["--keep", directory / "kept"]
    daemons = []
    try:
        for null, options in zip(nulls, ([], keep), strict=True):
            null.mkdir()
            daemons.append(subprocess.Popen([sys.executable, script, null, *options]))
            while not os.path.ismount(null):
                time.sleep(0.1)
        return [one_round(mountpoint, nulls, raw, number) for number in range(rounds + 1)][1:]
    finally:
        for null, daemon in zip(nulls, daemons, strict=False):
            subprocess.run(["fusermount3", "-u", null], check=False)
            daemon.wait()
        subprocess.run([KVFS, "umount", mountpoint], check=True, stdout=subprocess.DEVNULL)


def one_round(mountpoint: Path, nulls: list[Path], raw: Path, number: int) -> Round:
    session, parallel = mountpoint / f"session-{number}", mountpoint / f"parallel-{number}"
    names = [f"layer.{layer:03}" for layer in range(LAYERS)]
    layers = [session / name for name in names]
    data = memoryview(mmap.mmap(-1, LAYER_SIZE))
    data[:] = os.urandom(LAYER_SIZE)
    buffer = memoryview(mmap.mmap(-1, LAYER_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE))
    # A new file each round, like the session: neither is read for a second time.
    raw_write, raw_read = fio(raw, "write"), fio(raw, "read")
    raw.unlink()
    session.mkdir()
    parallel.mkdir()
    null_write, keep_write = (
        speed(partial(save_session, [null / f"{number}.{name}" for name in names], data))
        for null in nulls
    )
    save = speed(lambda: save_session(layers, data))
    save_by_four = speed(lambda: save_session([parallel / name for name in names], data, 4))
    make_cold(session)
    direct = speed(lambda: restore(layers, buffer, data, os.O_DIRECT))
    # So that the daemon's own cache cannot help: more than it holds lies between.
    make_cold(session)
    buffered = speed(lambda: restore(layers, buffer, data, 0))
    return Round(raw_read, raw_write, null_write, keep_write, save, save_by_four, direct, buffered)


def save_session(layers: list[Path], data: memoryview, writers: int = 1) -> None:
    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(partial(save_layer, data=data), layers))
    fd = os.open(layers[-1], os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def save_layer(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    if os.write(fd, data) != len(data):
        raise SystemExit("short write")
    os.close(fd)


def restore(layers: list[Path], buffer: memoryview, expected: memoryview, flags: int) -> None:
    for path in layers:
        fd = os.open(path, os.O_RDONLY | flags)
        done = 0
        while done < LAYER_SIZE:
            done += os.preadv(fd, [buffer[done:]], done)
        os.close(fd)
    if buffer != expected:
        raise SystemExit("wrong bytes")


def speed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return SIZE / (time.perf_counter() - started) / 1e6


def fio(path: Path, what: str, size: int = SIZE) -> float:
    command = [
        "fio", "--name=raw", f"--filename={path}", f"--size={size}", f"--rw={what}", "--bs=1M",
        "--iodepth=8", "--direct=1", "--ioengine=libaio", "--end_fsync=1",
        "--output-format=json",
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)["jobs"][0][what]["bw_bytes"]) / 1e6


def make_cold(session: Path) -> None:
    """Neither the warm tier nor the kernel has any of it."""
    os.setxattr(session, "user.kvfs.demote", b"1")
    drop_caches()


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


def report(rounds: list[Round], path: Path | None) -> None:
    goals = [
        ("restore, O_DIRECT", "restore_direct", "raw_read", 0.8),
        ("restore, plain reads", "restore_buffered", "raw_read", 0.6),
        ("save, one fsync", "save", "raw_write", 0.7),
        ("  by four writers", "save_by_four", "raw_write", 0.7),
        ("FUSE, bytes dropped", "null_write", "raw_write", 0.0),
        ("FUSE, bytes kept", "keep_write", "raw_write", 0.0),
        ("save beside that", "save", "keep_write", 0.0),
    ]
    rows = []
    for title, what, limit, goal in goals:
        ratio = statistics.median(getattr(r, what) / getattr(r, limit) for r in rounds)
        measured = statistics.median(getattr(r, what) for r in rounds)
        raw = statistics.median(getattr(r, limit) for r in rounds)
        rows.append(
            {"what": title, "mb_s": measured, "raw_mb_s": raw, "ratio": ratio, "goal": goal}
        )
        aim = f"goal {goal}" if goal else ""
        print(f"{title:22} {measured:7.0f} MB/s  limit {raw:7.0f}  ratio {ratio:5.2f}  {aim}")
    if path is not None:
        path.write_text(json.dumps({"rows": rows, "rounds": [asdict(r) for r in rounds]}, indent=2))


if __name__ == "__main__":
    main()

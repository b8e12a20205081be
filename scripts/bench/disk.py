"""The raw disk under a directory, measured: fio and plain `preadv`, O_DIRECT; and its cache."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

MIB = 1024 * 1024
LARGE_PAGE = 2 * MIB
DEPTH = 8


def fio(
    path: Path, what: str, size: int, *, block: int = MIB, depth: int = DEPTH, jobs: int = 1
) -> float:
    """MB/s (10^6 bytes) of `read`, `randread` or `write` of so many bytes of a file, O_DIRECT;
    with several jobs of as much by each, one behind the other in the file."""
    command = [
        "fio", "--name=raw", f"--filename={path}", f"--size={size}", f"--rw={what}",
        f"--bs={block}", f"--iodepth={depth}", "--direct=1", "--ioengine=libaio",
        f"--numjobs={jobs}", f"--offset_increment={size}", "--group_reporting",
        "--end_fsync=1", "--output-format=json",
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)["jobs"][0][what.removeprefix("rand")]["bw_bytes"]) / 1e6


def fio_latency(path: Path, size: int, block: int, count: int) -> tuple[float, float]:
    """p50 and p99, in ms, of so many random reads of a file, one at a time, O_DIRECT."""
    command = [
        "fio", "--name=raw", f"--filename={path}", f"--size={size}", "--rw=randread",
        f"--bs={block}", f"--number_ios={count}", "--iodepth=1", "--direct=1",
        "--ioengine=libaio", "--output-format=json",
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(output)["jobs"][0]["read"]["clat_ns"]["percentile"]
    return found["50.000000"] / 1e6, found["99.000000"] / 1e6


def preadv(
    path: Path, spans: Sequence[tuple[int, int]], *, depth: int = DEPTH, request: int = MIB
) -> float:
    """MB/s of reading these (offset, length) of a file in this order, O_DIRECT, with `depth`
    threads of plain `preadv`, each span in requests of at most so many bytes."""
    requests = [
        (at, min(request, offset + length - at))
        for offset, length in spans
        for at in range(offset, offset + length, request)
    ]
    with direct(path) as fd:
        workers = [(fd, touched(request), requests[number::depth]) for number in range(depth)]
        with ThreadPoolExecutor(depth) as pool:
            seconds = timed(lambda: list(pool.map(_read_all, workers)))
    return sum(length for _, length in spans) / seconds / 1e6


def _read_all(worker: tuple[int, memoryview, list[tuple[int, int]]]) -> None:
    fd, buffer, requests = worker
    for offset, length in requests:
        if os.preadv(fd, [buffer[:length]], offset) != length:
            raise SystemExit("short read of the raw file")


def read_limit(path: Path, size: int) -> float:
    """The best of fio and plain `preadv` with many requests or with large ones, reading a file
    from its start to its end."""
    whole = [(0, size)]
    large = preadv(path, whole, depth=1, request=DEPTH * MIB)
    return max(fio(path, "read", size), preadv(path, whole), large)


def write_limit(path: Path, size: int) -> float:
    """The better of fio and plain `pwritev`, each writing a new file; it is left there."""
    path.unlink(missing_ok=True)
    plain = pwritev(path, size)
    path.unlink()
    return max(plain, fio(path, "write", size))


def pwritev(path: Path, size: int, *, depth: int = DEPTH) -> float:
    """MB/s of writing a new file, O_DIRECT, 1 MiB, `depth` threads, and one fsync."""
    data = touched(MIB)
    data[:] = random.randbytes(MIB)
    with direct(path, os.O_RDWR | os.O_CREAT) as fd, ThreadPoolExecutor(depth) as pool:
        os.posix_fallocate(fd, 0, size)

        def work() -> None:
            list(pool.map(lambda at: os.pwritev(fd, [data], at), range(0, size, MIB)))
            os.fsync(fd)

        return size / timed(work) / 1e6


@contextlib.contextmanager
def direct(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def touched(size: int, *, large_pages: bool = True) -> memoryview:
    """Page-aligned memory whose pages are there: large ones, where the kernel has them, as numpy
    asks for and the warm tier does."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    start = -pages.ctypes.data % LARGE_PAGE
    pages[start : start + size] = 0
    return memoryview(memory)[start : start + size]


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_ahead_kib(path: Path) -> int:
    """Of the disk that a file lies on, for who reads through the page cache."""
    device = path.stat().st_dev
    bdi = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    return int(Path(bdi).read_text())


def speed(size: int, work: Callable[[], object]) -> float:
    """MB/s of work that moves so many bytes."""
    return size / timed(work) / 1e6


def best_speed(size: int, work: Callable[[], object]) -> float:
    """MB/s of a limit that is measured in milliseconds, which all else on the machine disturbs:
    the best of three."""
    return max(speed(size, work) for _ in range(3))


def drop_caches() -> None:
    """The kernel's page cache, dentries and inodes. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")

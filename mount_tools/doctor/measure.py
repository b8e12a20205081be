"""What is measured: each in less than a second, and nothing is written."""

from __future__ import annotations

import mmap
import os
import random
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_COPY_SIZE = 128 * 1024**2
_COPIES_MAX = 20
_SECONDS_MAX = 0.5
_READ_SIZE = 1024**2
_READS = 256
_READERS = 8
_SEED = 1


def measured_copy() -> float:
    """Bytes a second of the best of some copies by one thread, into memory that was touched
    before: fresh pages cost more than the copy."""
    end = time.perf_counter() + _SECONDS_MAX
    source = np.ones(_COPY_SIZE, np.uint8)
    target = np.ones_like(source)
    best_seconds = float("inf")
    for _ in range(_COPIES_MAX):
        begun = time.perf_counter()
        np.copyto(target, source)
        best_seconds = min(best_seconds, time.perf_counter() - begun)
        if time.perf_counter() > end:
            break
    return _COPY_SIZE / best_seconds


def measured_reads(source: Path) -> float | None:
    """Bytes a second of random reads of 1 MiB, eight at once, past the page cache. None where
    that cannot be told: no right to read, no direct I/O, or most of it was never written, of
    which a filesystem or an SSD makes zeros without reading."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        size = os.fstat(fd).st_size if is_regular else os.lseek(fd, 0, os.SEEK_END)
        return _measure(fd, size) if size >= 2 * _READ_SIZE else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _measure(fd: int, size: int) -> float | None:
    chosen = random.Random(_SEED)
    places = [chosen.randrange(size // _READ_SIZE) * _READ_SIZE for _ in range(_READS)]
    end = time.perf_counter() + _SECONDS_MAX

    def read_some(number: int) -> tuple[int, int]:
        """How many were read, and how many of them held something."""
        read = written = 0
        with mmap.mmap(-1, _READ_SIZE) as buffer:
            for place in places[number::_READERS]:
                if time.perf_counter() > end:
                    break
                if os.preadv(fd, [buffer], place) == _READ_SIZE:
                    read += 1
                    written += any(buffer[:4096])
        return read, written

    begun = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as threads:
        counts = list(threads.map(read_some, range(_READERS)))
    seconds = time.perf_counter() - begun
    read, written = (sum(each) for each in zip(*counts, strict=True))
    return read * _READ_SIZE / seconds if read and written >= read / 2 else None

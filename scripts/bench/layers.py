"""A session as a client sees it: a directory of layer files, saved and restored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from scripts.bench.disk import touched


def noise(size: int) -> memoryview:
    """Page-aligned bytes that no codec makes smaller."""
    data = touched(size)
    data[:] = np.random.default_rng().bytes(size)
    return data


def cut(data: memoryview, size: int) -> list[memoryview]:
    """The layers that lie one after the other in `data`, `size` bytes each."""
    return [data[start : start + size] for start in range(0, len(data), size)]


def layer_paths(session: Path, layers: int) -> list[Path]:
    return [session / f"layer.{layer:03}" for layer in range(layers)]


def save(paths: Sequence[Path], layers: Sequence[memoryview], *, writers: int = 1) -> None:
    """All layers by so many threads, then one fsync."""
    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(_save_layer, paths, layers))
    sync(paths[-1])


def _save_layer(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    if os.write(fd, data) != len(data):
        raise SystemExit(f"short write of {path}")
    os.close(fd)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def restore(paths: Sequence[Path], layers: Sequence[memoryview], *, direct: bool) -> None:
    """Read whole files, one after the other, by one thread."""
    for path, buffer in zip(paths, layers, strict=True):
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        read(fd, buffer, at_once=len(buffer))
        os.close(fd)


def read(fd: int, buffer: memoryview, *, at_once: int) -> None:
    """A file from its start, by one `preadv` after the other of at most so many bytes."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + at_once]], done)
        if count == 0:
            raise SystemExit("a file ends early")
        done += count


def check(found: memoryview, expected: memoryview) -> None:
    if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(expected, np.uint8)):
        raise SystemExit("wrong bytes")


def open_all(paths: Sequence[Path], flags: int = os.O_DIRECT) -> list[int]:
    """To be read, in this order."""
    return [os.open(path, os.O_RDONLY | flags) for path in paths]


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

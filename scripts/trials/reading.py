"""Every way in which a program can look at a file of a mount."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.trials.paint import LINE
from scripts.trials.ring import Broken

_PAGE = mmap.PAGESIZE
_REQUEST_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file from `offset` on, a multiple of a line; `tail` is what a mapping shows behind
    the end in the last page."""

    offset: int
    data: bytes
    tail: bytes = b""


Way = Callable[[int, random.Random], Part]


def whole(fd: int, rng: random.Random) -> Part:
    """By reads of one MiB, from the page cache or not."""
    if rng.random() < 0.5:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    found = bytearray()
    while data := os.pread(fd, _REQUEST_MAX, len(found)):
        found += data
    return Part(0, bytes(found))


def scattered(fd: int, rng: random.Random) -> Part:
    """A part of it, into several buffers of odd sizes at once."""
    size = os.fstat(fd).st_size
    start = rng.randrange(size + 1) // LINE * LINE
    buffers = [bytearray(rng.randrange(1, 60_000)) for _ in range(rng.randrange(1, 8))]
    count = os.preadv(fd, buffers, start)
    return Part(start, b"".join(buffers)[:count])


def direct(fd: int, rng: random.Random) -> Part:
    """Past the page cache, from any offset on."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(fd).st_size
        start = rng.choice([0, rng.randrange(size + 1) // LINE * LINE])
        with mmap.mmap(-1, _REQUEST_MAX) as memory:
            count = os.preadv(again, [memory], start)
            return Part(start, memory[:count])
    finally:
        os.close(again)


def mapped(fd: int, rng: random.Random) -> Part:
    """By a mapping. Where somebody cuts it meanwhile, which would be SIGBUS, by reads."""
    size = os.fstat(fd).st_size
    if not size:
        return Part(0, b"")
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            address = np.frombuffer(view, np.uint8).ctypes.data
            data = os.pread(memory, -(-size // _PAGE) * _PAGE, address)
    except OSError as failure:
        if failure.errno != errno.EIO:
            raise
        return whole(fd, rng)
    finally:
        os.close(memory)
    return Part(0, data[:size], data[size:])


def warm(fd: int, rng: random.Random) -> Part:
    """In the daemon's memory, as the adapter does it; nothing where it is not offered."""
    segments = offered(fd)
    found = bytearray()
    for segment in segments:
        if segment["at"] != len(found):
            break
        memory = os.open(segment["path"], os.O_RDONLY)
        try:
            data = os.pread(memory, segment["length"], segment["offset"])
        finally:
            os.close(memory)
        if len(data) != segment["length"]:
            raise Broken(f"a warm file is shorter than what was told of it: {segment}")
        found += data
    return Part(0, bytes(found))


def offered(fd: int) -> list[dict[str, Any]]:
    """Of an open file: path, offset, length and place of each part; none where it is not to be
    had."""
    try:
        segments: list[dict[str, Any]] = json.loads(os.getxattr(fd, "user.kvfs.map"))["segments"]
    except OSError:
        return []
    return segments


def offered_of_all(directory: str) -> dict[str, list[dict[str, Any]]]:
    """The same of all files of a directory, by name."""
    try:
        answer = json.loads(os.getxattr(directory, "user.kvfs.map"))
    except OSError:
        return {}
    return {
        name: [
            {"path": answer["paths"][number], "offset": offset, "length": length, "at": at}
            for number, offset, length, at in file["segments"]
        ]
        for name, file in answer["files"].items()
    }


WAYS: dict[str, Way] = {
    "read": whole, "preadv": scattered, "O_DIRECT": direct, "mmap": mapped, "warm": warm,
}  # fmt: skip

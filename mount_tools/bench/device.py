"""The device below a mount, measured without KVFS: reads of what is on the ring, at the places
where it lies; writes beside the image, where the ring is one."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mount_tools.bench.kv import aligned
from mount_tools.common import describe_os_error
from mount_tools.stat import extents_of

REQUEST = 1 << 20
BLOCK = 4096
_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Device:
    """`fd` reads the ring's device or image, `beside` is the image's directory; None what may not
    be used, and then `missing` says why."""

    fd: int | None
    beside: Path | None
    missing: list[str] = field(default_factory=list)

    def read_speed(self, files: Sequence[Path]) -> float | None:
        """MB/s of reading what the files lie in, in the order of the device, several at once."""
        if self.fd is None:
            return None
        requests = list(_requests(_places(files)))
        started = time.perf_counter()
        with ThreadPoolExecutor(_DEPTH) as pool:
            shares = [requests[number::_DEPTH] for number in range(_DEPTH)]
            list(pool.map(self._read_all, shares))
        return sum(length for _, length in requests) / (time.perf_counter() - started) / 1e6

    def reads(self, files: Sequence[Path], length: int) -> float | None:
        """Reads in a second, one after the other: so many bytes where each file begins."""
        if self.fd is None:
            return None
        places = [_places([file])[0][0] for file in files]
        buffer = aligned(length)
        started = time.perf_counter()
        for address in places:
            os.preadv(self.fd, [buffer], address)
        return len(places) / (time.perf_counter() - started)

    def write_speed(self, layers: Sequence[memoryview]) -> float | None:
        """MB/s of a new file with these bytes and an fsync."""
        if self.beside is None:
            return None
        fd, name = tempfile.mkstemp(prefix=".kvfs-bench-", dir=self.beside)
        try:
            os.close(fd)
            fd = os.open(name, os.O_WRONLY | os.O_DIRECT)
            started = time.perf_counter()
            for number, layer in enumerate(layers):
                os.pwrite(fd, layer, number * len(layer))
            os.fsync(fd)
            return sum(map(len, layers)) / (time.perf_counter() - started) / 1e6
        finally:
            os.close(fd)
            os.unlink(name)

    def _read_all(self, requests: Sequence[tuple[int, int]]) -> None:
        assert self.fd is not None
        buffer = aligned(REQUEST)
        for address, length in requests:
            os.preadv(self.fd, [buffer[:length]], address)


@contextmanager
def opened_device(source: Path, room: int) -> Iterator[Device]:
    """`room`: how many bytes are written beside an image."""
    missing: list[str] = []
    fd = None
    try:
        fd = os.open(source, os.O_RDONLY | os.O_DIRECT)
    except OSError as failure:
        missing.append(f"reads of the device are left out: {describe_os_error(failure)}")
    beside: Path | None = source.parent
    if not _is_file(source):
        beside = None
        missing.append("writes of the device are left out: they would destroy the ring")
    elif not os.access(source.parent, os.W_OK):
        beside = None
        missing.append(f"writes of the device are left out: {source.parent} may not be written")
    elif _free(source.parent) < 2 * room:
        beside = None
        missing.append(f"writes of the device are left out: {source.parent} is nearly full")
    try:
        yield Device(fd, beside, missing)
    finally:
        if fd is not None:
            os.close(fd)


def _is_file(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(path.stat().st_mode)
    return False


def _free(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _places(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Address and length on the device of what files lie in, by address, neighbours joined."""
    extents = [extent for file in files for extent in extents_of(file)]
    places: list[tuple[int, int]] = []
    for address, stored in sorted((extent["address"], extent["stored"]) for extent in extents):
        length = -(-stored // BLOCK) * BLOCK
        if places and sum(places[-1]) == address:
            places[-1] = (places[-1][0], places[-1][1] + length)
        else:
            places.append((address, length))
    return places


def _requests(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for address, length in places:
        for start in range(0, length, REQUEST):
            yield address + start, min(REQUEST, length - start)

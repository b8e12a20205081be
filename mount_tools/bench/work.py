"""What is measured: a session saved and restored, files of a pool, small reads, names."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mount_tools.bench import kv
from mount_tools.bench.device import Device
from mount_tools.common import CommandError

LAYER = 8 << 20
SMALL = 256 << 10
PAGE = 4096
_DIFFERENT_LAYERS = 4
_NAMES = 200
_WARM_SECONDS = 30.0
_LEFTOVER_SECONDS = b"3600"  # to live, should nobody remove it
_LAYOUT = {"user.kvfs.dtype": kv.DTYPE, "user.kvfs.shape": ",".join(map(str, kv.ROW))}


@dataclass(slots=True)
class Row:
    """One figure a round; of the device what it did beside it, where that was measured."""

    name: str
    unit: str
    kvfs: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def add(self, kvfs: float, device: float | None = None) -> None:
        self.kvfs.append(kvfs)
        if device is not None:
            self.device.append(device)

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios."""
        if not self.device:
            return None
        return float(np.median(np.divide(self.kvfs, self.device)))


@dataclass(slots=True)
class Work:
    """In a directory of its own on the mount: a session of `layers` layers, and `files` files in a
    pool. `compressed` is how many times smaller the session is on the device."""

    directory: Path
    device: Device
    layers: int
    files: int
    compressed: float = 1.0
    rows: dict[str, Row] = field(default_factory=dict)
    _content: list[memoryview] = field(default_factory=list)
    _buffer: memoryview = field(default_factory=lambda: kv.aligned(LAYER))

    def __post_init__(self) -> None:
        self._content = kv.layers(_DIFFERENT_LAYERS, LAYER)

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """One round: what to say of each step, and the step."""
        yield "saving a session", self._save
        yield "restoring it cold", self._restore_cold
        yield "restoring it by plain reads", self._restore_plain
        yield "restoring it warm", self._restore_warm
        yield "writing small files", self._store_small
        yield "reading small files", self._load_small
        yield "names", self._names

    def save(self, layers: int) -> float:
        """Seconds to save so many layers, with one fsync."""
        session = self.session
        shutil.rmtree(session, ignore_errors=True)
        session.mkdir()
        os.setxattr(session, "user.kvfs.ttl", _LEFTOVER_SECONDS)
        started = time.perf_counter()
        for number in range(layers):
            _write(session / f"layer.{number:03}", self._layer(number), _LAYOUT)
        _sync(session)
        return time.perf_counter() - started

    @property
    def session(self) -> Path:
        return self.directory / "session"

    @property
    def pool(self) -> Path:
        return self.directory / "pool"

    @property
    def size(self) -> int:
        """Bytes of the session."""
        return self.layers * LAYER

    def _save(self) -> None:
        seconds = self.save(self.layers)
        raw = self.device.write_speed([self._layer(number) for number in range(self.layers)])
        self._row("save, one fsync", "MB/s").add(self.size / seconds / 1e6, raw)
        stored = sum(path.stat().st_blocks * 512 for path in self._session_files())
        self.compressed = self.size / max(1, stored)

    def _restore_cold(self) -> None:
        _demote(self.session)
        raw = self.device.read_speed(self._session_files())
        self._row("restore, cold, O_DIRECT", "MB/s").add(self._restore(os.O_DIRECT), raw)

    def _restore_plain(self) -> None:
        _demote(self.session)
        raw = self.device.read_speed(self._session_files())
        self._row("restore, cold, plain reads", "MB/s").add(self._restore(0), raw)
        for path in self._session_files():
            _forget_pages(path)

    def _restore_warm(self) -> None:
        _warm([self.session])
        self._row("restore, warm, O_DIRECT", "MB/s").add(self._restore(os.O_DIRECT))
        shutil.rmtree(self.session)

    def _restore(self, flags: int) -> float:
        """MB/s. Raises CommandError for wrong bytes."""
        seconds = 0.0
        for number, path in enumerate(self._session_files()):
            started = time.perf_counter()
            fd = os.open(path, os.O_RDONLY | flags)
            count = os.preadv(fd, [self._buffer], 0)
            os.close(fd)
            seconds += time.perf_counter() - started
            if count != LAYER or not kv.equal(self._buffer, self._layer(number)):
                raise CommandError(f"{path} has other bytes than were written; see kvfs scrub")
        return self.size / seconds / 1e6

    def _store_small(self) -> None:
        shutil.rmtree(self.pool, ignore_errors=True)
        self.pool.mkdir()
        os.setxattr(self.pool, "user.kvfs.unit", b"pool")
        whole = self._content[0]
        pieces = [whole[start : start + SMALL] for start in range(0, LAYER, SMALL)]
        started = time.perf_counter()
        for number, path in enumerate(self._small_files()):
            temporary = path.with_suffix(".tmp")
            _write(temporary, pieces[number % len(pieces)])
            temporary.rename(path)
        _sync(self.pool)
        seconds = time.perf_counter() - started
        self._row("256 KiB files, written", "files/s").add(self.files / seconds)

    def _load_small(self) -> None:
        files = self._small_files()
        random.shuffle(files)
        whole, pages = files[: len(files) // 2], files[len(files) // 2 :]
        for path in files:
            _demote(path)
        raw = self.device.reads(whole, SMALL)
        self._row("256 KiB files, cold", "files/s").add(self._reads(whole, SMALL), raw)
        raw = self.device.reads(pages, PAGE)
        self._row("4 KiB reads, cold", "reads/s").add(self._reads(pages, PAGE), raw)
        _warm(pages)
        self._row("4 KiB reads, warm", "reads/s").add(self._reads(pages, PAGE))

    def _reads(self, files: Sequence[Path], length: int) -> float:
        """In a second, each from the beginning of a file."""
        fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
        buffer = self._buffer[:length]
        started = time.perf_counter()
        for fd in fds:
            os.preadv(fd, [buffer], 0)
        seconds = time.perf_counter() - started
        for fd in fds:
            os.close(fd)
        return len(fds) / seconds

    def _names(self) -> None:
        shutil.rmtree(self.pool)
        directory = self.directory / "names"
        directory.mkdir()
        paths = [directory / f"{number}" for number in range(_NAMES)]
        kinds: tuple[tuple[str, Callable[[Path], object]], ...] = (
            ("files made", Path.touch),
            ("renames", lambda path: path.rename(path.with_suffix(".new"))),
            ("files removed", lambda path: path.with_suffix(".new").unlink()),
        )
        for name, call in kinds:
            started = time.perf_counter()
            for path in paths:
                call(path)
            self._row(name, "/s").add(_NAMES / (time.perf_counter() - started))
        directory.rmdir()

    def _layer(self, number: int) -> memoryview:
        return self._content[number % _DIFFERENT_LAYERS]

    def _session_files(self) -> list[Path]:
        return [self.session / f"layer.{number:03}" for number in range(self.layers)]

    def _small_files(self) -> list[Path]:
        return [self.pool / f"{number:05}.bin" for number in range(self.files)]

    def _row(self, name: str, unit: str) -> Row:
        return self.rows.setdefault(name, Row(name, unit))


def _write(path: Path, data: memoryview, xattrs: Mapping[str, str] | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    for name, value in (xattrs or {}).items():
        os.setxattr(fd, name, value.encode())
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _forget_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _demote(path: Path) -> None:
    os.setxattr(path, "user.kvfs.demote", b"1")


def _warm(paths: Sequence[Path]) -> None:
    """Bring them in. Where the warm tier has no room for all of them, what there is room for."""
    for path in paths:
        os.setxattr(path, "user.kvfs.prefetch", b"1")
    deadline = time.monotonic() + _WARM_SECONDS
    for path in paths:
        while os.getxattr(path, "user.kvfs.tier") != b"warm" and time.monotonic() < deadline:
            time.sleep(0.01)

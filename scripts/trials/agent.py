"""An agent under load: a process that works on sessions of its own as engines and tools do, in
sizes from 4 KiB to 8 MiB, and notes how long each request took.

It appends to layers, reads parts at random, looks at names, keeps small files of a pool, resumes
sessions as a whole, forks, renames, removes and fsyncs. Each byte that it reads it checks.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.trials.crew import IsOver
from scripts.trials.paint import LINE, Lines, paint
from scripts.trials.ring import Broken

KIB, MIB = 1024, 1024 * 1024
_LAYERS = 4
_SESSIONS_MAX = 3
_LAYER_MAX = 8 * MIB
_POOL_FILES = 24
_SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
_SIZE_SHARES = (30, 25, 20, 15, 10)
_KINDS = {
    "append": 24, "read": 30, "resume": 3, "stat": 16, "list": 6, "pool write": 8, "pool read": 8,
    "overwrite": 3, "fsync": 2, "fork": 1, "new session": 1,
}  # fmt: skip


@dataclass(slots=True)
class Times:
    """How long requests took, each with when it began, by kind; in seconds of the monotonic
    clock."""

    began: dict[str, array[float]] = field(default_factory=dict)
    took: dict[str, array[float]] = field(default_factory=dict)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.began.setdefault(kind, array("d")).append(start)
        self.took.setdefault(kind, array("d")).append(end - start)

    def save(self, path: Path) -> None:
        rows = {kind: np.array([self.began[kind], self.took[kind]]) for kind in self.took}
        with path.open("wb") as file:
            np.savez(file, **rows)  # type: ignore[arg-type]


@dataclass(slots=True)
class Agent:
    """Works in `home`; a layer's bytes are those of its mark, so that any part can be checked.
    `mark` is that of the first one."""

    home: Path
    rng: random.Random
    mark: int
    times: Times = field(default_factory=Times)
    counts: Counter[str] = field(default_factory=Counter)
    _sessions: dict[Path, list[int]] = field(default_factory=dict)
    _pool: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def work(self, is_told_to_stop: IsOver, pause_s: float) -> None:
        self.home.mkdir(exist_ok=True)
        (self.home / "pool").mkdir(exist_ok=True)
        os.setxattr(self.home / "pool", "user.kvfs.unit", b"pool")
        while not is_told_to_stop():
            (kind,) = self.rng.choices(list(_KINDS), list(_KINDS.values()))
            self._do("new session" if not self._sessions else kind)
            time.sleep(self.rng.expovariate(1 / pause_s) if pause_s else 0)

    def _do(self, kind: str) -> None:
        self.counts[kind] += 1
        match kind:
            case "new session":
                self._new_session()
            case "append":
                self._append()
            case "read" | "resume":
                self._read(is_whole=kind == "resume")
            case "overwrite":
                self._overwrite()
            case "stat" | "list":
                self._look(kind)
            case "pool write":
                self._write_pool()
            case "pool read":
                self._read_pool()
            case "fsync":
                self._fsync()
            case "fork":
                self._fork()

    # -- sessions

    def _new_session(self) -> None:
        if len(self._sessions) >= _SESSIONS_MAX:
            self._remove(self.rng.choice(sorted(self._sessions)))
        session = self.home / f"session-{self._new_mark():x}"
        with self.times.of("mkdir"):
            session.mkdir()
        (session / "session.json").write_text("{}")
        self._sessions[session] = [self._new_mark() for _ in range(_LAYERS)]
        for layer in range(_LAYERS):
            self._write(session, layer, 0, self._length())

    def _remove(self, session: Path) -> None:
        with self.times.of("remove session"):
            shutil.rmtree(session)
        del self._sessions[session]

    def _append(self) -> None:
        """A turn: something behind each layer."""
        session = self._any()
        length = self._length()
        for layer in range(_LAYERS):
            size = self._layer(session, layer).stat().st_size
            if size + length > _LAYER_MAX:
                self._remove(session)
                return
            self._write(session, layer, size, length)

    def _overwrite(self) -> None:
        session, layer = self._any(), self.rng.randrange(_LAYERS)
        size = self._layer(session, layer).stat().st_size
        start = self.rng.randrange(size) // LINE * LINE
        self._write(session, layer, start, min(self._length(), size - start))

    def _write(self, session: Path, layer: int, start: int, length: int) -> None:
        mark = self._sessions[session][layer]
        data = paint(mark, 1, start, start + length)
        fd = os.open(self._layer(session, layer), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            with self.times.of(_sized("write", length)):
                written = os.pwrite(fd, data, start)
        finally:
            os.close(fd)
        if written != length:
            raise Broken(f"a write of {length} bytes to {session.name} was {written}")
        self.counts["bytes written"] += length

    def _read(self, *, is_whole: bool) -> None:
        session = self._any()
        layers = range(_LAYERS) if is_whole else [self.rng.randrange(_LAYERS)]
        for layer in layers:
            flags = os.O_DIRECT if self.rng.random() < 0.5 else 0
            with self.times.of("open"):
                fd = os.open(self._layer(session, layer), os.O_RDONLY | flags)
            try:
                size = os.fstat(fd).st_size
                if is_whole:
                    for start in range(0, size, MIB):
                        self._read_part(fd, session, layer, start, min(MIB, size - start))
                else:
                    length = min(self._length(), size)
                    start = self.rng.randrange(size - length + 1) // LINE * LINE
                    self._read_part(fd, session, layer, start, length)
            finally:
                os.close(fd)

    def _read_part(self, fd: int, session: Path, layer: int, start: int, length: int) -> None:
        with self.times.of(_sized("read", length)):
            data = os.pread(fd, length, start)
        self._check(f"{session.name}/{layer}", data, start, length, self._sessions[session][layer])

    def _fork(self) -> None:
        session = self._any()
        fork = self.home / f"session-{self._new_mark():x}"
        with self.times.of("fork"):
            os.setxattr(session, "user.kvfs.fork", fork.name.encode())
        self._sessions[fork] = self._sessions[session]
        if len(self._sessions) > _SESSIONS_MAX:
            self._remove(session)

    def _fsync(self) -> None:
        fd = os.open(self._layer(self._any(), 0), os.O_RDONLY)
        try:
            with self.times.of("fsync"):
                os.fsync(fd)
        finally:
            os.close(fd)

    def _look(self, kind: str) -> None:
        session = self._any()
        with self.times.of(kind):
            if kind == "stat":
                (session / "session.json").stat()
            else:
                names = os.listdir(session)
        if kind == "list" and len(names) != _LAYERS + 1:
            raise Broken(f"{session.name} has the names {names}")

    # -- small files

    def _write_pool(self) -> None:
        """As another engine's cache does it: under another name first, then renamed."""
        path = self.home / "pool" / f"block-{self.rng.randrange(_POOL_FILES)}"
        mark, length = self._new_mark(), self._length() // 4
        data = paint(mark, 1, 0, length)
        with self.times.of("pool write"):
            temporary = path.with_suffix(".new")
            with temporary.open("wb", buffering=0) as file:
                written = file.write(data)
            temporary.rename(path)
        if written != length:
            raise Broken(f"a write of {length} bytes to {path.name} was {written}")
        self._pool[path] = mark, length

    def _read_pool(self) -> None:
        if self._pool:
            path = self.rng.choice(sorted(self._pool))
            mark, length = self._pool[path]
            with self.times.of("pool read"):
                data = path.read_bytes()
            self._check(path.name, data, 0, length, mark)

    # -- details

    def _check(self, name: str, data: bytes, start: int, length: int, mark: int) -> None:
        lines = Lines.of(data, start)
        wrong = lines.wrong([mark], holes=False)
        if len(data) != length or len(wrong):
            first = f": {lines.describe(int(wrong[0]))}" if len(wrong) else ""
            raise Broken(f"{self.home.name}/{name}: {len(data)} of {length} bytes read{first}")
        self.counts["bytes read"] += length

    def _any(self) -> Path:
        return self.rng.choice(sorted(self._sessions))

    def _layer(self, session: Path, layer: int) -> Path:
        return session / f"layer.{layer:03d}"

    def _length(self) -> int:
        return self.rng.choices(_SIZES, _SIZE_SHARES)[0]

    def _new_mark(self) -> int:
        self.mark += 1
        return self.mark


def _sized(kind: str, length: int) -> str:
    return f"{kind} <= 64 KiB" if length <= 64 * KIB else f"{kind} <= 1 MiB"


def work(
    is_told_to_stop: IsOver, home: Path, times: Path, seed: int, pause_s: float
) -> Counter[str]:
    """Until told to stop. Raises Broken for a wrong byte, and with any error of a request."""
    agent = Agent(home, random.Random(seed), seed << 32)
    try:
        agent.work(is_told_to_stop, pause_s)
    except OSError as failure:
        raise Broken(f"{home.name}: {failure}") from failure
    finally:
        agent.times.save(times)
    return agent.counts

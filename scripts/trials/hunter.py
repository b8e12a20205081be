"""A hunter: a process that looks at the files of others, by every way to read, for bytes that are
not theirs.

Whose bytes a file may hold stands in an xattr of it, which goes with it wherever it is renamed,
and with its copies. What a hunter was shown it looks at again later: files that it has open,
memory that the daemon offered it and that it has open or only the path of, and files of which it
knows the kernel's handle, also after a new mount. Exits 1 with what it found.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from scripts.trials.crew import IsOver
from scripts.trials.paint import Lines
from scripts.trials.reading import WAYS, Part, offered, offered_of_all
from scripts.trials.ring import Broken
from scripts.trials.tree import MARKS_XATTR, marks_from
from scripts.trials.writer import GONE
from tests.support.calls import FileHandle, name_to_handle, open_by_handle

_KEPT_MAX = 24
_HANDLES_MAX = 200
# Whoever writes a line while it is read may be seen half way.
_LOOKS = 6
_STALE = (errno.ESTALE, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class _Told:
    """A part of a file of the daemon's memory: its path, and what lay there."""

    path: str
    offset: int
    length: int
    digest: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A file by the kernel's handle; its number, and its first mark, which it keeps for ever."""

    handle: bytes
    ino: int
    mark: int


@dataclass(slots=True)
class Hunter:
    """Works on the mount at `mountpoint`; `notes` outlive it."""

    mountpoint: Path
    notes: Path
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    _open: list[int] = field(default_factory=list)
    _mapped: list[tuple[int, _Told]] = field(default_factory=list)
    _told: list[_Told] = field(default_factory=list)
    _known: list[_Known] = field(default_factory=list)

    def hunt(self, is_told_to_stop: IsOver) -> None:
        """Raises Broken, OSError when the mount is gone."""
        self._load()
        while not is_told_to_stop():
            for look in (self._look_at_new, self._look_at_open, self._look_at_memory,
                         self._look_at_paths, self._look_by_handle, self._look_at_session,
                         self._stir):  # fmt: skip
                self._try(look)

    def _try(self, look: Callable[[], None]) -> None:
        try:
            look()
        except OSError as failure:
            if failure.errno in GONE or not os.path.ismount(self.mountpoint):
                raise
            if failure.errno not in _STALE:  # it was removed meanwhile
                raise Broken(f"{look.__name__}: {failure}") from failure

    # -- files

    def _look_at_new(self) -> None:
        path = self._any_file()
        if path is None:
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            self._look(fd, str(path))
            self._remember(path, fd)
        finally:
            self._keep(fd)

    def _any_session(self) -> Path | None:
        homes = [path for path in self.mountpoint.iterdir() if path.is_dir()]
        sessions = list(self.rng.choice(homes).iterdir()) if homes else []
        return self.rng.choice(sessions) if sessions else None

    def _any_file(self) -> Path | None:
        session = self._any_session()
        files = list(session.iterdir()) if session is not None else []
        return self.rng.choice(files) if files else None

    def _look_at_open(self) -> None:
        """It may have lost its name, or have been written to, cut and moved."""
        if self._open:
            self._look(self.rng.choice(self._open), "a file that was opened before")

    def _look(self, fd: int, name: str) -> None:
        way = self.rng.choice(sorted(WAYS))
        for _ in range(_LOOKS):
            before = _marks(fd)
            part = WAYS[way](fd, self.rng)
            marks = {*before, *_marks(fd)}
            told = _foreign(part, marks)
            if told is None:
                self.counts[f"by {way}"] += len(part.data)
                return
        owners = " ".join(f"{mark:016x}" for mark in sorted(marks))
        raise Broken(f"{name} by {way}: {told}; it may hold those of {owners}")

    def _keep(self, fd: int) -> None:
        self._open.append(fd)
        while len(self._open) > _KEPT_MAX:
            os.close(self._open.pop(self.rng.randrange(len(self._open))))

    # -- the daemon's memory

    def _look_at_session(self) -> None:
        """All that is offered of a session at once, which no lease keeps."""
        session = self._any_session()
        if session is None:
            return
        for name, segments in offered_of_all(str(session)).items():
            fd = os.open(session / name, os.O_RDONLY)
            try:
                before = _marks(fd)
                found = bytearray()
                for segment in segments:
                    data = self._note(segment)
                    if data is None or segment["at"] != len(found):
                        break
                    found += data
                told = _foreign(Part(0, bytes(found)), {*before, *_marks(fd)})
            finally:
                os.close(fd)
            # Between the answer and the open another file may have come under that name.
            if told is not None and not self._is_renamed(session / name, segments):
                raise Broken(f"{session / name} as its session is offered: {told}")
            self.counts["by session"] += len(found)

    def _is_renamed(self, path: Path, segments: list[dict[str, Any]]) -> bool:
        return offered_of_all(str(path.parent)).get(path.name) != segments

    def _note(self, segment: dict[str, Any]) -> bytes | None:
        """The bytes of a part of memory, which is looked at again. None when it is gone."""
        path, offset, length = segment["path"], segment["offset"], segment["length"]
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        data = os.pread(fd, length, offset)
        told = _Told(path, offset, length, xxhash.xxh3_64_intdigest(data))
        self._mapped.append((fd, told))
        self._told.append(told)
        while len(self._mapped) > _KEPT_MAX:
            os.close(self._mapped.pop(self.rng.randrange(len(self._mapped)))[0])
        del self._told[: -8 * _KEPT_MAX]
        return data

    def _look_at_memory(self) -> None:
        """What is mapped or open stays as it was."""
        if self._mapped:
            fd, told = self.rng.choice(self._mapped)
            self._compare(fd, told, "which is open")

    def _look_at_paths(self) -> None:
        """What was told and is looked up later is there as it was, or is not."""
        if not self._told:
            return
        told = self.rng.choice(self._told)
        try:
            fd = os.open(told.path, os.O_RDONLY)
        except FileNotFoundError:
            self.counts["gone memory"] += 1
            return
        try:
            self._compare(fd, told, "which was told before")
        finally:
            os.close(fd)

    def _compare(self, fd: int, told: _Told, why: str) -> None:
        data = os.pread(fd, told.length, told.offset)
        if xxhash.xxh3_64_intdigest(data) != told.digest:
            place = f"{told.length} bytes at {told.offset} of {told.path}"
            raise Broken(f"{place}, {why}, are others now: {data[:64].hex(' ', 8)}")
        self.counts["memory again"] += told.length

    # -- handles

    def _remember(self, path: Path, fd: int) -> None:
        marks = _marks(fd)
        if not marks or os.geteuid() != 0:
            return
        status = os.fstat(fd)
        handle = name_to_handle(path)
        if path.stat().st_ino == status.st_ino:  # not another one meanwhile
            self._known.append(_Known(bytes(handle), status.st_ino, marks[0]))
            if len(self._known) > _HANDLES_MAX:
                del self._known[self.rng.randrange(len(self._known))]

    def _look_by_handle(self) -> None:
        if not self._known:
            return
        known = self.rng.choice(self._known)
        handle = FileHandle.from_buffer_copy(known.handle)
        fd = open_by_handle(self.mountpoint, handle, os.O_RDONLY)
        try:
            if os.fstat(fd).st_ino != known.ino or _marks(fd)[:1] != (known.mark,):
                raise Broken(f"the handle of file {known.mark:016x} opens that of {_marks(fd)}")
            self._look(fd, f"inode {known.ino} by its handle")
        finally:
            os.close(fd)
        self.counts["by handle"] += 1

    # -- what makes bytes move

    def _stir(self) -> None:
        """Sessions and files go down, come up, and are made durable."""
        what = self.rng.choice([self._any_session, self._any_file])()
        if what is None:
            return
        how = self.rng.choice(["prefetch", "demote", "demote", "map"])
        if how == "map":
            fd = os.open(what, os.O_RDONLY)
            try:
                for segment in offered(fd) if what.is_file() else []:
                    self._note(segment)
            finally:
                os.close(fd)
        else:
            os.setxattr(what, f"user.kvfs.{how}", b"1")
        self.counts[how] += 1

    # -- what it knows

    def _load(self) -> None:
        if self.notes.exists():
            self._told, self._known = pickle.loads(self.notes.read_bytes())

    def close(self) -> None:
        self.notes.write_bytes(pickle.dumps((self._told, self._known)))


def _marks(fd: int) -> tuple[int, ...]:
    """Those that the lines of a file may have. None before the first is written."""
    try:
        return marks_from(os.getxattr(fd, MARKS_XATTR).decode())
    except OSError as failure:
        if failure.errno == errno.ENODATA:
            return ()
        raise


def _foreign(part: Part, marks: set[int]) -> str | None:
    """What is there that is not this file's. What is being appended is seen behind the end."""
    lines = Lines.of(part.data + part.tail, part.offset)
    wrong = lines.wrong(marks)
    return f"{len(wrong)} lines are wrong; {lines.describe(int(wrong[0]))}" if len(wrong) else None


def hunt(is_told_to_stop: IsOver, mountpoint: Path, notes: Path, seed: int) -> Counter[str]:
    """Look at the files of others for bytes that are not theirs."""
    hunter = Hunter(mountpoint, notes, random.Random(seed))
    try:
        hunter.hunt(is_told_to_stop)
    except OSError as failure:
        if failure.errno not in GONE and os.path.ismount(mountpoint):
            raise Broken(f"a hunter: {failure}") from failure
        hunter.counts["gone"] += 1
    finally:
        hunter.close()
    return hunter.counts

"""A writer: a process that churns in a directory of its own, and holds the mount to all that it
was answered.

It writes, appends, overwrites, cuts and grows files, renames them over each other and to other
sessions, links, removes, forks, fsyncs, keeps removed files open, and looks at what it has by
every way to read. A full ring is an answer like any other. It ends at SIGTERM, when it was full
so many times, or when the mount is gone; started again it finds out what became of the operation
that was under way, and checks everything. Exits 1 with what is wrong.
"""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.trials.crew import IsOver
from scripts.trials.ledger import Ledger
from scripts.trials.paint import Painting, Stroke, difference
from scripts.trials.reading import WAYS, whole
from scripts.trials.ring import Broken
from scripts.trials.tree import (
    MARKS_XATTR,
    Action,
    File,
    Tree,
    marks_value,
    names_below,
    session_of,
)

GONE = (errno.ENOTCONN, errno.ECONNABORTED)
_SIZES = (3_000, 40_000, 300_000, 2_000_000)
_FILE_MAX = 3_000_000
_STROKES_MAX = 40
_SESSIONS_MAX = 8
_HELD_MAX = 4
_POOL = "pool"
_CODECS = ("auto", "none", "zstd", "planes")
_KINDS = {
    "add": 30, "replace": 15, "append": 15, "overwrite": 15, "truncate": 6, "move": 2, "link": 3,
    "unlink": 4, "fork": 1, "drop": 1, "sync": 2, "look": 12, "hold": 2, "release": 2,
}  # fmt: skip
# For a while after a write found no space: less is added than is taken away.
_KINDS_FULL = _KINDS | {"add": 4, "replace": 15, "unlink": 20, "drop": 3}
_FULL_OPERATIONS = 20
_NOTICE_SECONDS = 10
_REQUEST_MAX = 1024 * 1024


@dataclass(slots=True)
class _Held:
    """A file that has lost its name and is open."""

    fd: int
    painting: Painting


@dataclass(slots=True)
class Writer:
    """Works in `home` by the `ledger`. All that it writes begins and ends at multiples of `grain`
    bytes; `reclaims`: units may be gone."""

    home: Path
    ledger: Ledger
    rng: random.Random
    grain: int = 1
    reclaims: bool = False
    full_max: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _held: list[_Held] = field(default_factory=list)
    _full_for: int = 0

    @property
    def tree(self) -> Tree:
        return self.ledger.tree

    # -- working

    def churn(self, is_told_to_stop: IsOver) -> None:
        """Until it is, or was full `full_max` times. Raises OSError when the mount is gone."""
        while not is_told_to_stop() and not 0 < self.full_max <= self.counts["full"]:
            kinds = _KINDS_FULL if self._full_for > 0 else _KINDS
            self._full_for -= 1
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            if kind == "look":
                self._look()
            elif kind == "hold":
                self._hold()
            elif kind == "release":
                self._release()
            else:
                self._do(self._choose(kind))
        while self._held:
            self._release()

    def _do(self, actions: list[Action]) -> bool:
        """What belongs together; each is an operation for itself. Whether all were done."""
        return all(self._perform(action) for action in actions)

    def _perform(self, action: Action) -> bool:
        self.ledger.intends(action)
        try:
            written = action.run(self.home)
        except OSError as failure:
            if failure.errno in GONE:
                raise
            self.ledger.refused()
            self._refused(action, failure)
            return False
        is_short = action.stroke is not None and written < action.stroke.end - action.stroke.start
        if is_short:
            os.statvfs(self.home)  # raises where the daemon died between two requests of it
            self._is_full()
        self.ledger.answered(action, written)
        self.counts[action.kind] += 1
        self.counts["bytes"] += written
        return not is_short

    def _refused(self, action: Action, failure: OSError) -> None:
        if failure.errno == errno.ENOSPC:
            self._is_full()
        elif failure.errno != errno.ENOENT or not self._misses(action):
            raise Broken(f"{self.home.name}: {action}: {failure}") from failure

    def _is_full(self) -> None:
        self.counts["full"] += 1
        self._full_for = _FULL_OPERATIONS

    def _misses(self, action: Action) -> bool:
        """Whether something that it needs was reclaimed, which is forgotten then."""
        if not self.reclaims:
            return False
        limit = time.monotonic() + _NOTICE_SECONDS
        while not self._forgets(action):
            if time.monotonic() > limit:
                return False
            time.sleep(0.05)  # the kernel is told of what is gone, from a thread, children first
        self.counts["found reclaimed"] += 1
        return True

    def _forgets(self, action: Action) -> bool:
        """Whether a session, or a file of a pool, that it needs is not there."""
        paths = {action.path, action.target} & self.tree.names.keys()
        in_pools = {path for path in paths if session_of(path) == _POOL}
        needed = (action.sessions & self.tree.sessions) | in_pools
        missing = [path for path in needed if not os.path.lexists(self.home / path)]
        for path in missing:
            if path in self.tree.sessions:
                self.tree.forget(path)
            elif path in self.tree.names:
                self.tree.remove(path)
        return bool(missing)

    # -- choosing

    def _choose(self, kind: str) -> list[Action]:
        rng, tree = self.rng, self.tree
        if _POOL not in tree.sessions:
            return self._new_session(_POOL, "pool")
        sessions = sorted(tree.sessions - {_POOL})
        if not sessions or (len(sessions) < _SESSIONS_MAX and rng.random() < 0.03):
            return self._new_session(self._new_name("s"), "session")
        session = rng.choice([*sessions, _POOL])
        paths = tree.of(session)
        if kind == "fork":
            if len(sessions) == _SESSIONS_MAX or session == _POOL:
                return []
            return [Action("fork", session, target=self._new_name("s"))]
        if kind == "drop":
            if len(sessions) < 2 or session == _POOL:
                return []
            return [*(Action("unlink", path) for path in paths), Action("rmdir", session)]
        if kind == "add" or not paths:
            return self._new_file(f"{session}/{self._new_name('f')}")
        return self._change(kind, rng.choice(paths), rng.choice([*sessions, _POOL]))

    def _new_session(self, name: str, unit: str) -> list[Action]:
        actions = [Action("mkdir", name), Action("set", name, unit, name="user.kvfs.unit")]
        if self.rng.random() < 0.5:
            codec = self.rng.choice(_CODECS)
            actions.append(Action("set", name, codec, name="user.kvfs.codec"))
        return actions

    def _change(self, kind: str, path: str, other: str) -> list[Action]:
        file = self.tree.file(path)
        size = file.painting.size
        is_long = size > _FILE_MAX or len(file.painting.strokes) > _STROKES_MAX
        match kind:
            case "truncate":
                return [Action("truncate", path, size=self._place(size + 10_000))]
            case "unlink" | "sync":
                return [Action(kind, path)]
            case "move":
                return [Action("rename", path, target=f"{other}/{self._new_name('m')}")]
            case "link":
                return [Action("link", path, target=f"{other}/{self._new_name('l')}")]
            case "append" | "overwrite" if not is_long:
                start = size if kind == "append" else self._place(size + 1)
                return self._stroke(path, file, start, self._length())
        temporary = f"{session_of(path)}/{self._new_name('t')}"
        return [*self._new_file(temporary), Action("rename", temporary, target=path)]

    def _new_file(self, path: str) -> list[Action]:
        return [Action("create", path), *self._stroke(path, File(), 0, self._length())]

    def _stroke(self, path: str, file: File, start: int, length: int) -> list[Action]:
        marks = file.marks
        actions = []
        if file.needs_mark:
            marks = (*marks, self.rng.getrandbits(63))
            actions.append(Action("set", path, marks_value(marks), name=MARKS_XATTR))
        stroke = Stroke(marks[-1], self.rng.getrandbits(40), start, start + length)
        # The kernel sends a longer one in several requests at once, which arrive in any order.
        is_direct = length <= _REQUEST_MAX and self.rng.random() < 0.2
        return [*actions, Action("write", path, stroke=stroke, direct=is_direct)]

    def _place(self, end: int) -> int:
        return self.rng.randrange(end) // self.grain * self.grain

    def _length(self) -> int:
        return max(self._place(self.rng.choice(_SIZES)), self.grain)

    def _new_name(self, letter: str) -> str:
        return f"{letter}{self.rng.getrandbits(40):x}"

    # -- looking

    def _look(self) -> None:
        """At a file that it has, by some way."""
        if not self.tree.names:
            return
        path = self.rng.choice(sorted(self.tree.names))
        way = self.rng.choice(sorted(WAYS))
        fd = self._open(path)
        if fd is None:
            return
        try:
            part = WAYS[way](fd, self.rng)
        finally:
            os.close(fd)
        expected = self.tree.file(path).painting.render()
        is_whole = way in ("read", "mmap")
        wanted = expected if is_whole else expected[part.offset : part.offset + len(part.data)]
        self._compare(f"{path} by {way}, from byte {part.offset} on", part.data, wanted)
        if any(part.tail):
            raise Broken(f"{self.home.name}/{path}: behind its end lies {part.tail[:64].hex()}")
        self.counts[f"looked by {way}"] += bool(part.data)

    def _open(self, path: str) -> int | None:
        """None when it was reclaimed."""
        try:
            return os.open(self.home / path, os.O_RDONLY)
        except FileNotFoundError:
            if self._misses(Action("look", path)):
                return None
            raise Broken(f"{self.home.name}/{path} is not there") from None

    def _compare(self, name: str, found: bytes, expected: bytearray) -> None:
        told = difference(found, expected)
        if told:
            raise Broken(f"{self.home.name}/{name}: {told}")

    def _hold(self) -> None:
        """Remove a file and keep it open."""
        if len(self._held) == _HELD_MAX or not self.tree.names:
            return
        path = self.rng.choice(sorted(self.tree.names))
        painting, is_last = self.tree.file(path).painting, self.tree.links(path) == 1
        fd = self._open(path)
        if fd is None:
            return
        if is_last and self._perform(Action("unlink", path)):
            self._held.append(_Held(fd, painting))
        else:
            os.close(fd)

    def _release(self) -> None:
        if self._held:
            held = self._held.pop(self.rng.randrange(len(self._held)))
            found = whole(held.fd, self.rng).data
            os.close(held.fd)
            self._compare("(removed, open)", found, held.painting.render())

    # -- checking

    def check(self) -> None:
        """All of it, and begin anew with what is there."""
        self._settle()
        self._check_names()
        for path in sorted(self.tree.names):
            self._check_file(path)
        self.ledger.begin()

    def _settle(self) -> None:
        """What became of the operation that was under way."""
        action, self.ledger.doubtful = self.ledger.doubtful, None
        if action is None:
            return
        path, target = self.home / action.path, self.home / action.target
        match action.kind:
            case "write":
                written = self._written(action) if path.exists() else 0
                action.apply(self.tree, written)
                return
            case "mkdir" | "create":
                is_done = path.exists()
            case "unlink" | "rmdir" | "rename":
                is_done = not path.exists()
            case "link" | "fork":
                is_done = target.exists()
            case "truncate":
                is_done = path.exists() and path.stat().st_size == action.size
            case "set":
                is_done = _xattr(path, action.name) == action.target
            case _:
                is_done = False
        if is_done:
            action.apply(self.tree, 0)

    def _written(self, action: Action) -> int:
        """The kernel sends a long write in several requests: how much of it is there."""
        stroke = action.stroke
        assert stroke is not None
        found = np.frombuffer((self.home / action.path).read_bytes(), np.uint8)
        there = found[stroke.start : stroke.end]
        differs = there != np.frombuffer(stroke.data, np.uint8)[: len(there)]
        return int(np.argmax(differs)) if differs.any() else len(there)

    def _check_names(self) -> None:
        """Where units may go meanwhile, it is looked at again before it is wrong."""
        limit = time.monotonic() + (_NOTICE_SECONDS if self.reclaims else 0)
        while (told := self._wrong_names()) is not None:
            if time.monotonic() >= limit:
                raise Broken(f"{self.home.name}: {told}")
            time.sleep(0.2)

    def _wrong_names(self) -> str | None:
        """After what was reclaimed is forgotten."""
        found, reclaimed = names_below(self.home), self._reclaimed()
        for session in self.tree.sessions - found.keys():
            if f"{self.home.name}/{session}" in reclaimed:
                self.tree.forget(session)
                self.counts["found reclaimed"] += 1
        for path in self.tree.of(_POOL):
            is_there = path.partition("/")[2] in found.get(_POOL, ())
            if not is_there and f"{self.home.name}/{path}" in reclaimed:
                self.tree.remove(path)
                self.counts["found reclaimed"] += 1
        expected = self.tree.listing
        names = [
            f"{session}: lost {sorted(wanted - there)}, and should not be there "
            f"{sorted(there - wanted)}"
            for session in sorted(found.keys() | expected.keys())
            if (wanted := expected.get(session, set())) != (there := found.get(session, set()))
            or (session in found) != (session in expected)
        ]
        return "; ".join(names) or None

    def _reclaimed(self) -> set[str]:
        if not self.reclaims:
            return set()
        lines = (self.home.parent / ".kvfs/log").read_text().splitlines()
        return {json.loads(line)["path"] for line in lines}

    def _check_file(self, path: str) -> None:
        if path not in self.tree.names:
            return
        fd = self._open(path)
        if fd is None:
            return
        try:
            links, found = os.fstat(fd).st_nlink, whole(fd, self.rng).data
        finally:
            os.close(fd)
        self._compare(path, found, self.tree.file(path).painting.render())
        if not self.reclaims and links != self.tree.links(path):
            raise Broken(f"{self.home.name}/{path}: {links} links, {self.tree.links(path)} made")
        self.counts["checked"] += len(found)

    def close(self) -> None:
        self.ledger.close()
        for held in self._held:
            os.close(held.fd)

    def empty(self) -> None:
        """Remove all that it has."""
        for path in sorted(self.tree.names):
            self._perform(Action("unlink", path))
        for session in sorted(self.tree.sessions):
            self._perform(Action("rmdir", session))
        if not self.reclaims and os.listdir(self.home):
            raise Broken(f"{self.home.name}: all is removed, and there is {os.listdir(self.home)}")


def _xattr(path: Path, name: str) -> str | None:
    try:
        return os.getxattr(path, name).decode()
    except OSError:
        return None


# -- the process ----------------------------------------------------------------------------


def write(
    is_told_to_stop: IsOver,
    home: Path,
    ledger: Path,
    seed: int,
    *,
    grain: int = 1,
    reclaims: bool = False,
    full_max: int = 0,
) -> Counter[str]:
    """Check what is there, and go on."""
    return _member(
        Writer(home, Ledger.load(ledger), random.Random(seed), grain, reclaims, full_max),
        lambda writer: writer.churn(is_told_to_stop),
    )


def check(is_told_to_stop: IsOver, home: Path, ledger: Path, *, reclaims: bool) -> Counter[str]:
    """Only that."""
    writer = Writer(home, Ledger.load(ledger), random.Random(0), reclaims=reclaims)
    return _member(writer, lambda writer: None)


def empty(is_told_to_stop: IsOver, home: Path, ledger: Path, *, reclaims: bool) -> Counter[str]:
    """Check what is there, and remove it."""
    writer = Writer(home, Ledger.load(ledger), random.Random(0), reclaims=reclaims)
    return _member(writer, Writer.empty)


def _member(writer: Writer, work: Callable[[Writer], None]) -> Counter[str]:
    try:
        writer.check()
        work(writer)
    except OSError as failure:
        if failure.errno not in GONE:
            raise Broken(f"{writer.home.name}: {failure}") from failure
        writer.counts["gone"] += 1
    finally:
        writer.close()
    return writer.counts

"""What a writer did, as values: operations, and the tree that they make."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.trials.paint import Painting, Stroke

MARKS_XATTR = "user.trial.marks"
Names = dict[str, set[str]]


@dataclass(frozen=True, slots=True)
class File:
    """An inode: `painting` is what it contains, `marks` those that its lines may have, the last
    one that of what is written next. A fork and its original each need a new one before they
    are written to: then neither shows what the other wrote since."""

    painting: Painting = field(default_factory=Painting)
    marks: tuple[int, ...] = ()
    needs_mark: bool = True


@dataclass(slots=True)
class Tree:
    """Sessions of a writer and the names in them, by their paths below its directory. `files` by
    a number that names the inode, as hard links share it."""

    sessions: set[str] = field(default_factory=set)
    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, File] = field(default_factory=dict)
    numbers: int = 0

    def of(self, session: str) -> list[str]:
        return sorted(path for path in self.names if session_of(path) == session)

    def file(self, path: str) -> File:
        return self.files[self.names[path]]

    def copy(self) -> Tree:
        return Tree(set(self.sessions), dict(self.names), dict(self.files), self.numbers)

    def links(self, path: str) -> int:
        return Counter(self.names.values())[self.names[path]]

    def forget(self, session: str) -> None:
        """It was reclaimed, with all that is in it."""
        self.sessions.discard(session)
        for path in self.of(session):
            self.remove(path)

    def add(self, path: str, file: File) -> None:
        self.numbers += 1
        self.names[path], self.files[self.numbers] = self.numbers, file

    def remove(self, path: str) -> None:
        number = self.names.pop(path)
        if number not in self.names.values():
            del self.files[number]

    def change(self, path: str, file: File) -> None:
        self.files[self.names[path]] = file

    @property
    def listing(self) -> Names:
        """As `names_below` finds it."""
        found: Names = {session: set() for session in self.sessions}
        for path in self.names:
            session, _, name = path.partition("/")
            found[session].add(name)
        return found


def session_of(path: str) -> str:
    return path.partition("/")[0]


def names_below(home: Path) -> Names:
    """The names in each session; it may go meanwhile."""
    found: Names = {}
    for session in os.listdir(home):
        try:
            found[session] = set(os.listdir(home / session))
        except FileNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Action:
    """One operation: `target` is the new name of a rename, a link and a fork, or the value of a
    setting `name`, `size` that of a truncated file, `direct` whether a write passes the page
    cache by."""

    kind: str
    path: str
    target: str = ""
    size: int = 0
    stroke: Stroke | None = None
    direct: bool = False
    name: str = ""

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Action:
        stroke = document["stroke"]
        return cls(**{**document, "stroke": Stroke(**stroke) if stroke else None})

    @property
    def document(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sessions(self) -> set[str]:
        """Those that it needs."""
        paths = [self.path, self.target] if self.kind in ("rename", "link") else [self.path]
        return {session_of(path) for path in paths}

    def run(self, home: Path) -> int:
        """The bytes that were written; 0 where that is no question. Raises OSError."""
        path = home / self.path
        match self.kind:
            case "mkdir":
                path.mkdir()
            case "create":
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            case "set":
                os.setxattr(path, self.name, self.target.encode())
            case "write":
                assert self.stroke is not None
                return _write(path, self.stroke, os.O_DIRECT if self.direct else 0)
            case "truncate":
                os.truncate(path, self.size)
            case "rename":
                path.rename(home / self.target)
            case "link":
                os.link(path, home / self.target)
            case "unlink":
                path.unlink()
            case "rmdir":
                path.rmdir()
            case "fork":
                os.setxattr(path, "user.kvfs.fork", self.target.encode())
            case "sync":
                sync(path)
        return 0

    def apply(self, tree: Tree, written: int) -> None:
        """What it makes of a tree; of a write so many bytes were answered."""
        match self.kind:
            case "mkdir":
                tree.sessions.add(self.path)
            case "create":
                tree.add(self.path, File())
            case "set":
                if self.name == MARKS_XATTR:
                    file = tree.file(self.path)
                    marks = marks_from(self.target)
                    tree.change(self.path, replace(file, marks=marks, needs_mark=False))
            case "write":
                self._apply_write(tree, written)
            case "truncate":
                file = tree.file(self.path)
                tree.change(self.path, replace(file, painting=file.painting.cut(self.size)))
            case "rename":
                self._apply_rename(tree)
            case "link":
                tree.names[self.target] = tree.names[self.path]
            case "unlink":
                tree.remove(self.path)
            case "rmdir":
                tree.sessions.remove(self.path)
            case "fork":
                self._apply_fork(tree)

    def _apply_write(self, tree: Tree, written: int) -> None:
        assert self.stroke is not None
        if written:
            stroke = replace(self.stroke, end=self.stroke.start + written)
            file = tree.file(self.path)
            tree.change(self.path, replace(file, painting=file.painting.with_stroke(stroke)))

    def _apply_rename(self, tree: Tree) -> None:
        number = tree.names[self.path]
        if tree.names.get(self.target) == number:
            return
        if self.target in tree.names:
            tree.remove(self.target)
        del tree.names[self.path]
        tree.names[self.target] = number

    def _apply_fork(self, tree: Tree) -> None:
        tree.sessions.add(self.target)
        copies: dict[int, int] = {}
        for path in tree.of(self.path):
            number = tree.names[path]
            shared = tree.files[number] = replace(tree.files[number], needs_mark=True)
            copy = f"{self.target}/{path.partition('/')[2]}"
            if number in copies:
                tree.names[copy] = copies[number]
            else:
                tree.add(copy, shared)
                copies[number] = tree.names[copy]


def marks_from(value: str) -> tuple[int, ...]:
    return tuple(int(mark, 16) for mark in value.split())


def marks_value(marks: Iterable[int]) -> str:
    return " ".join(f"{mark:x}" for mark in marks)


def _write(path: Path, stroke: Stroke, flags: int) -> int:
    fd = os.open(path, os.O_WRONLY | flags)
    try:
        # On pages, so that the kernel cuts what it sends at multiples of a line.
        with mmap.mmap(-1, stroke.end - stroke.start) as memory:
            memory[:] = stroke.data
            return os.pwrite(fd, memory, stroke.start)
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

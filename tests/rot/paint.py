"""A tree whose files contain what their names say, so that each byte can be judged."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import xxhash

from kvfs.engine.format import ROOT_INODE
from kvfs.engine.io import run
from tests.engine.kit import DIRECTORY, FILE, SYMLINK, Bench

BLOCK = 4096


class Kind(Enum):
    """How the bytes of a file are stored."""

    RAW = b"none"
    ZSTD = b"zstd"
    PLANES = b"planes"


def paint(tag: str, kind: Kind, start: int, end: int) -> bytes:
    """The bytes [start, end) of a pattern without an end that no other tag has."""
    seed = np.uint64(xxhash.xxh64_intdigest(tag.encode()))
    words = np.arange(start // 8, -(-end // 8), dtype=np.uint64) + seed
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    if kind is Kind.ZSTD:
        words &= np.uint64(0x0F0F0F0F0F0F0F0F)
    elif kind is Kind.PLANES:  # of each element of two bytes the upper one says little
        words = (words & np.uint64(0x03FF03FF03FF03FF)) | np.uint64(0x3C003C003C003C00)
    return words.tobytes()[start % 8 : start % 8 + end - start]


@dataclass(slots=True)
class Entry:
    """What is at a path: a file's bytes or a symlink's target in `data`."""

    ino: int
    mode: int
    kind: Kind = Kind.RAW
    data: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Artist:
    """Does things to a store and knows what comes of it. `tree` is what there is by path, the
    root without a name; `versions` every content that a path ever had."""

    bench: Bench
    tree: dict[str, Entry] = field(default_factory=lambda: {"": Entry(ROOT_INODE, DIRECTORY)})
    versions: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    _strokes: int = 0

    def copy(self, bench: Bench) -> Artist:
        """For a store that goes on from here by itself."""
        tree = {
            path: replace(entry, xattrs=dict(entry.xattrs)) for path, entry in self.tree.items()
        }
        versions = defaultdict(list, {path: list(old) for path, old in self.versions.items()})
        return Artist(bench, tree, versions, self._strokes)

    def directory(self, path: str, kind: Kind | None = None) -> None:
        self._make(path, DIRECTORY, kind or Kind.RAW)
        if kind is not None:
            self.xattr(path, b"user.kvfs.codec", kind.value)

    def file(self, path: str, size: int, kind: Kind | None = None) -> None:
        self._make(path, FILE, kind or self.tree[_parent(path)].kind)
        if size:
            self.write(path, 0, size)

    def symlink(self, path: str, target: bytes) -> None:
        self._make(path, SYMLINK, Kind.RAW, target=target)
        self._saw(path, target)

    def write(self, path: str, start: int, end: int) -> None:
        self._strokes += 1
        entry = self.tree[path]
        data = paint(f"{path} {self._strokes}", entry.kind, start, end)
        self.bench.write(entry.ino, data, start)
        self._change(entry.ino, lambda old: old.ljust(start, b"\0")[:start] + data + old[end:])

    def truncate(self, path: str, size: int) -> None:
        entry = self.tree[path]
        run(self.bench.store.set_attributes(entry.ino, size=size))
        self._change(entry.ino, lambda old: old[:size].ljust(size, b"\0"))

    def xattr(self, path: str, name: bytes, value: bytes) -> None:
        entry = self.tree[path]
        run(self.bench.store.set_xattr(entry.ino, name, value))
        for same in self.tree.values():
            if same.ino == entry.ino:
                same.xattrs[name] = value

    def link(self, path: str, new: str) -> None:
        entry = self.tree[path]
        run(self.bench.store.link(entry.ino, self.tree[_parent(new)].ino, _name(new)))
        self.tree[new] = entry
        self.versions[new] += self.versions[path]

    def rename(self, path: str, new: str) -> None:
        """Of what is no directory."""
        parents = self.tree[_parent(path)].ino, self.tree[_parent(new)].ino
        run(self.bench.store.rename(parents[0], _name(path), parents[1], _name(new)))
        self.tree[new] = self.tree.pop(path)
        self.versions[new] += self.versions[path]

    def fork(self, path: str, new: str) -> None:
        store = self.bench.store
        run(store.fork(self.tree[path].ino, _name(new)))
        for old in self.below(path):
            at = new + old.removeprefix(path)
            ino = run(store.lookup(self.tree[_parent(at)].ino, _name(at))).inode.ino
            entry = self.tree[old]
            self.tree[at] = replace(entry, ino=ino, xattrs=dict(entry.xattrs))
            self.versions[at] += self.versions[old]

    def remove(self, path: str) -> None:
        """With all below it."""
        for below in reversed(self.below(path)):
            parent, entry = self.tree[_parent(below)].ino, self.tree.pop(below)
            is_directory = stat.S_ISDIR(entry.mode)
            remove = self.bench.store.rmdir if is_directory else self.bench.store.unlink
            run(remove(parent, _name(below)))

    def below(self, path: str) -> list[str]:
        """A path and those below it, each behind its parent."""
        return sorted(p for p in self.tree if p == path or p.startswith(f"{path}/"))

    def _make(self, path: str, mode: int, kind: Kind, *, target: bytes = b"") -> None:
        parent = self.tree[_parent(path)].ino
        ino = self.bench.make(_name(path), parent, mode, target=target)
        self.tree[path] = Entry(ino, mode, kind, target)
        self._saw(path, target)

    def _change(self, ino: int, changed: Callable[[bytes], bytes]) -> None:
        paths = [path for path, entry in self.tree.items() if entry.ino == ino]
        data = changed(self.tree[paths[0]].data)
        for path in paths:
            self.tree[path].data = data
            self._saw(path, data)

    def _saw(self, path: str, data: bytes) -> None:
        self.versions[path].append(data)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _name(path: str) -> bytes:
    return path.rpartition("/")[2].encode()

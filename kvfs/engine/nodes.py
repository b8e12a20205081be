"""Inodes in use, and what their files are made of."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from dataclasses import dataclass, field

from kvfs.engine.buffer import Kept
from kvfs.engine.codec import CodecChoice, Layout
from kvfs.engine.format import (
    ROOT_INODE,
    Extent,
    Inode,
    Item,
    Slice,
    inode_key,
    key_slot,
    map_key,
    round_up,
)
from kvfs.engine.index import Index
from kvfs.engine.intervals import Intervals
from kvfs.engine.io import Step

FILE_SIZE_MAX = 1 << 62
_TIME_NS_MIN, _TIME_NS_MAX = -(1 << 63), (1 << 63) - 1  # the years 1677 to 2262

Place = tuple[int, int]  # extent id, bytes skipped at its start


def error(number: int, what: bytes | str = "") -> OSError:
    """An OSError with its standard text."""
    return OSError(number, os.strerror(number), what or None)


def nearest_time(time_ns: int | None) -> int | None:
    """The nearest time that an inode can hold, as Linux does it; None stays None."""
    return None if time_ns is None else min(max(time_ns, _TIME_NS_MIN), _TIME_NS_MAX)


@dataclass(slots=True)
class NewExtent:
    """An extent that is not in the ring yet: its bytes are the pieces, in order."""

    extent_id: int
    ino: int
    session_id: int
    offset: int
    size: int
    pieces: list[Kept]
    choice: CodecChoice
    layout: Layout


@dataclass(frozen=True, slots=True)
class Hole:
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a file that is `length` bytes of an extent in the ring, from `skew` on."""

    extent: Extent
    skew: int
    length: int


Part = memoryview | Hole | Stored


def _cut_kept(kept: Kept, start: int, end: int) -> Kept:
    return kept.part(start, end)


def _cut_place(place: Place, start: int, _end: int) -> Place:
    return place[0], place[1] + start


def no_bytes() -> Intervals[Kept]:
    return Intervals(_cut_kept)


@dataclass(slots=True)
class Node:
    """An inode in use.

    `map` is what lies in the ring or is sealed, `dirty` what was written since the last
    seal. `uses` counts the slices of each extent in the map; `unsaved` is the size of
    what has no place in the ring yet.
    """

    inode: Inode
    map: Intervals[Place] = field(default_factory=lambda: Intervals(_cut_place))
    uses: Counter[int] = field(default_factory=Counter)
    dirty: Intervals[Kept] = field(default_factory=no_bytes)
    choice: CodecChoice = CodecChoice.AUTO
    layout: Layout = field(default_factory=Layout)
    codec_version: int = -1
    unsaved: int = 0
    pins: int = 0

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.inode.mode)

    @property
    def taken(self) -> int:
        """Bytes that it takes on the device, what is not there yet included."""
        return self.inode.stored + round_up(self.unsaved)


class Nodes:
    """The nodes in use, and which of them changed since the last seal."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._nodes: dict[int, Node] = {}
        self._touched: dict[int, Node] = {}
        self.count = 0

    def node(self, ino: int) -> Step[Node]:
        """The node of an inode. Raises ENOENT."""
        node = self._nodes.get(ino)
        if node is not None:
            return node
        value = yield from self._index.get(inode_key(ino))
        if value is None:
            raise error(errno.ENOENT)
        node = Node(Inode.unpack(ino, value))
        if stat.S_ISREG(node.inode.mode):
            yield from self._load_map(node)
        return self._nodes.setdefault(ino, node)

    def directory(self, ino: int) -> Step[Node]:
        """A directory that is still there. Raises ENOTDIR, ENOENT."""
        node = yield from self.node(ino)
        if not node.is_directory:
            raise error(errno.ENOTDIR)
        if node.inode.nlink == 0:
            raise error(errno.ENOENT)
        return node

    def refuse_loop(self, moved: int, directory: int) -> Step[None]:
        """A directory cannot go below itself. Raises EINVAL."""
        while directory != ROOT_INODE:
            if directory == moved:
                raise error(errno.EINVAL)
            directory = (yield from self.node(directory)).inode.parent

    def add(self, inode: Inode) -> Node:
        node = self._nodes[inode.ino] = Node(inode)
        self.count += 1
        self.touch(node)
        return node

    def touch(self, node: Node) -> None:
        self._touched[node.inode.ino] = node

    def drop(self, ino: int) -> None:
        self._index.delete(inode_key(ino))
        self._nodes.pop(ino, None)
        self._touched.pop(ino, None)
        self.count -= 1

    @property
    def has_changes(self) -> bool:
        return bool(self._touched)

    def take_touched(self) -> list[Node]:
        touched, self._touched = list(self._touched.values()), {}
        return touched

    def items(self, inodes: list[Inode]) -> list[Item]:
        return [(inode_key(inode.ino), inode.pack()) for inode in inodes]

    def _load_map(self, node: Node) -> Step[None]:
        ino = node.inode.ino
        items = yield from self._index.scan(map_key(ino, 0), map_key(ino, FILE_SIZE_MAX))
        for key, value in items:
            assert value is not None
            part = Slice.unpack(key_slot(key), value)
            node.map.insert(part.offset, part.end, (part.extent_id, part.skew))
            node.uses[part.extent_id] += 1

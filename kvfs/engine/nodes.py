"""Inodes in use, and what their files are made of."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvfs.engine.buffer import Kept
from kvfs.engine.codec import CodecChoice, Layout
from kvfs.engine.format import ROOT_INODE, Inode, Item, inode_key, round_up
from kvfs.engine.index import Index
from kvfs.engine.intervals import Intervals
from kvfs.engine.io import Step
from kvfs.engine.pins import Pins

FILE_SIZE_MAX = 1 << 62
_TIME_NS_MIN, _TIME_NS_MAX = -(1 << 63), (1 << 63) - 1  # the years 1677 to 2262
_IDLE_LOOKED_AT = 8
_KEPT_MIN = 12

Place = tuple[int, int]  # extent id, bytes skipped at its start
T = TypeVar("T")


def error(number: int, what: bytes | str = "") -> OSError:
    """An OSError with its standard text."""
    return OSError(number, os.strerror(number), what or None)


def nearest_time(time_ns: int | None) -> int | None:
    """The nearest time that an inode can hold, as Linux does it; None stays None."""
    return None if time_ns is None else min(max(time_ns, _TIME_NS_MIN), _TIME_NS_MAX)


def _cut_kept(kept: Kept, start: int, end: int) -> Kept:
    return kept.part(start, end)


def _cut_place(place: Place, start: int, _end: int) -> Place:
    return place[0], place[1] + start


def no_bytes() -> Intervals[Kept]:
    return Intervals(_cut_kept)


@dataclass(slots=True)
class Content:
    """What a regular file is made of.

    `map` is what lies in the ring or is sealed, `dirty` what was written since the last
    seal. `uses` counts the slices of each extent in the map; `unsaved` is the size of
    what has no place in the ring yet.
    """

    map: Intervals[Place] = field(default_factory=lambda: Intervals(_cut_place))
    uses: Counter[int] = field(default_factory=Counter)
    dirty: Intervals[Kept] = field(default_factory=no_bytes)
    choice: CodecChoice = CodecChoice.AUTO
    layout: Layout = field(default_factory=Layout)
    codec_version: int = -1
    unsaved: int = 0


@dataclass(slots=True)
class Node:
    """An inode in use. `content` is loaded when it is needed; `batches` counts the
    sealed batches, not committed yet, that speak of it."""

    inode: Inode
    content: Content | None = None
    batches: int = 0

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.inode.mode)

    @property
    def taken(self) -> int:
        """Bytes that it takes on the device, what is not there yet included."""
        unsaved = 0 if self.content is None else self.content.unsaved
        return self.inode.stored + round_up(unsaved)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost when it is forgotten."""
        content = self.content
        return not self.batches and (content is None or not (content.unsaved or content.dirty))


class Nodes:
    """The nodes in use, and which of them changed since the last seal.

    At most `limit` nodes and parts of their contents stay in memory, the least recently
    used go first. `pins` are the inodes that somebody holds.
    """

    def __init__(self, index: Index, limit: int) -> None:
        self._index = index
        self._limit = limit
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        self._touched: dict[int, Node] = {}
        self.on_forget: Callable[[Node], None] = lambda node: None
        self.pins = Pins()
        self.nameless: set[int] = set()
        self.count = 0
        self._keeps = False

    def node(self, ino: int) -> Step[Node]:
        """The node of an inode, as it is now: after a wait it has to be asked for again.
        Raises ENOENT."""
        node = self._nodes.get(ino)
        if node is None:
            value = yield from self._index.get(inode_key(ino))
            node = self._nodes.get(ino)
            if node is None:
                if value is None:
                    raise error(errno.ENOENT)
                node = self._nodes[ino] = Node(Inode.unpack(ino, value))
                if node.inode.nlink == 0:
                    self.nameless.add(ino)
                self.trim(0)
        self._nodes.move_to_end(ino)
        return node

    def in_use(self, ino: int) -> Node | None:
        return self._nodes.get(ino)

    def use(self, inode: Inode) -> Node:
        """The node of an inode as it was just read."""
        return self._nodes.setdefault(inode.ino, Node(inode))

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
        if stat.S_ISREG(inode.mode):
            node.content = Content()
        self.count += 1
        self.touch(node)
        return node

    def touch(self, node: Node) -> None:
        self._touched[node.inode.ino] = node

    def drop(self, ino: int) -> None:
        self._index.delete(inode_key(ino))
        self._nodes.pop(ino, None)
        self._touched.pop(ino, None)
        self.nameless.discard(ino)
        self.count -= 1

    def keeping(self, step: Step[T]) -> Step[T]:
        """Run a step that goes on to change the nodes it looked at: none is forgotten until its
        end, unless it waits. Then it has to look at all of them again."""
        try:
            while True:
                self._keeps = True
                completion = next(step)
                self._keeps = False
                yield completion
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            self._keeps = False
            step.close()

    def trim(self, contents: int) -> None:
        """Forget idle nodes while there are too many, `contents` parts included. The last used
        stay: somebody is about to look at them."""
        looked_at = 0
        while len(self._nodes) + contents > self._limit and looked_at < _IDLE_LOOKED_AT:
            if self._keeps or len(self._nodes) <= _KEPT_MIN:
                return
            ino, node = next(iter(self._nodes.items()))
            if ino in self._touched or not node.is_idle:
                self._nodes.move_to_end(ino)
                looked_at += 1
                continue
            del self._nodes[ino]
            contents -= len(node.content.uses) if node.content else 0
            self.on_forget(node)

    @property
    def has_changes(self) -> bool:
        return bool(self._touched)

    def take_touched(self) -> list[Node]:
        touched, self._touched = list(self._touched.values()), {}
        return touched

    def items(self, inodes: list[Inode]) -> list[Item]:
        return [(inode_key(inode.ino), inode.pack()) for inode in inodes]

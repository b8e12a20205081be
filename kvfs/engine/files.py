"""File data: dirty bytes above a map of extents, and how the one becomes the other."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfs.engine.buffer import Kept, cut
from kvfs.engine.extents import ExtentTable, Known, NewExtent, place_of
from kvfs.engine.format import (
    EXTENT_SIZE_MIN,
    Extent,
    RecordHeader,
    Slice,
    key_slot,
    map_key,
    round_up,
)
from kvfs.engine.index import Index
from kvfs.engine.intervals import Intervals, Run
from kvfs.engine.io import Step, settled
from kvfs.engine.nodes import FILE_SIZE_MAX, Content, Node, Nodes, Place, no_bytes


@dataclass(frozen=True, slots=True)
class Hole:
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a file that is `length` bytes of an extent in the ring, from `skew` on."""

    extent: Extent
    skew: int
    length: int


Part = Kept | Hole | Stored


@dataclass(slots=True)
class SealedFiles:
    """What a seal made of file data: extents to be written; (inode, extent) pairs that
    files took from others and gave up, for their counts of blocks; and the extents that
    nobody refers to."""

    extents: list[Known] = field(default_factory=list)
    gained: list[tuple[int, Known]] = field(default_factory=list)
    freed: list[tuple[int, Known]] = field(default_factory=list)
    dropped: list[Known] = field(default_factory=list)


def extent_limit(file_size: int, extent_max: int) -> int:
    """Extents are 128 KiB, up to `extent_max` (at most 1 MiB) where a file is long."""
    wanted = 1 << max(file_size // 4 - 1, 1).bit_length()
    return min(max(wanted, EXTENT_SIZE_MIN), extent_max)


class Files:
    """`extent_max`: no extent is longer, in bytes."""

    def __init__(self, index: Index, nodes: Nodes, extent_max: int) -> None:
        self._index = index
        self._nodes = nodes
        self._extent_max = extent_max
        self.table = ExtentTable(index)
        self._dirty: dict[int, Node] = {}
        self._gained: list[tuple[int, Known]] = []
        self._freed: list[tuple[int, Known]] = []
        nodes.on_forget = self._forget

    # -- loading

    def node(self, ino: int) -> Step[Node]:
        """The node of a regular file, with its content; of others without. Raises ENOENT."""
        node, content, extents = yield from settled(
            lambda: self._found(ino), self._index.nodes.gathering
        )
        if content is not None:
            node.content = content
            for known in extents:
                self.table.use(known)
            self.trim()
        return node

    def trim(self) -> None:
        """Forget what is idle while too much is in memory: content was loaded, or nodes that
        were made are in the ring now."""
        self._nodes.trim(len(self.table))

    def snapshot(self, ino: int) -> Step[tuple[Node, Content | None, list[Known]]]:
        """A node, what it is made of, and its extents, without taking it into use."""
        node, content, extents = yield from self._found(ino)
        if node.content is not None:
            return node, node.content, [self.table[extent] for extent in node.content.uses]
        return node, content, extents

    def _found(self, ino: int) -> Step[tuple[Node, Content | None, list[Known]]]:
        """A node, and its content if that is not in use yet."""
        node = yield from self._nodes.node(ino)
        if node.content is not None or not stat.S_ISREG(node.inode.mode):
            return node, None, []
        return (node, *(yield from self._load(ino)))

    def _load(self, ino: int) -> Step[tuple[Content, list[Known]]]:
        content = Content()
        items = yield from self._index.scan(map_key(ino, 0), map_key(ino, FILE_SIZE_MAX))
        for key, value in items:
            assert value is not None
            part = Slice.unpack(key_slot(key), value)
            content.map.insert(part.offset, part.end, (part.extent_id, part.skew))
            content.uses[part.extent_id] += 1
        extents = []
        for extent_id in content.uses:
            extents.append((yield from self.table.find(extent_id)))
        return content, extents

    def _forget(self, node: Node) -> None:
        if node.content is not None:
            for extent_id in node.content.uses:
                self.table.let_go(self.table[extent_id])

    # -- reading

    def parts(self, ino: int, offset: int, length: int) -> Step[list[Part]]:
        """What the bytes [offset, offset + length) of a file are, in order, to its end
        at most. Raises EIO when the extent table lacks an extent."""
        node = yield from self.node(ino)
        end = min(offset + length, node.inode.size)
        parts: list[Part] = []
        at = offset
        content = node.content
        if content is None:
            return parts
        for run in content.dirty.overlapping(offset, end):
            if run.start > at:
                self._mapped(content, at, run.start, parts)
            parts.append(run.value)
            at = run.end
        if at < end:
            self._mapped(content, at, end, parts)
        return parts

    def extent_ids(self, ino: int) -> Step[list[int]]:
        """Of all extents that a file is made of, without its dirty bytes. Raises ENOENT."""
        node = yield from self.node(ino)
        return list(node.content.uses) if node.content is not None else []

    def _mapped(self, content: Content, start: int, end: int, parts: list[Part]) -> None:
        at = start
        for run in content.map.overlapping(start, end):
            if run.start > at:
                parts.append(Hole(run.start - at))
            at = run.end
            extent_id, skew = run.value
            known = self.table[extent_id]
            if known.new is not None:
                parts.extend(cut(known.new.pieces, skew, run.end - run.start))
            else:
                parts.append(Stored(place_of(known), skew, run.end - run.start))
        if at < end:
            parts.append(Hole(end - at))

    # -- changing: nodes come with their content

    def write(self, node: Node, offset: int, kept: Kept) -> None:
        content, end = _content(node), offset + len(kept)
        _count_dirty(content, *content.dirty.insert(offset, end, kept))
        node.inode.size = max(node.inode.size, end)
        self._dirty[node.inode.ino] = node

    def truncate(self, node: Node, size: int) -> None:
        content = _content(node)
        if size < node.inode.size:
            _count_dirty(content, *content.dirty.punch(size, FILE_SIZE_MAX))
            self._map_changed(node, content, *content.map.punch(size, FILE_SIZE_MAX))
        node.inode.size = size

    def drop(self, node: Node) -> None:
        if node.content is not None:
            self.truncate(node, 0)
        self._dirty.pop(node.inode.ino, None)

    def discard(self, ino: int, content: Content, extents: list[Known]) -> None:
        """Drop a file that need not be in use; `content` and `extents` are its snapshot."""
        node = self._nodes.in_use(ino)
        if node is not None and node.content is not None:
            self.drop(node)
            return
        for run in content.map:
            self._index.delete(map_key(ino, run.start))
        for known in extents:
            self.table.use(known)
            self.table.refer(known, -content.uses[known.extent_id])
            self.table.let_go(known)

    def _map_changed(
        self, node: Node, content: Content, removed: list[Run[Place]], added: list[Run[Place]]
    ) -> None:
        """Keep index, extent table and the counts of uses in step with a file's map."""
        ino, uses = node.inode.ino, content.uses
        change: Counter[int] = Counter()
        for run in removed:
            self._index.delete(map_key(ino, run.start))
            change[run.value[0]] -= 1
        for run in added:
            extent_id, skew = run.value
            part = Slice(run.start, run.end - run.start, extent_id, skew)
            self._index.put(map_key(ino, run.start), part.pack())
            change[extent_id] += 1
        for extent_id, count in change.items():
            known = self.table[extent_id]
            self.table.refer(known, count)
            uses[extent_id] += count
            if uses[extent_id] == 0:
                del uses[extent_id]
                self._freed.append((ino, known))
                self.table.let_go(known)

    def share(self, node: Node, original: Content, extents: list[Known]) -> None:
        """A new, empty file becomes a copy of one that has no dirty bytes."""
        assert not original.dirty, "what is shared has been sealed"
        content = _content(node)
        for known in extents:
            self.table.use(known)
            self.table.refer(known, original.uses[known.extent_id])
            self._gained.append((node.inode.ino, known))
        for run in original.map:
            extent_id, skew = run.value
            content.map.insert(run.start, run.end, run.value)
            content.uses[extent_id] += 1
            part = Slice(run.start, run.end - run.start, extent_id, skew)
            self._index.put(map_key(node.inode.ino, run.start), part.pack())

    # -- to the ring

    def seal(self, new_id: Callable[[], int]) -> SealedFiles:
        """Dirty runs become extents with ids; their bytes stay readable here until they
        are committed."""
        sealed = SealedFiles()
        # A session's layers lie together, in the order of their names.
        for node in sorted(self._dirty.values(), key=lambda n: (n.inode.parent, n.inode.name)):
            content = _content(node)
            for new in self._new_extents(node, content, new_id):
                known = Known(new.extent_id, new=new)
                self.table.use(known)
                sealed.extents.append(known)
                place = (new.extent_id, 0)
                changed = content.map.insert(new.offset, new.offset + new.size, place)
                self._map_changed(node, content, *changed)
            content.dirty = no_bytes()
        self._dirty = {}
        sealed.gained, self._gained = self._gained, []
        sealed.freed, self._freed = self._freed, []
        sealed.dropped, self.table.dropped = self.table.dropped, []
        return sealed

    def _new_extents(
        self, node: Node, content: Content, new_id: Callable[[], int]
    ) -> Iterator[NewExtent]:
        limit = extent_limit(node.inode.size, self._extent_max)
        inode = node.inode
        for start, end, pieces in _joined(content.dirty, limit):
            yield NewExtent(
                new_id(), inode.ino, inode.parent, start, end - start, pieces,
                content.choice, content.layout,
            )  # fmt: skip

    def placed(
        self, sealed: SealedFiles, records: list[RecordHeader], nodes: list[Node]
    ) -> list[int]:
        """What was sealed has its place in the ring, after all that was sealed before:
        count in the nodes what each file takes there. They are those that changed, whether
        or not dropped since: each unit says what was true then. Returns the inodes whose
        count changed."""
        by_ino = {node.inode.ino: node for node in nodes}
        change: Counter[int] = Counter()
        for known, record in zip(sealed.extents, records, strict=True):
            assert known.new is not None
            known.taken = round_up(record.stored)
            change[record.object_id] += known.taken
            _content(by_ino[record.object_id]).unsaved -= known.new.size
        for ino, known in sealed.gained:
            change[ino] += known.taken
        for ino, known in sealed.freed:
            change[ino] -= known.taken
        for ino in change.keys() & by_ino.keys():
            by_ino[ino].inode.stored += change[ino]
        return list(change)

    def committed(self, sealed: SealedFiles, extents: list[Extent]) -> list[Extent]:
        """It is in the ring: extents are read from there. Returns those that are dead."""
        for known, extent in zip(sealed.extents, extents, strict=True):
            known.new, known.extent = None, extent
        dead = [known.extent for known in sealed.dropped if known.extent is not None]
        for known in sealed.dropped:
            self.table.ended(known)
        return dead


def _content(node: Node) -> Content:
    assert node.content is not None, "the content of a file that changes is loaded"
    return node.content


def _count_dirty(content: Content, removed: list[Run[Kept]], added: list[Run[Kept]]) -> None:
    for run in added:
        content.unsaved += run.end - run.start
    for run in removed:
        content.unsaved -= run.end - run.start


def _joined(dirty: Intervals[Kept], limit: int) -> Iterator[tuple[int, int, list[Kept]]]:
    """Runs that touch are joined, and cut at multiples of `limit`."""
    start = end = -1
    pieces: list[Kept] = []
    for run in dirty:
        at = run.start
        while at < run.end:
            boundary = min((at // limit + 1) * limit, run.end)
            if pieces and (at != end or at % limit == 0):
                yield start, end, pieces
                pieces = []
            if not pieces:
                start = at
            _add_piece(pieces, run.value.part(at - run.start, boundary - run.start))
            at = end = boundary
    if pieces:
        yield start, end, pieces


def _add_piece(pieces: list[Kept], piece: Kept) -> None:
    """What was appended in small parts may lie as one."""
    joined = pieces[-1].joined(piece) if pieces else None
    if joined is None:
        pieces.append(piece)
    else:
        pieces[-1] = joined

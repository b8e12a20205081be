"""File data: dirty bytes above a map of extents, and how the one becomes the other."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator

from kvfs.engine.buffer import Kept
from kvfs.engine.format import (
    EXTENT_SIZE_MIN,
    REFERENCES,
    Extent,
    RecordHeader,
    Slice,
    extent_key,
    map_key,
    references_key,
    round_up,
)
from kvfs.engine.index import Index
from kvfs.engine.intervals import Intervals, Run
from kvfs.engine.io import Step
from kvfs.engine.nodes import (
    FILE_SIZE_MAX,
    Hole,
    NewExtent,
    Node,
    Nodes,
    Part,
    Place,
    Stored,
    error,
    no_bytes,
)


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
        self._dirty: dict[int, Node] = {}
        self._freed: list[tuple[int, int]] = []
        self._in_flight: dict[int, NewExtent] = {}
        self._placed_size: dict[int, int] = {}  # of extents that are placed, not committed

    # -- reading

    def parts(self, ino: int, offset: int, length: int) -> Step[list[Part]]:
        """What the bytes [offset, offset + length) of a file are, in order, to its end
        at most. Raises EIO when the extent table lacks an extent."""
        node = yield from self._nodes.node(ino)
        end = min(offset + length, node.inode.size)
        parts: list[Part] = []
        at = offset
        for run in node.dirty.overlapping(offset, end):
            if run.start > at:
                yield from self._mapped(node, at, run.start, parts)
            parts.append(run.value.data)
            at = run.end
        if at < end:
            yield from self._mapped(node, at, end, parts)
        return parts

    def _mapped(self, node: Node, start: int, end: int, parts: list[Part]) -> Step[None]:
        at = start
        for run in node.map.overlapping(start, end):
            if run.start > at:
                parts.append(Hole(run.start - at))
            at = run.end
            extent_id, skew = run.value
            new = self._in_flight.get(extent_id)
            if new is not None:
                parts.extend(_pieces(new, skew, run.end - run.start))
                continue
            value = yield from self._index.get(extent_key(extent_id))
            if value is None:
                raise error(errno.EIO, f"extent {extent_id} is missing from the extent table")
            parts.append(Stored(Extent.unpack(extent_id, value), skew, run.end - run.start))
        if at < end:
            parts.append(Hole(end - at))

    # -- changing

    def write(self, node: Node, offset: int, kept: Kept) -> None:
        end = offset + len(kept.data)
        self._count_dirty(node, *node.dirty.insert(offset, end, kept))
        node.inode.size = max(node.inode.size, end)
        self._dirty[node.inode.ino] = node

    def truncate(self, node: Node, size: int) -> None:
        if size < node.inode.size:
            self._count_dirty(node, *node.dirty.punch(size, FILE_SIZE_MAX))
            self._map_changed(node, *node.map.punch(size, FILE_SIZE_MAX))
        node.inode.size = size

    def drop(self, node: Node) -> None:
        self.truncate(node, 0)
        self._dirty.pop(node.inode.ino, None)

    def _count_dirty(self, node: Node, removed: list[Run[Kept]], added: list[Run[Kept]]) -> None:
        for run in added:
            node.unsaved += run.end - run.start
        for run in removed:
            node.unsaved -= run.end - run.start

    def _map_changed(self, node: Node, removed: list[Run[Place]], added: list[Run[Place]]) -> None:
        """Keep the index and the count of uses in step with a change of a file's map."""
        ino, uses = node.inode.ino, node.uses
        before = {run.value[0]: uses[run.value[0]] for run in (*removed, *added)}
        for run in removed:
            self._index.delete(map_key(ino, run.start))
            uses[run.value[0]] -= 1
        for run in added:
            extent_id, skew = run.value
            part = Slice(run.start, run.end - run.start, extent_id, skew)
            self._index.put(map_key(ino, run.start), part.pack())
            uses[extent_id] += 1
        for extent_id, old in before.items():
            self._uses_changed(node, extent_id, old, uses[extent_id])

    def _uses_changed(self, node: Node, extent_id: int, old: int, new: int) -> None:
        if new == 0:
            del node.uses[extent_id]
            self._index.delete(extent_key(extent_id))
            self._freed.append((node.inode.ino, extent_id))
        if new > 1 and new != old:
            self._index.put(references_key(extent_id), REFERENCES.pack(new))
        elif old > 1 >= new:
            self._index.delete(references_key(extent_id))

    # -- to the ring

    def seal(self, new_id: Callable[[], int]) -> tuple[list[NewExtent], list[tuple[int, int]]]:
        """Dirty runs become extents with ids; their bytes stay readable here until they
        are committed. Also returns the (inode, extent) pairs that files gave up."""
        extents: list[NewExtent] = []
        # A session's layers lie together, in the order of their names.
        for node in sorted(self._dirty.values(), key=lambda n: (n.inode.parent, n.inode.name)):
            for extent in self._new_extents(node, new_id):
                end = extent.offset + extent.size
                self._map_changed(node, *node.map.insert(extent.offset, end, (extent.extent_id, 0)))
                self._in_flight[extent.extent_id] = extent
                extents.append(extent)
            node.dirty = no_bytes()
        freed = self._freed
        self._dirty, self._freed = {}, []
        return extents, freed

    def _new_extents(self, node: Node, new_id: Callable[[], int]) -> Iterator[NewExtent]:
        limit = extent_limit(node.inode.size, self._extent_max)
        inode = node.inode
        for start, end, pieces in _joined(node.dirty, limit):
            yield NewExtent(
                new_id(), inode.ino, inode.parent, start, end - start, pieces,
                node.choice, node.layout,
            )  # fmt: skip

    def placed(
        self,
        extents: list[NewExtent],
        freed: list[tuple[int, int]],
        records: list[RecordHeader],
        nodes: list[Node],
    ) -> list[int]:
        """What was sealed has its place in the ring, after all that was sealed before:
        count in the nodes what each file takes there. They are those that changed, whether
        or not dropped since: each unit says what was true then. Returns the inodes whose
        count changed."""
        by_ino = {node.inode.ino: node for node in nodes}
        change: Counter[int] = Counter()
        for record in records:
            self._placed_size[record.extent_id] = round_up(record.stored)
            change[record.object_id] += round_up(record.stored)
        for ino, extent_id in freed:
            change[ino] -= self._stored_size(extent_id)
        for extent in extents:
            by_ino[extent.ino].unsaved -= extent.size
        for ino in change.keys() & by_ino.keys():
            by_ino[ino].inode.stored += change[ino]
        return list(change)

    def committed(self, extents: list[NewExtent]) -> None:
        """They are in the ring: they are read from there."""
        for extent in extents:
            del self._in_flight[extent.extent_id]
            del self._placed_size[extent.extent_id]

    def _stored_size(self, extent_id: int) -> int:
        placed = self._placed_size.get(extent_id)
        if placed is not None:
            return placed
        value = self._index.committed(extent_key(extent_id))
        return round_up(Extent.unpack(extent_id, value).stored) if value else 0


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
            pieces.append(run.value.part(at - run.start, boundary - run.start))
            at = end = boundary
    if pieces:
        yield start, end, pieces


def _pieces(extent: NewExtent, skew: int, length: int) -> Iterator[memoryview]:
    """The bytes [skew, skew + length) of an extent that is still in memory."""
    for piece in (kept.data for kept in extent.pieces):
        if skew >= len(piece):
            skew -= len(piece)
            continue
        part = piece[skew : skew + length]
        yield part
        length -= len(part)
        skew = 0
        if length == 0:
            return

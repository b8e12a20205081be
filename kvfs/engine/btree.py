"""Copy-on-write B-trees in the ring: looked up, scanned, and rewritten in batches.

A tree is the Pointer of its root; nothing in it is ever changed in place. An update
rewrites the leaves that changes fall into and the path above them, once for all
changes of a checkpoint, so that what lies idle costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Protocol

from kvfs.engine import metadata
from kvfs.engine.format import (
    NODE_ITEM_OVERHEAD,
    Pointer,
    RecordKind,
    TreeNode,
)
from kvfs.engine.io import Completion, Step, wait
from kvfs.engine.metadata import EncodedRecord
from kvfs.engine.nodecache import NodeCache, UnreadableNode
from kvfs.engine.vault import Vault

NODE_SIZE = 16 * 1024  # packed, before compression
_NODE_MIN = NODE_SIZE // 4
_RUN_MAX = 32


class Keep(Enum):
    """A change that changes nothing: the leaf is rewritten, so that it lies elsewhere."""

    KEEP = 0


Entry = tuple[bytes, bytes]
Change = tuple[bytes, "bytes | Keep | None"]  # None removes


# -- looking ---------------------------------------------------------------------


def get(nodes: NodeCache, root: Pointer, key: bytes) -> Step[bytes | None]:
    """Raises OSError EIO."""
    pointer = root
    while pointer.stored:
        node = yield from nodes.load(pointer)
        if node.level == 0:
            at = _lower(node, key)
            return node.value(at) if at < node.count and node.key(at) == key else None
        pointer = Pointer.unpack(node.value(_child(node, key)))
    return None


def scan(nodes: NodeCache, root: Pointer, low: bytes, high: bytes, limit: int) -> Step[list[Entry]]:
    """Items with low <= key <= high, in order, at most `limit`. Raises OSError EIO."""
    found: list[Entry] = []
    if root.stored:
        yield from _scan(nodes, root, low, high, limit, found)
    return found


def _scan(
    nodes: NodeCache, pointer: Pointer, low: bytes, high: bytes, limit: int, found: list[Entry]
) -> Step[None]:
    node = yield from nodes.load(pointer)
    start = _child(node, low) if node.level else _lower(node, low)
    for number in range(start, node.count):
        if len(found) == limit or (node.key(number) > high and (number > start or not node.level)):
            return
        if node.level:
            child = Pointer.unpack(node.value(number))
            yield from _scan(nodes, child, low, high, limit, found)
        else:
            found.append((node.key(number), node.value(number)))


def pointers(nodes: NodeCache, root: Pointer) -> Step[list[Pointer]]:
    """Of all nodes of a tree."""
    if not root.stored:
        return []
    node, found = (yield from nodes.load(root)), [root]
    if node.level:
        for number in range(node.count):
            found += yield from pointers(nodes, Pointer.unpack(node.value(number)))
    return found


def leaf_end(nodes: NodeCache, root: Pointer, key: bytes) -> Step[bytes | None]:
    """The lowest key beyond the leaf that a key belongs to, or beyond all that is below a node that
    cannot be read; None where there is none."""
    pointer, end = root, None
    while pointer.stored:
        try:
            node = yield from nodes.load(pointer)
        except UnreadableNode:
            break
        if node.level == 0:
            break
        number = _child(node, key)
        if number + 1 < node.count:
            end = node.key(number + 1)
        pointer = Pointer.unpack(node.value(number))
    return end


def leaves_from(
    nodes: NodeCache, root: Pointer, key: bytes
) -> Step[tuple[list[Pointer], bytes | None]]:
    """The nodes on the way to a key, the leaf it belongs to and its later siblings; and the lowest
    key beyond them, None where there is none. Ends with a node that cannot be read."""
    found: list[Pointer] = []
    pointer, end = root, None
    while pointer.stored:
        found.append(pointer)
        try:
            node = yield from nodes.load(pointer)
        except UnreadableNode:
            break
        if node.level == 0:
            break
        number = _child(node, key)
        if node.level == 1:
            found += [Pointer.unpack(node.value(at)) for at in range(number, node.count)]
            break
        if number + 1 < node.count:
            end = node.key(number + 1)
        pointer = Pointer.unpack(node.value(number))
    return found, end


def _lower(node: TreeNode, key: bytes) -> int:
    """The first item that is not below the key."""
    return bisect_left(range(node.count), key, key=node.key)


def _child(node: TreeNode, key: bytes) -> int:
    """The child that a key belongs to: the first takes what is below it too."""
    return max(0, bisect_right(range(node.count), key, key=node.key) - 1)


# -- rewriting -------------------------------------------------------------------


class Nodes(Protocol):
    """Where nodes are read, and those that were just written are kept."""

    @property
    def vault(self) -> Vault: ...

    def load(self, pointer: Pointer) -> Step[TreeNode]: ...

    def keep(self, pointer: Pointer, node: TreeNode) -> None: ...


@dataclass(slots=True)
class Rewrite:
    """One update of a tree. `submit` runs work in a thread, `write` appends nodes to the
    ring. Afterwards `replaced` and `written` name the nodes that went and that came."""

    nodes: Nodes
    submit: Callable[[Callable[[], list[Draft]]], Completion[list[Draft]]]
    write: Callable[[list[EncodedRecord]], Step[list[Pointer]]]
    replaced: list[Pointer] = field(default_factory=list)
    written: list[Pointer] = field(default_factory=list)

    def run(self, root: Pointer, changes: list[Change]) -> Step[Pointer]:
        """The new root. `changes` are by key. Raises OSError."""
        if not changes:
            return root
        top = [root] if root.stored else []
        level = (yield from self.nodes.load(root)).level if top else 0
        entries = yield from self._replace(top, level, [changes])
        while len(entries) > 1:
            level += 1
            entries = yield from self._store(cut(level, entries, self.nodes.vault))
        return Pointer.unpack(entries[0][1]) if entries else Pointer()

    def _replace(
        self, places: list[Pointer], level: int, parts: list[list[Change]]
    ) -> Step[list[Entry]]:
        """Rewrite neighbouring nodes of one level, each with its part of the changes.
        Returns what stands for them in the node above."""
        old = []
        for place in places:
            old.append((yield from self.nodes.load(place)))
        self.replaced += places
        if level == 0:
            work = partial(_changed_leaves, old, parts, self.nodes.vault)
            drafts = yield from wait(self.submit(work))
        else:
            entries = []
            for node, part in zip(old, parts, strict=True):
                entries += yield from self._children(node, part)
            drafts = cut(level, entries, self.nodes.vault)
        return (yield from self._store(drafts))

    def _children(self, node: TreeNode, changes: list[Change]) -> Step[list[Entry]]:
        entries: list[Entry] = []
        done = 0
        for run in _runs(node, changes):
            entries += _entries(node, done, run.first)
            done = run.end
            places = [Pointer.unpack(node.value(child)) for child in range(run.first, done)]
            entries += yield from self._replace(places, node.level - 1, run.parts)
        return entries + _entries(node, done, node.count)

    def _store(self, drafts: list[Draft]) -> Step[list[Entry]]:
        if not drafts:
            return []
        places = yield from self.write([draft.record for draft in drafts])
        self.written += places
        for place, draft in zip(places, drafts, strict=True):
            self.nodes.keep(place, draft.node)
        return [(draft.first, place.pack()) for draft, place in zip(drafts, places, strict=True)]


@dataclass(frozen=True, slots=True)
class Draft:
    """A node that is not placed yet, and its lowest key."""

    first: bytes
    node: TreeNode
    record: EncodedRecord


@dataclass(slots=True)
class _Run:
    """Neighbouring children that change, and what changes in each."""

    first: int
    parts: list[list[Change]]

    @property
    def end(self) -> int:
        return self.first + len(self.parts)


def _runs(node: TreeNode, changes: list[Change]) -> Iterator[_Run]:
    run: _Run | None = None
    at = 0
    while at < len(changes):
        child = _child(node, changes[at][0])
        end = len(changes)
        if child + 1 < node.count:
            end = bisect_left(changes, node.key(child + 1), lo=at, key=itemgetter(0))
        part = changes[at:end]
        if run is not None and child < run.end:
            run.parts[-1] += part
        elif run is not None and child == run.end and len(run.parts) < _RUN_MAX:
            run.parts.append(part)
        else:
            if run is not None:
                yield run
            run = _Run(child, [part])
        if child + 1 < node.count and any(value is None for _, value in part):
            # What is left of it may be little: the neighbour takes it in.
            run.parts.append([])
        at = end
    if run is not None:
        yield run


def _entries(node: TreeNode, start: int, end: int) -> list[Entry]:
    return [(node.key(number), node.value(number)) for number in range(start, end)]


def _changed_leaves(old: list[TreeNode], parts: list[list[Change]], vault: Vault) -> list[Draft]:
    """Runs in a thread."""
    if not old:
        return cut(0, _merged([], parts[0]), vault)
    items: list[Entry] = []
    for node, part in zip(old, parts, strict=True):
        items += _merged(node.items(), part)
    return cut(0, items, vault)


def _merged(items: list[Entry], changes: list[Change]) -> list[Entry]:
    if not changes:
        return items
    merged = dict(items)
    for key, value in changes:
        if value is None:
            merged.pop(key, None)
        elif value is not Keep.KEEP:
            merged[key] = value
    return sorted(merged.items())


def cut(level: int, items: list[Entry], vault: Vault) -> list[Draft]:
    """Full nodes, but for the last two: keys mostly grow, so what is full stays so."""
    overhead = NODE_ITEM_OVERHEAD + (vault.overhead if level == 0 else 0)
    drafts: list[Draft] = []
    group: list[Entry] = []
    size = 0
    left = sum(overhead + len(value) for _, value in items)
    target = _target(left)
    for item in items:
        taken = overhead + len(item[1])
        if group and size + taken > target:
            drafts.append(_draft(level, group, vault))
            left -= size
            group, size, target = [], 0, _target(left)
        group.append(item)
        size += taken
    if group:
        drafts.append(_draft(level, group, vault))
    return drafts


def _target(left: int) -> int:
    return left - _NODE_MIN if NODE_SIZE < left < NODE_SIZE + _NODE_MIN else NODE_SIZE


def _draft(level: int, items: list[Entry], vault: Vault) -> Draft:
    body = TreeNode.pack(level, items)
    stored = body
    if vault.is_on and level == 0:
        stored = TreeNode.pack(0, [(key, value or b"") for key, value in vault.sealed([*items])])
    return Draft(items[0][0], TreeNode(body), metadata.encode(RecordKind.NODE, stored))

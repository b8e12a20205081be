"""The index: ordered items, those that the ring holds and those on their way there.

Three layers, the newest on top. `pending`: changes of operations that are answered
but not yet in the ring; a batch is sealed (its changes become the items of one commit
unit) and later committed (its frames are on the device). `recent`: what was committed
since the last checkpoint; a checkpoint that is being written is `merging` it into the
B-trees. Below them the trees of the last checkpoint, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter

from sortedcontainers import SortedDict

from kvfs.engine import btree, keytable
from kvfs.engine.btree import NODE_SIZE, Change, Rewrite
from kvfs.engine.format import (
    ITEM_OVERHEAD,
    KEY_END,
    KIND_BYTE,
    TABLE_EXTENTS,
    Checkpoint,
    Inode,
    Item,
    ItemKind,
    Pointer,
    key_owner,
    round_up,
)
from kvfs.engine.io import Step
from kvfs.engine.nodecache import NodeCache, UnreadableNode
from kvfs.engine.vault import Vault


@dataclass(slots=True)
class Index:
    """Items by key, newest first. `get` and `scan` are steps: they may wait for nodes."""

    nodes: NodeCache
    checkpoint: Checkpoint
    _recent: SortedDict[bytes, bytes | None] = field(default_factory=SortedDict)
    _merging: SortedDict[bytes, bytes | None] = field(default_factory=SortedDict)
    _pending: SortedDict[bytes, tuple[int, bytes | None]] = field(default_factory=SortedDict)
    _open: dict[bytes, bytes | None] = field(default_factory=dict)
    _batch: int = 0
    _moved: set[bytes] = field(default_factory=set)
    _moved_bytes: int = 0
    _recent_bytes: int = 0
    _pending_bytes: int = 0

    @property
    def vault(self) -> Vault:
        return self.nodes.vault

    # -- looking

    def get(self, key: bytes) -> Step[bytes | None]:
        """The value as it is when this returns. Raises OSError EIO."""
        while True:
            pending = self._pending.get(key)
            if pending is not None:
                value: bytes | None = pending[1]
                return value
            root = self._root(key)
            value = yield from self.committed(key)
            if root == self._root(key) and key not in self._pending:
                return value

    def committed(self, key: bytes) -> Step[bytes | None]:
        """The value as far as it is in the ring. Raises OSError EIO."""
        while True:
            for layer in (self._recent, self._merging):
                if key in layer:
                    found: bytes | None = layer[key]
                    return found
            root = self._root(key)
            value = yield from btree.get(self.nodes, root, key)
            # What came meanwhile may have moved on to where the next checkpoint takes it from.
            if root == self._root(key) and not (key in self._recent or key in self._merging):
                return value

    def scan(self, low: bytes, high: bytes = KEY_END, limit: int = 1 << 62) -> Step[list[Item]]:
        """The items with low <= key <= high, in order, at most `limit`. Both keys are of
        one table. Raises OSError EIO."""
        found: list[Item] = []
        while True:
            below = yield from self._scan_tree(low, high, limit)
            bound = below[-1][0] if len(below) == limit else high
            above, bound = self._above(low, bound, limit)
            merged = {key: value for key, value in below if key <= bound} | above
            for key in sorted(merged):
                value = merged[key]
                if value is not None:
                    found.append((key, value))
                    if len(found) == limit:
                        return found
            if bound == high:
                return found
            low = bound + b"\0"

    def _scan_tree(self, low: bytes, high: bytes, limit: int) -> Step[list[btree.Entry]]:
        while True:
            root = self._root(low)
            entries = yield from btree.scan(self.nodes, root, low, high, limit)
            if root == self._root(low):
                return entries

    def _above(
        self, low: bytes, high: bytes, limit: int
    ) -> tuple[dict[bytes, bytes | None], bytes]:
        """What lies above the trees from `low` up to a bound, which it tells: there may be far
        more than `limit` up to `high`."""
        layers = []
        for layer in (self._merging, self._recent, self._pending):
            keys = list(islice(layer.irange(low, high), limit))
            if len(keys) == limit:
                high = keys[-1]
            layers.append(keys)
        merging, recent, pending = layers
        found: dict[bytes, bytes | None] = {key: self._merging[key] for key in merging}
        found |= {key: self._recent[key] for key in recent}
        found |= {key: self._pending[key][1] for key in pending}
        return {key: value for key, value in found.items() if key <= high}, high

    def _root(self, key: bytes) -> Pointer:
        checkpoint = self.checkpoint
        return checkpoint.extents if key[0] == TABLE_EXTENTS else checkpoint.names

    # -- changing

    def put(self, key: bytes, value: bytes) -> None:
        self._change(key, value)

    def delete(self, key: bytes) -> None:
        self._change(key, None)

    def _change(self, key: bytes, value: bytes | None) -> None:
        self._open[key] = value
        self._forget_pending(key)
        self._pending[key] = (self._batch, value)
        self._pending_bytes += len(value or b"")

    def _forget_pending(self, key: bytes) -> None:
        old = self._pending.pop(key, None)
        self._pending_bytes -= len(old[1] or b"") if old else 0

    @property
    def has_changes(self) -> bool:
        return bool(self._open)

    def seal(self) -> tuple[int, list[Item]]:
        """End the open batch: its number and its changes, by key."""
        sealed, items = self._batch, sorted(self._open.items(), key=itemgetter(0))
        self._batch += 1
        self._open = {}
        return sealed, items

    def settle(self, batch: int, items: list[Item]) -> None:
        """The items of a sealed batch are committed: they no longer lie above."""
        for key, _ in items:
            pending = self._pending.get(key)
            if pending is not None and pending[0] <= batch:
                self._forget_pending(key)

    def apply(self, items: list[Item]) -> None:
        """Change the committed items: a commit unit is in the ring, or was replayed."""
        for key, value in items:
            old = self._recent.pop(key, None)
            self._recent_bytes -= len(old or b"")
            self._recent[key] = value
            self._recent_bytes += len(value or b"")

    def recent_inodes(self) -> Iterator[Inode]:
        """Those that were made or changed since the last checkpoint."""
        for key, value in self._recent.items():
            if key[KIND_BYTE] == ItemKind.INODE and value is not None:
                yield Inode.unpack(key_owner(key), value)

    # -- checkpoints

    @property
    def changes(self) -> int:
        """Items that the next checkpoint has to bring into the trees, at most."""
        return len(self._recent) + len(self._merging) + len(self._pending)

    @property
    def checkpoint_size_max(self) -> int:
        """Bytes that the nodes of the next checkpoint take in the ring, at most. Each
        change rewrites a leaf at most, and all changes together at most all nodes."""
        touched = self._rewritten_by(self.changes) + self._moved_bytes
        rewritten = min(touched, self.checkpoint.node_bytes)
        overhead = ITEM_OVERHEAD + self.vault.overhead
        added = self._recent_bytes + self._pending_bytes + self.changes * overhead
        nodes = (rewritten + added) * 5 // 4 + 4 * round_up(NODE_SIZE)
        return nodes + keytable.size_max(self.vault)

    def grows_by(self, changes: int) -> int:
        """What so many changes may add to the next checkpoint, without their own bytes."""
        return min(self._rewritten_by(changes), self.checkpoint.node_bytes) * 5 // 4

    def _rewritten_by(self, changes: int) -> int:
        return 2 * changes * round_up(NODE_SIZE)

    def move(self, keys: list[bytes], taken: int) -> None:
        """The next checkpoint writes the nodes anew that begin with these keys, and what
        leads to them; they take so many bytes."""
        self._moved.update(keys)
        self._moved_bytes += taken

    def update(self, make: Callable[[], Rewrite]) -> Step[TreeUpdate]:
        """Bring what is recent into the trees; until `checkpointed` it stays above them. Raises
        UnreadableNode, with nothing changed; OSError when the device fails."""
        assert not self._merging, "one checkpoint at a time"
        merging = self._merging = self._recent
        self._recent = SortedDict()
        keys = sorted([*merging, *(key for key in self._moved if key not in merging)])
        changes: list[Change] = [(key, merging.get(key, btree.Keep.KEEP)) for key in keys]
        names = [change for change in changes if change[0][0] != TABLE_EXTENTS]
        extents = [change for change in changes if change[0][0] == TABLE_EXTENTS]
        of_names, of_extents = make(), make()
        try:
            after = replace(
                self.checkpoint,
                names=(yield from of_names.run(self.checkpoint.names, names)),
                extents=(yield from of_extents.run(self.checkpoint.extents, extents)),
            )
        except UnreadableNode:
            merging.update(self._recent)
            self._recent, self._merging = merging, SortedDict()
            self._count_recent()
            raise
        update = TreeUpdate(
            after,
            replaced=[*of_names.replaced, *of_extents.replaced],
            written=[*of_names.written, *of_extents.written],
        )
        update.count_bytes()
        return update

    def checkpointed(self, checkpoint: Checkpoint) -> None:
        """The trees hold everything that was recent."""
        self.checkpoint = checkpoint
        self._merging = SortedDict()
        self._moved = set()
        self._moved_bytes = 0
        self._count_recent()

    def _count_recent(self) -> None:
        self._recent_bytes = sum(len(value or b"") for value in self._recent.values())


@dataclass(slots=True)
class TreeUpdate:
    """New roots, the nodes that they replace, and those that were written."""

    checkpoint: Checkpoint
    replaced: list[Pointer]
    written: list[Pointer]

    def count_bytes(self) -> None:
        change = sum(round_up(node.stored) for node in self.written)
        change -= sum(round_up(node.stored) for node in self.replaced)
        node_bytes = self.checkpoint.node_bytes + change
        self.checkpoint = replace(self.checkpoint, node_bytes=node_bytes)

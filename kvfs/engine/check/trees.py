"""The B-trees of a checkpoint, read whole: what can be read, and the gaps between."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

from kvfs.engine import metadata
from kvfs.engine.check.findings import Finding
from kvfs.engine.device import Device
from kvfs.engine.format import (
    KEY_END,
    POINTER_SIZE,
    TABLE_EXTENTS,
    Checkpoint,
    FormatError,
    Pointer,
    TreeNode,
    round_up,
)
from kvfs.engine.nodecache import opened
from kvfs.engine.ring import Geometry
from kvfs.engine.vault import Vault


@dataclass(frozen=True, slots=True)
class Range:
    """Keys of one of the trees, from `low` on and below `high`."""

    low: bytes
    high: bytes
    is_extents: bool

    def __contains__(self, key: bytes) -> bool:
        return self.low <= key < self.high and is_of_extents(key) == self.is_extents

    def part(self, low: bytes, high: bytes) -> Range:
        return Range(low, high, self.is_extents)


def is_of_extents(key: bytes) -> bool:
    """Whether a key is of the extent table, which has a tree of its own."""
    return key[0] == TABLE_EXTENTS


NAMES = Range(b"", KEY_END + b"\xff", False)
EXTENTS = Range(b"", KEY_END + b"\xff", True)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Ranges of keys that could not be read."""

    ranges: list[Range]

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, key: bytes) -> bool:
        return any(key in gap for gap in self.ranges)

    def touch(self, low: bytes, high: bytes) -> bool:
        """Whether one of the keys from `low` to `high`, which are of one tree, may be missing."""
        is_extents = is_of_extents(low)
        return any(
            gap.low <= high and low < gap.high and gap.is_extents == is_extents
            for gap in self.ranges
        )

    def within(self, other: Gaps) -> Gaps:
        """What is missing here and there."""
        found = []
        for one in self.ranges:
            for two in other.ranges:
                low, high = max(one.low, two.low), min(one.high, two.high)
                if low < high and one.is_extents == two.is_extents:
                    found.append(one.part(low, high))
        return Gaps(found)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf that is whole: the keys that belong to it, its first key, where it lies."""

    keys: Range
    first: bytes
    pointer: Pointer


@dataclass(slots=True)
class Trees:
    """Both trees of a checkpoint. `nodes` are all that are whole, leaves and those above."""

    items: dict[bytes, bytes] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)
    nodes: list[Pointer] = field(default_factory=list)
    gaps: Gaps = field(default_factory=lambda: Gaps([]))
    findings: list[Finding] = field(default_factory=list)

    @property
    def node_bytes(self) -> int:
        return sum(round_up(node.stored) for node in self.nodes)


def read_trees(device: Device, geometry: Geometry, checkpoint: Checkpoint, vault: Vault) -> Trees:
    trees = Trees()
    reader = _Reader(device, geometry, vault, trees)
    for root, keys in ((checkpoint.names, NAMES), (checkpoint.extents, EXTENTS)):
        if root.stored:
            reader.read(root, keys, None, None)
    if not trees.gaps and trees.node_bytes != checkpoint.node_bytes:
        message = f"says {checkpoint.node_bytes} bytes of nodes, there are {trees.node_bytes}"
        trees.findings.append(Finding("checkpoint", message))
    return trees


def load_node(device: Device, geometry: Geometry, pointer: Pointer, vault: Vault) -> TreeNode:
    """Raises FormatError, OSError."""
    if not geometry.contains(pointer.address, round_up(pointer.stored)):
        raise FormatError("it lies outside of the ring")
    return opened(TreeNode(metadata.read(device, pointer)), vault)


@dataclass(slots=True)
class _Reader:
    device: Device
    geometry: Geometry
    vault: Vault
    trees: Trees

    def read(self, pointer: Pointer, keys: Range, first: bytes | None, level: int | None) -> None:
        """The part of a tree below a node. `first` and `level` are what is expected."""
        trees = self.trees
        try:
            node = load_node(self.device, self.geometry, pointer, self.vault)
            _check(node, keys, first, level)
        except (FormatError, OSError) as fault:
            trees.gaps.ranges.append(keys)
            message = f"a node of the index cannot be used: {fault}"
            trees.findings.append(Finding("node", message, address=pointer.address))
            return
        trees.nodes.append(pointer)
        if node.level == 0:
            trees.leaves.append(Leaf(keys, node.key(0), pointer))
            trees.items.update(node.items())
            return
        bounds = [keys.low, *(node.key(number) for number in range(1, node.count)), keys.high]
        for number, (low, high) in enumerate(pairwise(bounds)):
            child = Pointer.unpack(node.value(number))
            self.read(child, keys.part(low, high), node.key(number), node.level - 1)


def _check(node: TreeNode, keys: Range, first: bytes | None, level: int | None) -> None:
    """Raises FormatError."""
    found = [node.key(number) for number in range(node.count)]
    if not found:
        raise FormatError("it is empty")
    if level is not None and node.level != level:
        raise FormatError(f"it is of level {node.level}, not {level}")
    if first is not None and found[0] != first:
        raise FormatError("its first key is not what the node above it says")
    if any(low >= high for low, high in pairwise(found)):
        raise FormatError("its keys are not in order")
    if found[0] not in keys or found[-1] not in keys:
        raise FormatError("its keys belong elsewhere")
    if node.level and any(len(value) != POINTER_SIZE for _, value in node.items()):
        raise FormatError("it points to what is no node")


def unchanged(leaves: list[Leaf], changed: set[bytes]) -> list[Leaf]:
    """The leaves that none of these keys belongs to."""
    of_tree: dict[bool, list[bytes]] = {False: [], True: []}
    for key in sorted(changed):
        of_tree[is_of_extents(key)].append(key)
    kept = []
    for leaf in leaves:
        keys = of_tree[leaf.keys.is_extents]
        at = bisect_left(keys, leaf.keys.low)
        if at == len(keys) or keys[at] not in leaf.keys:
            kept.append(leaf)
    return kept

"""A directory tree as it is at one moment: what fork copies and reclaim removes."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from kvfs.engine.extents import Known
from kvfs.engine.files import Files
from kvfs.engine.format import Dentry, Inode, Xattr
from kvfs.engine.io import Step
from kvfs.engine.names import Names
from kvfs.engine.nodes import Content, Nodes, error

INODES_MAX = 16_384
SLICES_MAX = 200_000


@dataclass(slots=True)
class Original:
    """An inode of the tree, and what goes with it."""

    inode: Inode
    content: Content | None
    extents: list[Known]
    xattrs: list[tuple[int, Xattr]]
    target: bytes | None
    entries: list[tuple[int, Dentry]]


@dataclass(slots=True)
class Tree:
    """A directory tree as it is at one moment, the root first, each inode once."""

    originals: dict[int, Original] = field(default_factory=dict)
    slices: int = 0

    @property
    def items(self) -> int:
        """Items of the index that a copy of it needs, at most."""
        per_inode = sum(
            3 + len(original.xattrs) + len(original.entries) for original in self.originals.values()
        )
        return per_inode + 2 * self.slices

    @property
    def item_bytes(self) -> int:
        """What these items take, without their keys."""
        total = 0
        for original in self.originals.values():
            total += 512 + len(original.target or b"")
            total += sum(len(xattr.value) + 256 for _, xattr in original.xattrs)
            total += 300 * len(original.entries)
        return total + 64 * self.slices


def read_tree(nodes: Nodes, names: Names, files: Files, root: int) -> Step[Tree]:
    """What lies below an inode, itself first. Raises ENOENT; EFBIG for a tree that is too
    large to be one operation."""
    tree = Tree()
    shared: dict[int, Known] = {}
    waiting = [root]
    while waiting:
        ino = waiting.pop()
        if ino in tree.originals:
            continue
        original = yield from _read(nodes, names, files, ino)
        # Files that share an extent count its references in one place.
        original.extents = [shared.setdefault(one.extent_id, one) for one in original.extents]
        tree.originals[ino] = original
        tree.slices += len(original.content.map) if original.content else 0
        if len(tree.originals) > INODES_MAX or tree.slices > SLICES_MAX:
            raise error(errno.EFBIG)
        waiting += [dentry.ino for _, dentry in reversed(original.entries)]
    return tree


def _read(nodes: Nodes, names: Names, files: Files, ino: int) -> Step[Original]:
    node, content, extents = yield from files.snapshot(ino)
    entries = []
    if node.is_directory:
        entries = yield from names.entries(ino, 0, INODES_MAX + 1)
    xattrs = yield from names.xattrs(ino)
    target = yield from names.target(ino)
    return Original(node.inode, content, extents, xattrs, target, entries)

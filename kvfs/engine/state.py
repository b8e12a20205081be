"""The live state: what every answered operation made of the tree.

An operation is prepared (a step that loads what it touches and checks it) and then
done by calling what `prepare` returned, without a wait in between. Errors are
OSError with the errno that POSIX names, raised before anything has changed.
"""

from __future__ import annotations

import errno
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter

from cachetools import LRUCache

from kvfs.engine import ops
from kvfs.engine.buffer import Kept
from kvfs.engine.codec import CodecChoice, layout_of
from kvfs.engine.files import Files, SealedFiles
from kvfs.engine.format import (
    DIRECTORIES_PER_GROUP,
    NAME_LENGTH_MAX,
    ROOT_INODE,
    Counts,
    Extent,
    Inode,
    Item,
    RecordHeader,
    counts_key,
    group_of,
    inode_number,
    key_owner,
    log_key,
    orphan_key,
    symlink_key,
    unit_key,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Step
from kvfs.engine.names import Names
from kvfs.engine.nodes import FILE_SIZE_MAX, Content, Node, Nodes, error
from kvfs.engine.subtree import Original, Tree, read_tree

CODEC_XATTR = b"user.kvfs.codec"
DTYPE_XATTR = b"user.kvfs.dtype"
SHAPE_XATTR = b"user.kvfs.shape"
XATTR_VALUE_MAX = 64 * 1024
_LINKS_MAX = 65_000
_CHOICES_MAX = 1024

Done = Callable[[], "Inode | None"]


@dataclass(slots=True)
class Sealed:
    """The changes since the last seal, as values: what one commit unit will say.

    `inodes` are those of `nodes` as they were; a node may be dropped since.
    """

    batch: int
    items: list[Item]
    nodes: list[Node]
    inodes: list[Inode]
    files: SealedFiles


class State:
    """Everything that operations see and change. Times are ns since the epoch.

    `extent_max`: no extent is longer, in bytes; `nodes_max`: how many nodes, and parts of
    files, stay in memory.
    """

    def __init__(self, index: Index, hash_key: bytes, extent_max: int, nodes_max: int) -> None:
        self._index = index
        self.nodes = Nodes(index, nodes_max)
        self.names = Names(index, hash_key)
        self.files = Files(index, self.nodes, extent_max)
        self._codec_version = 0
        self._choices: LRUCache[tuple[int, int], CodecChoice] = LRUCache(_CHOICES_MAX)
        self._directories_made = 0
        self._counts = Counts()

    def load_counts(self) -> Step[None]:
        value = yield from self._index.get(counts_key())
        if value is not None:
            self._counts = Counts.unpack(value)
            self.nodes.count = self._counts.inodes
            self._directories_made = self._counts.directories_made

    def number_for(self, parent: int, mode: int, serial: int) -> int:
        """An inode number: files lie with their directory, directories with those made at
        about the same time."""
        is_directory = stat.S_ISDIR(mode)
        made = self._directories_made // DIRECTORIES_PER_GROUP
        group = made if is_directory else group_of(parent)
        return inode_number(group, serial, is_directory=is_directory)

    def make_root(self, uid: int, gid: int, time_ns: int) -> None:
        root = Inode(
            ROOT_INODE, stat.S_IFDIR | 0o700, uid, gid, nlink=2, parent=ROOT_INODE,
            atime_ns=time_ns, mtime_ns=time_ns, ctime_ns=time_ns, birth_ns=time_ns,
        )  # fmt: skip
        self.nodes.add(root)

    def orphans(self) -> Step[list[int]]:
        """Inodes without a name that were not dropped."""
        items = yield from self._index.scan(orphan_key(0), orphan_key((1 << 64) - 1))
        return [key_owner(key) for key, _ in items]

    # -- operations

    def prepare(self, op: ops.Operation, data: Callable[[], Kept]) -> Step[Done]:
        """Load and check; the returned callable does it, at once. `data` gives the kept bytes of
        a Write, once it is logged."""
        return self.nodes.keeping(self._prepare(op, data))

    def _prepare(self, op: ops.Operation, data: Callable[[], Kept]) -> Step[Done]:
        match op:
            case ops.Write():
                return (yield from self._write(op, data))
            case ops.Create():
                return (yield from self._create(op))
            case ops.SetAttributes():
                return (yield from self._set_attributes(op))
            case ops.Unlink():
                return (yield from self._unlink(op))
            case ops.Rmdir():
                return (yield from self._rmdir(op))
            case ops.Rename():
                return (yield from self._rename(op))
            case ops.Link():
                return (yield from self._link(op))
            case ops.SetXattr():
                return (yield from self._set_xattr(op))
            case ops.RemoveXattr():
                return (yield from self._remove_xattr(op))
            case ops.Drop():
                return (yield from self._drop(op))
            case ops.Fork():
                return (yield from self._fork(op))
            case ops.Reclaim():
                return (yield from self._reclaim(op))
        raise AssertionError(op)

    def _write(self, op: ops.Write, data: Callable[[], Kept]) -> Step[Done]:
        node = yield from self.files.node(op.ino)
        content = _content_of(node)
        if op.offset + op.length > FILE_SIZE_MAX:
            raise error(errno.EFBIG)
        if content.codec_version != self._codec_version:
            yield from self._resolve_codec(op.ino, content)

        def done() -> Inode:
            self.files.write(node, op.offset, data())
            node.inode.mtime_ns = node.inode.ctime_ns = op.time_ns
            self.nodes.touch(node)
            return node.inode

        return done

    def _create(self, op: ops.Create) -> Step[Done]:
        parent = yield from self.nodes.directory(op.parent)
        slot = yield from self.names.free_slot(op.parent, op.name)
        is_directory = stat.S_ISDIR(op.mode)

        def done() -> Inode:
            inode = Inode(
                op.ino, op.mode, op.uid, op.gid, nlink=2 if is_directory else 1, rdev=op.rdev,
                size=len(op.target), atime_ns=op.time_ns, mtime_ns=op.time_ns,
                ctime_ns=op.time_ns, birth_ns=op.time_ns, parent=op.parent, name=op.name,
            )  # fmt: skip
            self.nodes.add(inode)
            if op.target:
                self.names.put_symlink(op.ino, op.target)
            self._put_name(slot, parent, inode, op.name, op.time_ns)
            parent.inode.nlink += is_directory
            self._directories_made += is_directory
            return inode

        return done

    def _link(self, op: ops.Link) -> Step[Done]:
        parent = yield from self.nodes.directory(op.parent)
        node = yield from self.nodes.node(op.ino)
        if node.is_directory:
            raise error(errno.EPERM)
        if node.inode.nlink == 0:
            raise error(errno.ENOENT)
        if node.inode.nlink >= _LINKS_MAX:
            raise error(errno.EMLINK)
        slot = yield from self.names.free_slot(op.parent, op.name)

        def done() -> Inode:
            node.inode.nlink += 1
            self._moved(node, op.parent, op.name, op.time_ns)
            self._put_name(slot, parent, node.inode, op.name, op.time_ns)
            return node.inode

        return done

    def _unlink(self, op: ops.Unlink) -> Step[Done]:
        parent = yield from self.nodes.directory(op.parent)
        slot, dentry = yield from self.names.existing(op.parent, op.name)
        if stat.S_ISDIR(dentry.type):
            raise error(errno.EISDIR, op.name)
        node = yield from self.nodes.node(dentry.ino)

        def done() -> Inode:
            self._remove_name(slot, parent, op.time_ns)
            self._lose_link(node, op.time_ns)
            return node.inode

        return done

    def _rmdir(self, op: ops.Rmdir) -> Step[Done]:
        parent = yield from self.nodes.directory(op.parent)
        slot, dentry = yield from self.names.existing(op.parent, op.name)
        if not stat.S_ISDIR(dentry.type):
            raise error(errno.ENOTDIR, op.name)
        if not (yield from self.names.is_empty(dentry.ino)):
            raise error(errno.ENOTEMPTY, op.name)
        node = yield from self.nodes.node(dentry.ino)

        def done() -> Inode:
            self._remove_name(slot, parent, op.time_ns)
            parent.inode.nlink -= 1
            self._lose_link(node, op.time_ns)
            return node.inode

        return done

    def _rename(self, op: ops.Rename) -> Step[Done]:
        old_parent = yield from self.nodes.directory(op.parent)
        new_parent = yield from self.nodes.directory(op.new_parent)
        old_slot, dentry = yield from self.names.existing(op.parent, op.name)
        node = yield from self.nodes.node(dentry.ino)
        if node.is_directory:
            yield from self.nodes.refuse_loop(node.inode.ino, op.new_parent)
        if op.exchange:
            return (yield from self._exchange(op, old_slot, node))
        new_slot, target = yield from self.names.look(op.new_parent, op.new_name)
        replaced = None
        if target is not None:
            replaced = yield from self.nodes.node(target[1].ino)
            if not op.replace:
                raise error(errno.EEXIST, op.new_name)
            if replaced is node:
                return lambda: None
            yield from self._check_replace(node, replaced)

        def done() -> Inode | None:
            self._remove_name(old_slot, old_parent, op.time_ns)
            if replaced is not None:
                new_parent.inode.nlink -= replaced.is_directory
                self._lose_link(replaced, op.time_ns)
            old_parent.inode.nlink -= node.is_directory
            new_parent.inode.nlink += node.is_directory
            self._moved(node, op.new_parent, op.new_name, op.time_ns)
            self._put_name(new_slot, new_parent, node.inode, op.new_name, op.time_ns)
            return replaced.inode if replaced else None

        return done

    def _exchange(self, op: ops.Rename, old_slot: int, node: Node) -> Step[Done]:
        old_parent = yield from self.nodes.directory(op.parent)
        new_parent = yield from self.nodes.directory(op.new_parent)
        new_slot, dentry = yield from self.names.existing(op.new_parent, op.new_name)
        other = yield from self.nodes.node(dentry.ino)
        if other.is_directory:
            yield from self.nodes.refuse_loop(other.inode.ino, op.parent)

        def done() -> None:
            moved = node.is_directory - other.is_directory
            old_parent.inode.nlink -= moved
            new_parent.inode.nlink += moved
            self._moved(node, op.new_parent, op.new_name, op.time_ns)
            self._moved(other, op.parent, op.name, op.time_ns)
            self._put_name(new_slot, new_parent, node.inode, op.new_name, op.time_ns)
            self._put_name(old_slot, old_parent, other.inode, op.name, op.time_ns)

        return done

    def _check_replace(self, node: Node, replaced: Node) -> Step[None]:
        if node.is_directory and not replaced.is_directory:
            raise error(errno.ENOTDIR)
        if replaced.is_directory:
            if not node.is_directory:
                raise error(errno.EISDIR)
            if not (yield from self.names.is_empty(replaced.inode.ino)):
                raise error(errno.ENOTEMPTY)

    def _set_attributes(self, op: ops.SetAttributes) -> Step[Done]:
        node = yield from self.nodes.node(op.ino)
        if op.size is not None:
            node = yield from self.files.node(op.ino)
            _content_of(node)
            if not 0 <= op.size <= FILE_SIZE_MAX:
                raise error(errno.EFBIG)

        def done() -> Inode:
            inode = node.inode
            if op.mode is not None:
                inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(op.mode)
            inode.uid = inode.uid if op.uid is None else op.uid
            inode.gid = inode.gid if op.gid is None else op.gid
            if op.size is not None:
                self.files.truncate(node, op.size)
                inode.mtime_ns = op.time_ns
            inode.atime_ns = inode.atime_ns if op.atime_ns is None else op.atime_ns
            inode.mtime_ns = inode.mtime_ns if op.mtime_ns is None else op.mtime_ns
            inode.ctime_ns = op.time_ns
            self.nodes.touch(node)
            return inode

        return done

    def _set_xattr(self, op: ops.SetXattr) -> Step[Done]:
        node = yield from self.nodes.node(op.ino)
        if len(op.name) > NAME_LENGTH_MAX:
            raise error(errno.ERANGE)
        if len(op.value) > XATTR_VALUE_MAX:
            raise error(errno.E2BIG)
        found = yield from self.names.find_xattr(op.ino, op.name)
        slot = found[0] if found else (yield from self.names.free_xattr_slot(op.ino, op.name))

        def done() -> None:
            self.names.put_xattr(op.ino, slot, op.name, op.value)
            self._xattr_changed(node, op.name, op.time_ns)

        return done

    def _remove_xattr(self, op: ops.RemoveXattr) -> Step[Done]:
        node = yield from self.nodes.node(op.ino)
        found = yield from self.names.find_xattr(op.ino, op.name)
        if found is None:
            raise error(errno.ENODATA)
        slot = found[0]

        def done() -> None:
            self.names.remove_xattr(op.ino, slot)
            self._xattr_changed(node, op.name, op.time_ns)

        return done

    def _drop(self, op: ops.Drop) -> Step[Done]:
        found = []
        for ino in op.inos:
            node = yield from self.files.node(ino)
            assert node.inode.nlink == 0, "an inode with names is not dropped"
            belongings = yield from self.names.belongings(ino)
            if (yield from self._index.get(unit_key(ino))) is not None:
                belongings.append(unit_key(ino))
            found.append((node, belongings))

        def done() -> None:
            for node, belongings in found:
                self.files.drop(node)
                for key in belongings:
                    self._index.delete(key)
                self._index.delete(orphan_key(node.inode.ino))
                self.nodes.drop(node.inode.ino)

        return done

    def read_tree(self, root: int) -> Step[Tree]:
        """A directory and all below it. Raises ENOENT, EFBIG."""
        return read_tree(self.nodes, self.names, self.files, root)

    def _fork(self, op: ops.Fork) -> Step[Done]:
        source = yield from self.nodes.directory(op.ino)
        if op.ino == ROOT_INODE:
            raise error(errno.EINVAL)
        parent = yield from self.nodes.directory(source.inode.parent)
        slot = yield from self.names.free_slot(parent.inode.ino, op.name)
        tree = yield from self.read_tree(op.ino)
        if len(tree.originals) > op.serials:
            raise error(errno.EAGAIN)

        def done() -> Inode:
            copies = self._copy_inodes(op, tree)
            for ino, original in tree.originals.items():
                self._copy(original, copies, ino)
            root = copies[op.ino].inode
            root.parent, root.name = parent.inode.ino, op.name
            self._put_name(slot, parent, root, op.name, op.time_ns)
            parent.inode.nlink += 1
            return root

        return done

    def _copy_inodes(self, op: ops.Fork, tree: Tree) -> dict[int, Node]:
        """New inodes by the old ones' numbers: of directories first, so that files lie
        with theirs."""
        copies: dict[int, Node] = {}
        serial = op.serial
        for ino, original in tree.originals.items():
            old = original.inode
            above = copies.get(old.parent)
            number = self.number_for(above.inode.ino if above else ROOT_INODE, old.mode, serial)
            serial += 1
            self._directories_made += stat.S_ISDIR(old.mode)
            copies[ino] = self.nodes.add(
                replace(
                    old,
                    ino=number,
                    stored=0,
                    ctime_ns=op.time_ns,
                    birth_ns=op.time_ns,
                    nlink=2 if stat.S_ISDIR(old.mode) else 0,
                )
            )
        return copies

    def _copy(self, original: Original, copies: dict[int, Node], ino: int) -> None:
        node = copies[ino]
        new = node.inode.ino
        for slot, xattr in original.xattrs:
            self.names.put_xattr(new, slot, xattr.name, xattr.value)
        if original.target is not None:
            self.names.put_symlink(new, original.target)
        for slot, dentry in original.entries:
            child = copies[dentry.ino].inode
            child.parent, child.name = new, dentry.name
            is_directory = stat.S_ISDIR(child.mode)
            child.nlink += not is_directory
            node.inode.nlink += is_directory
            self.names.put(new, slot, child, dentry.name)
        if original.content is not None:
            self.files.share(node, original.content, original.extents)

    def _reclaim(self, op: ops.Reclaim) -> Step[Done]:
        parent = yield from self.nodes.node(op.parent)
        slot, dentry = yield from self.names.existing(op.parent, op.name)
        if dentry.ino != op.ino:
            raise error(errno.ENOENT, op.name)
        tree = yield from read_tree(self.nodes, self.names, self.files, op.ino)
        links = Counter(
            dentry.ino for original in tree.originals.values() for _, dentry in original.entries
        )
        links[op.ino] += 1

        def done() -> Inode:
            self._remove_name(slot, parent, op.time_ns)
            parent.inode.nlink -= stat.S_ISDIR(dentry.type)
            for ino, original in tree.originals.items():
                for below, _ in original.entries:
                    self.names.remove(ino, below)
                self._lose_links(ino, original, links[ino], op.time_ns)
            self._index.delete(unit_key(op.ino))
            self._index.put(log_key(op.number), op.entry)
            self._index.delete(log_key(op.forgotten))
            return parent.inode

        return done

    def _lose_links(self, ino: int, original: Original, count: int, time_ns: int) -> None:
        inode = original.inode
        if not stat.S_ISDIR(inode.mode) and inode.nlink > count:
            node = self.nodes.use(inode)
            node.inode.nlink -= count
            node.inode.ctime_ns = time_ns
            self.nodes.touch(node)
            return
        if original.content is not None:
            self.files.discard(ino, original.content, original.extents)
        for slot, _ in original.xattrs:
            self.names.remove_xattr(ino, slot)
        if original.target is not None:
            self._index.delete(symlink_key(ino))
        self.nodes.drop(ino)

    # -- what operations have in common

    def _put_name(self, slot: int, parent: Node, inode: Inode, name: bytes, time_ns: int) -> None:
        self.names.put(parent.inode.ino, slot, inode, name)
        self._changed_directory(parent, time_ns)

    def _remove_name(self, slot: int, parent: Node, time_ns: int) -> None:
        self.names.remove(parent.inode.ino, slot)
        self._changed_directory(parent, time_ns)

    def _changed_directory(self, parent: Node, time_ns: int) -> None:
        parent.inode.mtime_ns = parent.inode.ctime_ns = time_ns
        self.nodes.touch(parent)

    def _moved(self, node: Node, parent: int, name: bytes, time_ns: int) -> None:
        self._codec_version += node.inode.parent != parent
        node.inode.parent, node.inode.name, node.inode.ctime_ns = parent, name, time_ns
        self.nodes.touch(node)

    def _lose_link(self, node: Node, time_ns: int) -> None:
        node.inode.nlink = 0 if node.is_directory else node.inode.nlink - 1
        node.inode.ctime_ns = time_ns
        if node.inode.nlink == 0:
            self._index.put(orphan_key(node.inode.ino), b"")
            self.nodes.nameless.add(node.inode.ino)
        self.nodes.touch(node)

    def _xattr_changed(self, node: Node, name: bytes, time_ns: int) -> None:
        self._codec_version += name in (CODEC_XATTR, DTYPE_XATTR, SHAPE_XATTR)
        node.inode.ctime_ns = time_ns
        self.nodes.touch(node)

    def _resolve_codec(self, ino: int, content: Content) -> Step[None]:
        """The codec that a file asks for: its own, else the nearest directory's."""
        version = self._codec_version
        found = yield from self.names.xattrs(ino)
        xattrs = {xattr.name: xattr.value for _, xattr in found}
        content.layout = layout_of(xattrs.get(DTYPE_XATTR), xattrs.get(SHAPE_XATTR))
        own = xattrs.get(CODEC_XATTR)
        content.choice = yield from self._own_or_inherited(ino, own, version)
        content.codec_version = version

    def _own_or_inherited(self, ino: int, own: bytes | None, version: int) -> Step[CodecChoice]:
        """What files in a directory inherit is the same for many, so it is remembered."""
        passed: list[int] = []
        while own is None:
            above = yield from self._directory_above(ino)
            choice = CodecChoice.AUTO if above is None else self._choices.get((above, version))
            if above is None or choice is not None:
                break
            own = yield from self.names.xattr(above, CODEC_XATTR)
            passed.append(ino := above)
        else:
            choice = CodecChoice(own.decode())
        assert choice is not None
        for directory in passed:
            self._choices[directory, version] = choice
        return choice

    def _directory_above(self, ino: int) -> Step[int | None]:
        """None at the root, and where a file's last name was in a directory that is gone."""
        try:
            parent = (yield from self.nodes.node(ino)).inode.parent
            yield from self.nodes.node(parent)
        except FileNotFoundError:
            return None
        return None if parent == ino else parent

    # -- to the ring

    @property
    def has_changes(self) -> bool:
        return self._index.has_changes or self.nodes.has_changes

    def seal(self, new_id: Callable[[], int]) -> Sealed:
        """Everything since the last seal."""
        counts = Counts(self.nodes.count, self._directories_made)
        if counts != self._counts:
            self._counts = counts
            self._index.put(counts_key(), counts.pack())
        files = self.files.seal(new_id)
        nodes = self.nodes.take_touched()
        for node in nodes:
            node.batches += 1
        inodes = [replace(node.inode) for node in nodes]
        batch, items = self._index.seal()
        return Sealed(batch, items, nodes, inodes, files)

    def placed(self, sealed: Sealed, records: list[RecordHeader]) -> tuple[list[Item], list[int]]:
        """A sealed batch has its place in the ring, after all batches before it. Returns
        all items of its commit unit, and the inodes whose block count changed."""
        changed = self.files.placed(sealed.files, records, sealed.nodes)
        for inode, node in zip(sealed.inodes, sealed.nodes, strict=True):
            inode.stored = node.inode.stored
        items = [*sealed.items, *self.nodes.items(sealed.inodes)]
        return sorted(items, key=itemgetter(0)), changed

    def committed(self, sealed: Sealed, extents: list[Extent]) -> list[Extent]:
        """A sealed batch is in the ring, its extents where `extents` says. Returns those
        that are dead now."""
        for node in sealed.nodes:
            node.batches -= 1
        dead = self.files.committed(sealed.files, extents)
        self.files.trim()
        return dead


def _content_of(node: Node) -> Content:
    """Only regular files have data. Raises EISDIR, EINVAL."""
    if node.content is None:
        raise error(errno.EISDIR if node.is_directory else errno.EINVAL)
    return node.content

"""The live state: inodes, names, xattrs and file data, including what is answered and
not yet in the ring.

An operation is prepared (a step that loads what it touches and checks it) and then
done by calling what `prepare` returned, without a wait in between. Errors are
OSError with the errno that POSIX names, raised before anything has changed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvfs.engine import ops
from kvfs.engine.codec import ITEM_SIZES, CodecChoice
from kvfs.engine.format import (
    EXTENT_SIZE_MAX,
    EXTENT_SIZE_MIN,
    NAME_COLLISIONS_MAX,
    NAME_LENGTH_MAX,
    REFERENCES,
    ROOT_INODE,
    Dentry,
    Extent,
    Inode,
    Item,
    RecordHeader,
    Slice,
    Xattr,
    dentry_key,
    extent_key,
    inode_key,
    key_slot,
    map_key,
    name_slot,
    orphan_key,
    references_key,
    round_up,
    symlink_key,
    xattr_key,
)
from kvfs.engine.index import Index
from kvfs.engine.intervals import Intervals, Run
from kvfs.engine.io import Step

CODEC_XATTR = b"user.kvfs.codec"
DTYPE_XATTR = b"user.kvfs.dtype"
FILE_SIZE_MAX = 1 << 62
_SLOT_MAX = (1 << 63) - 1
_LINKS_MAX = 65_000
XATTR_VALUE_MAX = 64 * 1024

Place = tuple[int, int]  # extent id, bytes skipped at its start
Done = Callable[[], "Inode | None"]


def error(number: int, what: bytes | str = "") -> OSError:
    """An OSError with its standard text."""
    return OSError(number, os.strerror(number), what or None)


@dataclass(slots=True)
class NewExtent:
    """An extent that is not in the ring yet: its bytes are the pieces, in order."""

    extent_id: int
    ino: int
    session_id: int
    offset: int
    size: int
    pieces: list[memoryview]
    choice: CodecChoice
    item_size: int


@dataclass(slots=True)
class Node:
    """An inode in use. `uses` counts the slices of each extent in this file's map;
    `unsaved` is the size of what is dirty or on its way to the ring."""

    inode: Inode
    map: Intervals[Place]
    uses: Counter[int] = field(default_factory=Counter)
    dirty: Intervals[memoryview] = field(default_factory=lambda: Intervals(_cut_bytes))
    choice: CodecChoice = CodecChoice.AUTO
    item_size: int = 1
    codec_version: int = -1
    unsaved: int = 0
    pins: int = 0

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.inode.mode)


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


@dataclass(slots=True)
class Sealed:
    """The changes since the last seal, as values: what one commit unit will say.

    `freed` names the extents that a file has given up, for its count of blocks.
    """

    batch: int
    items: list[Item]
    inodes: list[Inode]
    extents: list[NewExtent]
    freed: list[tuple[int, int]]


def _cut_bytes(data: memoryview, start: int, end: int) -> memoryview:
    return data[start:end]


def _cut_place(place: Place, start: int, _end: int) -> Place:
    return place[0], place[1] + start


def extent_limit(file_size: int, extent_max: int) -> int:
    """Extents are 128 KiB, up to 1 MiB (or `extent_max`) where a file is long."""
    wanted = 1 << max(file_size // 8, 1).bit_length()
    return min(max(wanted, EXTENT_SIZE_MIN), EXTENT_SIZE_MAX, extent_max)


class State:
    """Everything that operations see and change. Times are ns since the epoch."""

    def __init__(self, index: Index, hash_key: bytes, extent_max: int) -> None:
        self._index = index
        self._hash_key = hash_key
        self._extent_max = extent_max
        self._nodes: dict[int, Node] = {}
        self._touched: dict[int, Node] = {}
        self._dirty: dict[int, Node] = {}
        self._freed: list[tuple[int, int]] = []
        self._inflight: dict[int, NewExtent] = {}
        self._stored: dict[int, int] = {}  # of extents that are placed, not committed
        self._codec_version = 0
        self.inodes = 0

    # -- looking

    def node(self, ino: int) -> Step[Node]:
        """The node of an inode. Raises ENOENT."""
        node = self._nodes.get(ino)
        if node is not None:
            return node
        value = yield from self._index.get(inode_key(ino))
        if value is None:
            raise error(errno.ENOENT)
        node = Node(Inode.unpack(ino, value), Intervals(_cut_place))
        if stat.S_ISREG(node.inode.mode):
            yield from self._load_map(node)
        return self._nodes.setdefault(ino, node)

    def lookup(self, directory: int, name: bytes) -> Step[Dentry | None]:
        found = yield from self._find(directory, name)
        return found[1] if found else None

    def list_directory(
        self, directory: int, after: int, limit: int
    ) -> Step[list[tuple[int, Dentry]]]:
        """Entries whose cookie is above `after`, by cookie."""
        low, high = dentry_key(directory, after + 1), dentry_key(directory, _SLOT_MAX)
        items = yield from self._index.scan(low, high, limit)
        return [(key_slot(key), Dentry.unpack(value)) for key, value in items if value]

    def is_empty(self, directory: int) -> Step[bool]:
        return not (yield from self.list_directory(directory, 0, 1))

    def readlink(self, ino: int) -> Step[bytes]:
        target = yield from self._index.get(symlink_key(ino))
        if target is None:
            raise error(errno.EINVAL)
        return target

    def xattr(self, ino: int, name: bytes) -> Step[bytes | None]:
        found = yield from self._find_xattr(ino, name)
        return found[1].value if found else None

    def xattr_names(self, ino: int) -> Step[list[bytes]]:
        items = yield from self._index.scan(xattr_key(ino, 0), xattr_key(ino, _SLOT_MAX))
        return [Xattr.unpack(value).name for _, value in items if value]

    def parts(self, ino: int, offset: int, length: int) -> Step[list[Part]]:
        """What the bytes [offset, offset + length) of a file are, in order, to its end
        at most."""
        node = yield from self.node(ino)
        end = min(offset + length, node.inode.size)
        parts: list[Part] = []
        at = offset
        for run in node.dirty.overlapping(offset, end):
            if run.start > at:
                yield from self._below(node, at, run.start, parts)
            parts.append(run.value)
            at = run.end
        if at < end:
            yield from self._below(node, at, end, parts)
        return parts

    def _below(self, node: Node, start: int, end: int, parts: list[Part]) -> Step[None]:
        at = start
        for run in node.map.overlapping(start, end):
            if run.start > at:
                parts.append(Hole(run.start - at))
            at = run.end
            extent_id, skew = run.value
            new = self._inflight.get(extent_id)
            if new is not None:
                parts.extend(_pieces(new, skew, run.end - run.start))
                continue
            value = yield from self._index.get(extent_key(extent_id))
            if value is None:
                raise error(errno.EIO, f"extent {extent_id} is missing from the extent table")
            parts.append(Stored(Extent.unpack(extent_id, value), skew, run.end - run.start))
        if at < end:
            parts.append(Hole(end - at))

    # -- operations

    def prepare(self, op: ops.Operation, data: Callable[[], memoryview]) -> Step[Done]:
        """Load and check; the returned callable does it. `data` gives the kept bytes of
        a Write, once it is logged."""
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
        raise AssertionError(op)

    def make_root(self, uid: int, gid: int, time_ns: int) -> None:
        root = Inode(
            ROOT_INODE, stat.S_IFDIR | 0o700, uid, gid, nlink=2, parent=ROOT_INODE,
            atime_ns=time_ns, mtime_ns=time_ns, ctime_ns=time_ns, birth_ns=time_ns,
        )  # fmt: skip
        self._touch(self._add(root))

    def _create(self, op: ops.Create) -> Step[Done]:
        parent = yield from self._directory(op.parent)
        slot = yield from self._free_slot(op.parent, op.name)
        is_directory = stat.S_ISDIR(op.mode)

        def done() -> Inode:
            inode = Inode(
                op.ino, op.mode, op.uid, op.gid, nlink=2 if is_directory else 1, rdev=op.rdev,
                size=len(op.target), atime_ns=op.time_ns, mtime_ns=op.time_ns,
                ctime_ns=op.time_ns, birth_ns=op.time_ns, parent=op.parent, name=op.name,
            )  # fmt: skip
            self._touch(self._add(inode))
            if op.target:
                self._index.put(symlink_key(op.ino), op.target)
            self._put_dentry(slot, parent, inode, op.name, op.time_ns)
            parent.inode.nlink += is_directory
            return inode

        return done

    def _link(self, op: ops.Link) -> Step[Done]:
        parent = yield from self._directory(op.parent)
        node = yield from self.node(op.ino)
        if node.is_directory:
            raise error(errno.EPERM)
        if node.inode.nlink == 0:
            raise error(errno.ENOENT)
        if node.inode.nlink >= _LINKS_MAX:
            raise error(errno.EMLINK)
        slot = yield from self._free_slot(op.parent, op.name)

        def done() -> Inode:
            node.inode.nlink += 1
            self._rename_hint(node, op.parent, op.name, op.time_ns)
            self._put_dentry(slot, parent, node.inode, op.name, op.time_ns)
            return node.inode

        return done

    def _unlink(self, op: ops.Unlink) -> Step[Done]:
        parent = yield from self._directory(op.parent)
        slot, dentry = yield from self._existing(op.parent, op.name)
        if stat.S_ISDIR(dentry.type):
            raise error(errno.EISDIR, op.name)
        node = yield from self.node(dentry.ino)

        def done() -> Inode:
            self._remove_dentry(slot, parent, op.time_ns)
            self._lose_link(node, op.time_ns)
            return node.inode

        return done

    def _rmdir(self, op: ops.Rmdir) -> Step[Done]:
        parent = yield from self._directory(op.parent)
        slot, dentry = yield from self._existing(op.parent, op.name)
        if not stat.S_ISDIR(dentry.type):
            raise error(errno.ENOTDIR, op.name)
        if not (yield from self.is_empty(dentry.ino)):
            raise error(errno.ENOTEMPTY, op.name)
        node = yield from self.node(dentry.ino)

        def done() -> Inode:
            self._remove_dentry(slot, parent, op.time_ns)
            parent.inode.nlink -= 1
            self._lose_link(node, op.time_ns)
            return node.inode

        return done

    def _rename(self, op: ops.Rename) -> Step[Done]:
        old_parent = yield from self._directory(op.parent)
        new_parent = yield from self._directory(op.new_parent)
        old_slot, dentry = yield from self._existing(op.parent, op.name)
        node = yield from self.node(dentry.ino)
        target = yield from self._find(op.new_parent, op.new_name)
        if node.is_directory:
            yield from self._refuse_loop(node.inode.ino, op.new_parent)
        if op.exchange:
            return (yield from self._exchange(op, old_slot, node))
        if target is None:
            new_slot = yield from self._free_slot(op.new_parent, op.new_name)
            replaced = None
        else:
            new_slot = target[0]
            replaced = yield from self.node(target[1].ino)
            if not op.replace:
                raise error(errno.EEXIST, op.new_name)
            if replaced is node:
                return lambda: None
            yield from self._check_replace(node, replaced)

        def done() -> Inode | None:
            self._remove_dentry(old_slot, old_parent, op.time_ns)
            if replaced is not None:
                new_parent.inode.nlink -= replaced.is_directory
                self._lose_link(replaced, op.time_ns)
            old_parent.inode.nlink -= node.is_directory
            new_parent.inode.nlink += node.is_directory
            self._rename_hint(node, op.new_parent, op.new_name, op.time_ns)
            self._put_dentry(new_slot, new_parent, node.inode, op.new_name, op.time_ns)
            return replaced.inode if replaced else None

        return done

    def _exchange(self, op: ops.Rename, old_slot: int, node: Node) -> Step[Done]:
        old_parent = yield from self._directory(op.parent)
        new_parent = yield from self._directory(op.new_parent)
        new_slot, dentry = yield from self._existing(op.new_parent, op.new_name)
        other = yield from self.node(dentry.ino)
        if other.is_directory:
            yield from self._refuse_loop(other.inode.ino, op.parent)

        def done() -> None:
            moved = node.is_directory - other.is_directory
            old_parent.inode.nlink -= moved
            new_parent.inode.nlink += moved
            self._rename_hint(node, op.new_parent, op.new_name, op.time_ns)
            self._rename_hint(other, op.parent, op.name, op.time_ns)
            self._put_dentry(new_slot, new_parent, node.inode, op.new_name, op.time_ns)
            self._put_dentry(old_slot, old_parent, other.inode, op.name, op.time_ns)

        return done

    def _set_attributes(self, op: ops.SetAttributes) -> Step[Done]:
        node = yield from self.node(op.ino)
        if op.size is not None:
            if node.is_directory:
                raise error(errno.EISDIR)
            if not 0 <= op.size <= FILE_SIZE_MAX:
                raise error(errno.EFBIG)

        def done() -> Inode:
            inode = node.inode
            if op.mode is not None:
                inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(op.mode)
            inode.uid = inode.uid if op.uid is None else op.uid
            inode.gid = inode.gid if op.gid is None else op.gid
            if op.size is not None:
                self._truncate(node, op.size)
                inode.mtime_ns = op.time_ns
            inode.atime_ns = inode.atime_ns if op.atime_ns is None else op.atime_ns
            inode.mtime_ns = inode.mtime_ns if op.mtime_ns is None else op.mtime_ns
            inode.ctime_ns = op.time_ns
            self._touch(node)
            return inode

        return done

    def _write(self, op: ops.Write, data: Callable[[], memoryview]) -> Step[Done]:
        node = yield from self.node(op.ino)
        if op.offset + op.length > FILE_SIZE_MAX:
            raise error(errno.EFBIG)
        if node.codec_version != self._codec_version:
            yield from self._resolve_codec(node)

        def done() -> Inode:
            inode, end = node.inode, op.offset + op.length
            removed, added = node.dirty.insert(op.offset, end, data())
            self._count_dirty(node, removed, added)
            inode.size = max(inode.size, end)
            inode.mtime_ns = inode.ctime_ns = op.time_ns
            self._dirty[op.ino] = self._touched[op.ino] = node
            return inode

        return done

    def _set_xattr(self, op: ops.SetXattr) -> Step[Done]:
        node = yield from self.node(op.ino)
        if len(op.name) > NAME_LENGTH_MAX:
            raise error(errno.ERANGE)
        if len(op.value) > XATTR_VALUE_MAX:
            raise error(errno.E2BIG)
        found = yield from self._find_xattr(op.ino, op.name)
        slot = found[0] if found else (yield from self._free_xattr_slot(op.ino, op.name))

        def done() -> None:
            self._index.put(xattr_key(op.ino, slot), Xattr(op.name, op.value).pack())
            node.inode.ctime_ns = op.time_ns
            self._touch(node)
            self._codec_version += op.name in (CODEC_XATTR, DTYPE_XATTR)

        return done

    def _remove_xattr(self, op: ops.RemoveXattr) -> Step[Done]:
        node = yield from self.node(op.ino)
        found = yield from self._find_xattr(op.ino, op.name)
        if found is None:
            raise error(errno.ENODATA)
        slot = found[0]

        def done() -> None:
            self._index.delete(xattr_key(op.ino, slot))
            node.inode.ctime_ns = op.time_ns
            self._touch(node)
            self._codec_version += op.name in (CODEC_XATTR, DTYPE_XATTR)

        return done

    def _drop(self, op: ops.Drop) -> Step[Done]:
        node = yield from self.node(op.ino)
        xattrs = yield from self._index.scan(xattr_key(op.ino, 0), xattr_key(op.ino, _SLOT_MAX))
        assert node.inode.nlink == 0, "an inode with names is not dropped"

        def done() -> None:
            self._truncate(node, 0)
            for key, _ in xattrs:
                self._index.delete(key)
            if stat.S_ISLNK(node.inode.mode):
                self._index.delete(symlink_key(op.ino))
            self._index.delete(orphan_key(op.ino))
            self._index.delete(inode_key(op.ino))
            self.inodes -= 1
            for table in (self._nodes, self._touched, self._dirty):
                table.pop(op.ino, None)

        return done

    # -- names

    def _find(self, directory: int, name: bytes) -> Step[tuple[int, Dentry] | None]:
        if len(name) > NAME_LENGTH_MAX:
            raise error(errno.ENAMETOOLONG)
        for slot, dentry in (yield from self._slots(directory, name)):
            if dentry.name == name:
                return slot, dentry
        return None

    def _slots(self, directory: int, name: bytes) -> Step[list[tuple[int, Dentry]]]:
        """The entries whose names have this name's hash."""
        first = name_slot(self._hash_key, name)
        last = first + NAME_COLLISIONS_MAX - 1
        items = yield from self._index.scan(
            dentry_key(directory, first), dentry_key(directory, last)
        )
        return [(key_slot(key), Dentry.unpack(value)) for key, value in items if value]

    def _existing(self, directory: int, name: bytes) -> Step[tuple[int, Dentry]]:
        found = yield from self._find(directory, name)
        if found is None:
            raise error(errno.ENOENT, name)
        return found

    def _free_slot(self, directory: int, name: bytes) -> Step[int]:
        """A slot for a new name. Raises EEXIST."""
        if len(name) > NAME_LENGTH_MAX:
            raise error(errno.ENAMETOOLONG)
        taken = yield from self._slots(directory, name)
        if any(dentry.name == name for _, dentry in taken):
            raise error(errno.EEXIST, name)
        return _unused(name_slot(self._hash_key, name), {slot for slot, _ in taken})

    def _find_xattr(self, ino: int, name: bytes) -> Step[tuple[int, Xattr] | None]:
        first = name_slot(self._hash_key, name)
        low, high = xattr_key(ino, first), xattr_key(ino, first + NAME_COLLISIONS_MAX - 1)
        for key, value in (yield from self._index.scan(low, high)):
            assert value is not None
            xattr = Xattr.unpack(value)
            if xattr.name == name:
                return key_slot(key), xattr
        return None

    def _free_xattr_slot(self, ino: int, name: bytes) -> Step[int]:
        first = name_slot(self._hash_key, name)
        low, high = xattr_key(ino, first), xattr_key(ino, first + NAME_COLLISIONS_MAX - 1)
        items = yield from self._index.scan(low, high)
        return _unused(first, {key_slot(key) for key, _ in items})

    def _directory(self, ino: int) -> Step[Node]:
        """A directory that is still there. Raises ENOTDIR, ENOENT."""
        node = yield from self.node(ino)
        if not node.is_directory:
            raise error(errno.ENOTDIR)
        if node.inode.nlink == 0:
            raise error(errno.ENOENT)
        return node

    def _check_replace(self, node: Node, replaced: Node) -> Step[None]:
        if node.is_directory and not replaced.is_directory:
            raise error(errno.ENOTDIR)
        if replaced.is_directory:
            if not node.is_directory:
                raise error(errno.EISDIR)
            if not (yield from self.is_empty(replaced.inode.ino)):
                raise error(errno.ENOTEMPTY)

    def _refuse_loop(self, moved: int, directory: int) -> Step[None]:
        """A directory cannot go below itself. Raises EINVAL."""
        while directory != ROOT_INODE:
            if directory == moved:
                raise error(errno.EINVAL)
            directory = (yield from self.node(directory)).inode.parent

    def _put_dentry(self, slot: int, parent: Node, inode: Inode, name: bytes, time_ns: int) -> None:
        dentry = Dentry(inode.ino, stat.S_IFMT(inode.mode), name)
        self._index.put(dentry_key(parent.inode.ino, slot), dentry.pack())
        self._changed_directory(parent, time_ns)

    def _remove_dentry(self, slot: int, parent: Node, time_ns: int) -> None:
        self._index.delete(dentry_key(parent.inode.ino, slot))
        self._changed_directory(parent, time_ns)

    def _changed_directory(self, parent: Node, time_ns: int) -> None:
        parent.inode.mtime_ns = parent.inode.ctime_ns = time_ns
        self._touch(parent)

    def _rename_hint(self, node: Node, parent: int, name: bytes, time_ns: int) -> None:
        if node.inode.parent != parent:
            self._codec_version += 1
        node.inode.parent, node.inode.name, node.inode.ctime_ns = parent, name, time_ns
        self._touch(node)

    def _lose_link(self, node: Node, time_ns: int) -> None:
        node.inode.nlink = 0 if node.is_directory else node.inode.nlink - 1
        node.inode.ctime_ns = time_ns
        if node.inode.nlink == 0:
            self._index.put(orphan_key(node.inode.ino), b"")
        self._touch(node)

    def orphans(self) -> Step[list[int]]:
        """Inodes without a name that were not dropped."""
        items = yield from self._index.scan(orphan_key(0), orphan_key((1 << 64) - 1))
        return [int.from_bytes(key[1:9], "big") for key, _ in items]

    # -- data

    def _truncate(self, node: Node, size: int) -> None:
        if size < node.inode.size:
            removed, added = node.dirty.punch(size, FILE_SIZE_MAX)
            self._count_dirty(node, removed, added)
            self._map_changed(node, *node.map.punch(size, FILE_SIZE_MAX))
        node.inode.size = size

    def _count_dirty(
        self, node: Node, removed: list[Run[memoryview]], added: list[Run[memoryview]]
    ) -> None:
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
            slice_ = Slice(run.start, run.end - run.start, extent_id, skew)
            self._index.put(map_key(ino, run.start), slice_.pack())
            uses[extent_id] += 1
        for extent_id, old in before.items():
            self._references_changed(node, extent_id, old, uses[extent_id])

    def _references_changed(self, node: Node, extent_id: int, old: int, new: int) -> None:
        if new == 0:
            del node.uses[extent_id]
            self._index.delete(extent_key(extent_id))
            self._freed.append((node.inode.ino, extent_id))
        if new > 1 and new != old:
            self._index.put(references_key(extent_id), REFERENCES.pack(new))
        elif old > 1 >= new:
            self._index.delete(references_key(extent_id))

    def _load_map(self, node: Node) -> Step[None]:
        ino = node.inode.ino
        items = yield from self._index.scan(map_key(ino, 0), map_key(ino, FILE_SIZE_MAX))
        for key, value in items:
            assert value is not None
            slice_ = Slice.unpack(key_slot(key), value)
            node.map.insert(slice_.offset, slice_.end, (slice_.extent_id, slice_.skew))
            node.uses[slice_.extent_id] += 1

    def _resolve_codec(self, node: Node) -> Step[None]:
        """The codec that a file asks for: its own, else the nearest directory's."""
        version, ino = self._codec_version, node.inode.ino
        dtype = yield from self.xattr(ino, DTYPE_XATTR)
        node.item_size = ITEM_SIZES.get((dtype or b"").decode("ascii", "replace"), 1)
        node.choice = CodecChoice.AUTO
        while True:
            value = yield from self.xattr(ino, CODEC_XATTR)
            if value is not None:
                node.choice = CodecChoice(value.decode())
                break
            if ino == ROOT_INODE:
                break
            ino = (yield from self.node(ino)).inode.parent
        node.codec_version = version

    # -- to the ring

    @property
    def has_changes(self) -> bool:
        return self._index.has_changes or bool(self._touched)

    def seal(self, new_id: Callable[[], int]) -> Sealed:
        """Everything since the last seal. Dirty runs become extents with ids; their
        bytes stay readable here until they are committed."""
        extents: list[NewExtent] = []
        # A session's layers lie together, in the order of their names.
        for node in sorted(self._dirty.values(), key=lambda n: (n.inode.parent, n.inode.name)):
            for extent in self._new_extents(node, new_id):
                changed = node.map.insert(
                    extent.offset, extent.offset + extent.size, (extent.extent_id, 0)
                )
                self._map_changed(node, *changed)
                self._inflight[extent.extent_id] = extent
                extents.append(extent)
            node.dirty = Intervals(_cut_bytes)
        inodes = [replace(node.inode) for node in self._touched.values()]
        batch, items = self._index.seal()
        sealed = Sealed(batch, items, inodes, extents, self._freed)
        self._touched, self._dirty, self._freed = {}, {}, []
        return sealed

    def placed(self, sealed: Sealed, records: list[RecordHeader]) -> Counter[int]:
        """A sealed batch has its place in the ring, after all batches before it: count
        what each file takes there. Returns the change in bytes by inode."""
        change: Counter[int] = Counter()
        for record in records:
            change[record.object_id] += round_up(record.stored)
            self._stored[record.extent_id] = round_up(record.stored)
        for ino, extent_id in sealed.freed:
            change[ino] -= self._stored_size(extent_id)
        for extent in sealed.extents:
            if extent.ino in self._nodes:
                self._nodes[extent.ino].unsaved -= extent.size
        for ino in change:
            if ino in self._nodes:
                self._nodes[ino].inode.stored += change[ino]
        for inode in sealed.inodes:
            node = self._nodes.get(inode.ino)
            inode.stored = node.inode.stored if node else inode.stored + change[inode.ino]
        return change

    def inode_items(self, sealed: Sealed) -> list[Item]:
        """The items of a placed batch's inodes."""
        return [(inode_key(inode.ino), inode.pack()) for inode in sealed.inodes]

    def committed(self, sealed: Sealed) -> None:
        """A sealed batch is in the ring: its extents are read from there."""
        for extent in sealed.extents:
            del self._inflight[extent.extent_id]
            del self._stored[extent.extent_id]

    def _stored_size(self, extent_id: int) -> int:
        placed = self._stored.get(extent_id)
        if placed is not None:
            return placed
        value = self._index.committed(extent_key(extent_id))
        return round_up(Extent.unpack(extent_id, value).stored) if value else 0

    def _new_extents(self, node: Node, new_id: Callable[[], int]) -> Iterator[NewExtent]:
        limit = extent_limit(node.inode.size, self._extent_max)
        inode = node.inode
        for start, end, pieces in _joined(node.dirty, limit):
            yield NewExtent(
                new_id(), inode.ino, inode.parent, start, end - start, pieces,
                node.choice, node.item_size,
            )  # fmt: skip

    def _add(self, inode: Inode) -> Node:
        node = self._nodes[inode.ino] = Node(inode, Intervals(_cut_place))
        self.inodes += 1
        return node

    def _touch(self, node: Node) -> None:
        self._touched[node.inode.ino] = node


def blocks(node: Node) -> int:
    """Bytes that a file takes on the device, what is not there yet included."""
    return node.inode.stored + round_up(node.unsaved)


def _unused(first: int, taken: set[int]) -> int:
    for slot in range(first, first + NAME_COLLISIONS_MAX):
        if slot not in taken:
            return slot
    raise error(errno.ENOSPC, "too many names with one hash in a directory")


def _joined(
    dirty: Intervals[memoryview], limit: int
) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Runs that touch are joined, and cut at multiples of `limit`."""
    start = end = -1
    pieces: list[memoryview] = []
    for run in dirty:
        at, data = run.start, run.value
        while data:
            boundary = (at // limit + 1) * limit
            part = data[: boundary - at]
            if pieces and (at != end or at % limit == 0):
                yield start, end, pieces
                pieces = []
            if not pieces:
                start = at
            pieces.append(part)
            at = end = at + len(part)
            data = data[len(part) :]
    if pieces:
        yield start, end, pieces


def _pieces(extent: NewExtent, skew: int, length: int) -> Iterator[memoryview]:
    """The bytes [skew, skew + length) of an extent that is still in memory."""
    for piece in extent.pieces:
        if skew >= len(piece):
            skew -= len(piece)
            continue
        part = piece[skew : skew + length]
        yield part
        length -= len(part)
        skew = 0
        if length == 0:
            return

"""Names in directories, and extended attributes: items found by the hash of a name."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable

from kvfs.engine.format import (
    NAME_COLLISIONS_MAX,
    NAME_LENGTH_MAX,
    Dentry,
    Inode,
    Xattr,
    dentry_key,
    key_slot,
    name_slot,
    symlink_key,
    xattr_key,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Step
from kvfs.engine.nodes import error

_SLOT_MAX = (1 << 63) - 1


class Names:
    """Looks names up in the index and puts them there. Slots are readdir cookies."""

    def __init__(self, index: Index, hash_key: bytes) -> None:
        self._index = index
        self._hash_key = hash_key

    # -- directory entries

    def find(self, directory: int, name: bytes) -> Step[tuple[int, Dentry] | None]:
        """Slot and entry of a name. Raises ENAMETOOLONG."""
        return (yield from self.look(directory, name))[1]

    def existing(self, directory: int, name: bytes) -> Step[tuple[int, Dentry]]:
        """Raises ENOENT."""
        found = yield from self.find(directory, name)
        if found is None:
            raise error(errno.ENOENT, name)
        return found

    def look(self, directory: int, name: bytes) -> Step[tuple[int, tuple[int, Dentry] | None]]:
        """The slot that a name has, or would get, and what is there of that name. Raises
        ENAMETOOLONG."""
        if len(name) > NAME_LENGTH_MAX:
            raise error(errno.ENAMETOOLONG)
        first = name_slot(self._hash_key, name)
        # Other names of one hash are rare: mostly it is the first, and that is cheap to see.
        value = yield from self._index.get(dentry_key(directory, first))
        if value is not None:
            dentry = Dentry.unpack(value)
            if dentry.name == name:
                return first, (first, dentry)
        items = yield from self._with_hash(first, lambda slot: dentry_key(directory, slot))
        for slot, value in items:
            dentry = Dentry.unpack(value)
            if dentry.name == name:
                return slot, (slot, dentry)
        return _unused(first, {slot for slot, _ in items}), None

    def free_slot(self, directory: int, name: bytes) -> Step[int]:
        """A slot for a new name. Raises EEXIST, ENAMETOOLONG."""
        slot, there = yield from self.look(directory, name)
        if there is not None:
            raise error(errno.EEXIST, name)
        return slot

    def entries(self, directory: int, after: int, limit: int) -> Step[list[tuple[int, Dentry]]]:
        """Entries whose slot is above `after`, by slot."""
        low, high = dentry_key(directory, after + 1), dentry_key(directory, _SLOT_MAX)
        items = yield from self._index.scan(low, high, limit)
        return [(key_slot(key), Dentry.unpack(value)) for key, value in items if value]

    def is_empty(self, directory: int) -> Step[bool]:
        return not (yield from self.entries(directory, 0, 1))

    def put(self, directory: int, slot: int, inode: Inode, name: bytes) -> None:
        dentry = Dentry(inode.ino, stat.S_IFMT(inode.mode), name)
        self._index.put(dentry_key(directory, slot), dentry.pack())

    def remove(self, directory: int, slot: int) -> None:
        self._index.delete(dentry_key(directory, slot))

    # -- symlinks

    def readlink(self, ino: int) -> Step[bytes]:
        """Raises EINVAL."""
        target = yield from self._index.get(symlink_key(ino))
        if target is None:
            raise error(errno.EINVAL)
        return target

    def target(self, ino: int) -> Step[bytes | None]:
        """Of a symlink; None for other inodes."""
        return self._index.get(symlink_key(ino))

    def put_symlink(self, ino: int, target: bytes) -> None:
        self._index.put(symlink_key(ino), target)

    # -- extended attributes

    def xattr(self, ino: int, name: bytes) -> Step[bytes | None]:
        found = yield from self.find_xattr(ino, name)
        return found[1].value if found else None

    def xattr_names(self, ino: int) -> Step[list[bytes]]:
        return [xattr.name for _, xattr in (yield from self.xattrs(ino))]

    def xattrs(self, ino: int) -> Step[list[tuple[int, Xattr]]]:
        """All of an inode, by slot."""
        items = yield from self._index.scan(xattr_key(ino, 0), xattr_key(ino, _SLOT_MAX))
        return [(key_slot(key), Xattr.unpack(value)) for key, value in items if value]

    def find_xattr(self, ino: int, name: bytes) -> Step[tuple[int, Xattr] | None]:
        first = name_slot(self._hash_key, name)
        items = yield from self._with_hash(first, lambda slot: xattr_key(ino, slot))
        for slot, value in items:
            xattr = Xattr.unpack(value)
            if xattr.name == name:
                return slot, xattr
        return None

    def free_xattr_slot(self, ino: int, name: bytes) -> Step[int]:
        first = name_slot(self._hash_key, name)
        taken = yield from self._with_hash(first, lambda slot: xattr_key(ino, slot))
        return _unused(first, {slot for slot, _ in taken})

    def put_xattr(self, ino: int, slot: int, name: bytes, value: bytes) -> None:
        self._index.put(xattr_key(ino, slot), Xattr(name, value).pack())

    def remove_xattr(self, ino: int, slot: int) -> None:
        self._index.delete(xattr_key(ino, slot))

    def belongings(self, ino: int) -> Step[list[bytes]]:
        """The keys of xattrs and symlink target, which go with the inode."""
        items = yield from self._index.scan(xattr_key(ino, 0), xattr_key(ino, _SLOT_MAX))
        target = yield from self._index.get(symlink_key(ino))
        return [key for key, _ in items] + ([symlink_key(ino)] if target is not None else [])

    def _with_hash(self, first: int, key: Callable[[int], bytes]) -> Step[list[tuple[int, bytes]]]:
        """The items of all names with one hash."""
        last = first + NAME_COLLISIONS_MAX - 1
        items = yield from self._index.scan(key(first), key(last))
        return [(key_slot(found), value) for found, value in items if value is not None]


def _unused(first: int, taken: set[int]) -> int:
    for slot in range(first, first + NAME_COLLISIONS_MAX):
        if slot not in taken:
            return slot
    raise error(errno.ENOSPC, "too many names with one hash")

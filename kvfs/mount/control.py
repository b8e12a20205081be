"""What KVFS says of itself through the filesystem: `user.kvfs.*` and `/.kvfs/`."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from uuid import UUID

from kvfs.engine.codec import ITEM_SIZES, Codec, elements
from kvfs.engine.format import Inode
from kvfs.engine.io import Step
from kvfs.engine.nodes import Stored, error
from kvfs.engine.store import Store

PREFIX = b"user.kvfs."
_XATTR_MAX = 64 * 1024 - 1
# What may be set by a user and is kept, and which values say something; the rest of the
# prefix is answered or refused.
_SETTABLE: dict[bytes, Callable[[bytes], bool]] = {
    b"codec": lambda value: True,  # the store checks it
    b"dtype": lambda value: value in [name.encode() for name in ITEM_SIZES],
    b"shape": lambda value: elements(value) is not None,
    b"model": lambda value: True,
}

CONTROL_NAME = b".kvfs"
CONTROL_INODE = 2
STATS_NAME = b"stats.json"
STATS_INODE = 3
INODES = (CONTROL_INODE, STATS_INODE)


@dataclass(frozen=True, slots=True)
class Description:
    """What a mount says of itself. `unrecovered`: a read-only mount does not show what the
    last daemon had answered and not brought into the ring."""

    mountpoint: str
    source: str
    unrecovered: bool


def read_xattr(store: Store, ino: int, name: bytes) -> Step[bytes]:
    """The value of an xattr. Raises ENODATA."""
    if name == PREFIX + b"extents":
        return (yield from _extents(store, ino))
    value = yield from store.xattr(ino, name)
    if value is None:
        raise error(errno.ENODATA)
    return value


def check_settable(name: bytes, value: bytes) -> None:
    """Raises EOPNOTSUPP for names of ours that are not settings, and for ACLs; EINVAL for
    values that say nothing."""
    if name.startswith(b"system."):
        raise error(errno.EOPNOTSUPP)
    if not name.startswith(PREFIX):
        return
    check = _SETTABLE.get(name.removeprefix(PREFIX))
    if check is None:
        raise error(errno.EOPNOTSUPP)
    if not check(value):
        raise error(errno.EINVAL)


def _extents(store: Store, ino: int) -> Step[bytes]:
    """JSON, one object an extent: offset, length, stored, codec, address. Cut with a
    mark before 64 KiB."""
    node = yield from store.node(ino)
    if not stat.S_ISREG(node.inode.mode):
        raise error(errno.ENODATA)
    rows: list[str] = []
    size = 2
    at = 0
    for part in (yield from store.parts(ino, 0, node.inode.size)):
        if isinstance(part, Stored):
            extent = part.extent
            row = json.dumps(
                {
                    "offset": at,
                    "length": part.length,
                    "stored": extent.stored,
                    "codec": Codec(extent.codec).name.lower(),
                    "address": extent.address,
                }
            )
            size += len(row) + 2
            if size > _XATTR_MAX - 32:
                rows.append('{"truncated": true}')
                break
            rows.append(row)
        at += part.length if not isinstance(part, memoryview) else len(part)
    return f"[{', '.join(rows)}]".encode()


def stats(store: Store, described: Description) -> bytes:
    """The contents of `/.kvfs/stats.json`."""
    space = store.usage()
    superblock = store.superblock
    reader = store.reader
    document = {
        "pid": os.getpid(),
        **asdict(described),
        "uuid": str(UUID(bytes=superblock.uuid)),
        "epoch": superblock.epoch,
        "read_only": store.read_only,
        "damage": store.damage,
        "failure": store.failure,
        "space": asdict(space),
        "segment_size": superblock.segment_size,
        "segments": superblock.segment_count,
        "unsaved": store.unsaved,
        "counters": asdict(store.counters),
        "errors": asdict(reader.errors),
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def control_inode(ino: int, owner: Inode, size: int) -> Inode:
    """The attributes of `/.kvfs` or of a file in it: its owner's alone."""
    directory = ino == CONTROL_INODE
    return Inode(
        ino,
        (stat.S_IFDIR | 0o500) if directory else (stat.S_IFREG | 0o400),
        owner.uid,
        owner.gid,
        nlink=2 if directory else 1,
        size=size,
    )

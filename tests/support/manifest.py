"""A tree of files as one value: what a ring has to show, whoever opens it and however."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvfs.engine.format import ROOT_INODE, Inode
from kvfs.engine.io import run
from kvfs.engine.store import Store

_READ = 1024 * 1024
KEY = b"of the encrypted rings that are kept"


@dataclass(frozen=True, slots=True)
class Entry:
    """A name and what it leads to. `content` is a file's checksum, or a symlink's target."""

    path: str
    mode: int
    uid: int
    gid: int
    links: int
    device: int
    size: int
    mtime_ns: int
    content: str
    xattrs: dict[str, str]


def of_store(store: Store) -> list[Entry]:
    """All below the root, by path."""
    return sorted(_below(store, ROOT_INODE, b""), key=lambda entry: entry.path)


def of_mount(mountpoint: Path) -> list[Entry]:
    return sorted(_below_path(os.fsencode(mountpoint), b""), key=lambda entry: entry.path)


def _below(store: Store, directory: int, above: bytes) -> Iterator[Entry]:
    for _, name, node in run(store.list_children(directory, 0, 10_000)):
        inode, path = node.inode, above + name
        xattrs = {}
        for attribute in run(store.xattr_names(inode.ino)):
            value = run(store.xattr(inode.ino, attribute))
            assert value is not None
            xattrs[os.fsdecode(attribute)] = value.hex()
        yield Entry(
            os.fsdecode(path), inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev,
            0 if node.is_directory else inode.size, inode.mtime_ns, _content(store, inode), xattrs,
        )  # fmt: skip
        if node.is_directory:
            yield from _below(store, inode.ino, path + b"/")


def _content(store: Store, inode: Inode) -> str:
    if stat.S_ISLNK(inode.mode):
        return os.fsdecode(run(store.readlink(inode.ino)))
    digest = xxhash.xxh3_128()
    if stat.S_ISREG(inode.mode):
        for start in range(0, inode.size, _READ):
            digest.update(run(store.read(inode.ino, start, _READ)))
    return digest.hexdigest()


def _below_path(top: bytes, above: bytes) -> Iterator[Entry]:
    for name in os.listdir(os.path.join(top, above)):
        path = above + name
        place = os.path.join(top, path)
        status = os.lstat(place)
        is_directory = stat.S_ISDIR(status.st_mode)
        yield Entry(
            os.fsdecode(path), status.st_mode, status.st_uid, status.st_gid, status.st_nlink,
            status.st_rdev, 0 if is_directory else status.st_size, status.st_mtime_ns,
            _content_of(place, status.st_mode),
            {
                attribute: os.getxattr(place, attribute, follow_symlinks=False).hex()
                for attribute in os.listxattr(place, follow_symlinks=False)
            },
        )  # fmt: skip
        if is_directory:
            yield from _below_path(top, path + b"/")


def _content_of(place: bytes, mode: int) -> str:
    if stat.S_ISLNK(mode):
        return os.fsdecode(os.readlink(place))
    digest = xxhash.xxh3_128()
    if stat.S_ISREG(mode):
        with open(place, "rb") as file:
            while data := file.read(_READ):
                digest.update(data)
    return digest.hexdigest()

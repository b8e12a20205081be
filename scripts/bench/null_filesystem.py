"""A pyfuse3 filesystem that does nothing: what FUSE and Python cost by themselves.

    python scripts/bench/null_filesystem.py MOUNTPOINT [--keep FILE]

Files can be made and written (the bytes are dropped) and read (zeros). With --keep it
does with the bytes what no filesystem that keeps KVFS's promise can do without: copies
them to a tmpfs and sums them before it answers, and writes them to FILE from there,
8 MiB at a time. Benchmarks mount it beside KVFS, in the same run.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import mmap
import os
import queue
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pyfuse3
import trio

from kvfs.engine.buffers import copy
from kvfs.engine.format import checksum

_TIMEOUT_SECONDS = 3600
_SIZE = 1 << 30
_CHUNK = 8 * 1024 * 1024
_CHUNKS = 6


class NullFilesystem(pyfuse3.Operations):
    """A flat directory of files that are all of one size."""

    def __init__(self, keeper: Keeper | None) -> None:
        super().__init__()
        self._keeper = keeper
        self._inodes: dict[bytes, int] = {}
        self._zeros = memoryview(bytes(1 << 20))

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if name not in self._inodes:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return _attributes(self._inodes[name])

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return _attributes(inode)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        inode = self._inodes.setdefault(name, len(self._inodes) + 2)
        return await self.open(inode, flags, ctx), _attributes(inode)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, off: int, size: int) -> memoryview:  # type: ignore[override]
        return self._zeros[:size]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        if self._keeper is not None:
            self._keeper.keep(buf)
        return len(buf)

    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    async def flush(self, fh: int) -> None:
        pass

    async def release(self, fh: int) -> None:
        pass

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        pass


def _attributes(inode: int) -> pyfuse3.EntryAttributes:
    attributes = pyfuse3.EntryAttributes()
    attributes.st_ino = inode
    is_root = inode == pyfuse3.ROOT_INODE
    attributes.st_mode = (stat.S_IFDIR | 0o755) if is_root else (stat.S_IFREG | 0o644)
    attributes.st_size = 0 if is_root else _SIZE
    attributes.st_nlink = 1
    attributes.attr_timeout = attributes.entry_timeout = _TIMEOUT_SECONDS
    return attributes


class Keeper:
    """Copies bytes to a tmpfs, sums them, and has them written to a file by a thread."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, _SIZE)
        self._idle: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_CHUNKS):
            self._idle.put(_tmpfs_chunk())
        self._chunk, self._end = self._idle.get(), 0
        for _ in range(2):
            threading.Thread(target=self._write, daemon=True).start()
        self._offsets = itertools.cycle(range(0, _SIZE, _CHUNK))

    def keep(self, data: bytes) -> None:
        if self._end + len(data) > _CHUNK:
            self._full.put(self._chunk)
            self._chunk, self._end = self._idle.get(), 0
        copy(memoryview(data), self._chunk[self._end : self._end + len(data)])
        checksum(data)
        self._end += len(data)

    def _write(self) -> None:
        while True:
            chunk = self._full.get()
            os.pwritev(self._fd, [chunk], next(self._offsets))
            self._idle.put(chunk)


def _tmpfs_chunk() -> memoryview:
    fd = os.memfd_create("chunk")
    os.posix_fallocate(fd, 0, _CHUNK)
    return memoryview(mmap.mmap(fd, _CHUNK, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mountpoint")
    parser.add_argument("--keep", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args()
    filesystem = NullFilesystem(None if arguments.keep is None else Keeper(arguments.keep))
    pyfuse3.init(filesystem, arguments.mountpoint, {"default_permissions", "fsname=null"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()

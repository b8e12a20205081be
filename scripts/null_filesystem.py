"""A pyfuse3 filesystem that does nothing: what FUSE and Python cost by themselves.

    python scripts/null_filesystem.py MOUNTPOINT

Files can be made and written (the bytes are dropped) and read (zeros). Benchmarks
mount it beside KVFS, in the same run.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Sequence

import pyfuse3
import trio

_TIMEOUT_SECONDS = 3600
_SIZE = 1 << 30


class NullFilesystem(pyfuse3.Operations):
    """A flat directory of files that are all of one size."""

    def __init__(self) -> None:
        super().__init__()
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
        return pyfuse3.FileInfo(fh=inode, direct_io=bool(flags & os.O_DIRECT))

    async def read(self, fh: int, off: int, size: int) -> memoryview:  # type: ignore[override]
        return self._zeros[:size]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
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


def main() -> None:
    pyfuse3.init(NullFilesystem(), sys.argv[1], {"default_permissions", "fsname=null"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()

"""A pyfuse3 filesystem that does nothing: what FUSE and Python cost by themselves.

    python scripts/bench/null_filesystem.py MOUNTPOINT [--keep FILE]

Files can be made, renamed and removed, written (the bytes are dropped) and read (zeros). With
--keep it does with the bytes what no filesystem that keeps KVFS's promise can do without: copies
them to a tmpfs and sums them before it answers, and writes them to FILE from there,
8 MiB at a time. Benchmarks mount it beside KVFS, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import mmap
import os
import queue
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
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
    """Directories of names; files are all of one size. Nothing is looked up but names, and what
    the kernel was told it may remember, as with KVFS."""

    def __init__(self, keeper: Keeper | None) -> None:
        super().__init__()
        self._keeper = keeper
        self._next_inode = itertools.count(pyfuse3.ROOT_INODE + 1)
        self._directories: dict[int, dict[bytes, int]] = {pyfuse3.ROOT_INODE: {}}
        self._listings: dict[int, list[tuple[bytes, int]]] = {}
        self._next_handle = itertools.count()
        self._zeros = memoryview(bytes(1 << 20))

    # -- names

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._attributes(self._directories[parent_inode].get(name, 0))

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        inode = self._directories[parent_inode][name] = next(self._next_inode)
        self._directories[inode] = {}
        return self._attributes(inode)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        inode = self._directories[parent_inode][name] = next(self._next_inode)
        return pyfuse3.FileInfo(fh=inode), self._attributes(inode)

    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        del self._directories[parent_inode][name]

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        inode = self._directories[parent_inode_old].pop(name_old)
        self._directories[parent_inode_new][name_new] = inode

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        pass

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = inode
        is_directory = inode in self._directories
        attributes.st_mode = (stat.S_IFDIR | 0o755) if is_directory else (stat.S_IFREG | 0o644)
        attributes.st_size = 0 if is_directory else _SIZE
        attributes.st_nlink = 1
        attributes.attr_timeout = attributes.entry_timeout = _TIMEOUT_SECONDS
        return attributes

    # -- directories

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        handle = next(self._next_handle)
        self._listings[handle] = list(self._directories[inode].items())
        return handle

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._listings[fh]
        for number in range(start_id, len(listing)):
            name, inode = listing[number]
            if not pyfuse3.readdir_reply(token, name, self._attributes(inode), number + 1):
                return

    async def releasedir(self, fh: int) -> None:
        del self._listings[fh]

    # -- files

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
        # The kernel then sends no more of them, as with KVFS.
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def release(self, fh: int) -> None:
        pass


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


@contextlib.contextmanager
def mounted(point: Path, *options: str | Path, program: str | Path = __file__) -> Iterator[int]:
    """One more process serves it, or another program that does nothing, at `point`, which is
    made; yields its pid."""
    point.mkdir()
    daemon = subprocess.Popen([sys.executable, program, point, *options])
    try:
        while not os.path.ismount(point):
            if daemon.poll() is not None:
                raise SystemExit(f"the null filesystem cannot be mounted on {point}")
            time.sleep(0.05)
        yield daemon.pid
    finally:
        subprocess.run(["fusermount3", "-u", point], check=False)
        daemon.wait()


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

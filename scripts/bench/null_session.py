"""A filesystem that does nothing, whose requests are read as KVFS reads its own.

    python scripts/bench/null_session.py MOUNTPOINT

The same as null_filesystem.py without pyfuse3: what is left of a request when the filesystem
takes no time. Benchmarks mount both.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import stat
from pathlib import Path

from kvfs.engine.buffers import BufferPool
from kvfs.mount import protocol
from kvfs.mount.attach import attach
from kvfs.mount.loop import Loop
from kvfs.mount.protocol import Call, Changes, Opened
from kvfs.mount.session import Session

_TIMEOUT_SECONDS = 3600
_SIZE = 1 << 30
_ROOT = 1
_DEADLINE_SECONDS = 30


class NullHandlers:
    """Directories of names; files are all of one size. Each request is answered at once."""

    def __init__(self) -> None:
        self._next = itertools.count(_ROOT + 1)
        self._directories: dict[int, dict[bytes, int]] = {_ROOT: {}}
        self._listings: dict[int, list[tuple[bytes, int]]] = {}
        self._zeros = BufferPool(protocol.REQUEST_SIZE_MAX, 1).take()

    # -- names

    def lookup(self, call: Call, name: bytes) -> bytes:
        ino = self._directories[call.inode].get(name)
        return protocol.no_entry(_TIMEOUT_SECONDS) if ino is None else self._entry(ino)

    def getattr(self, call: Call) -> bytes:
        return protocol.attributes_answer(self._attributes(call.inode), _TIMEOUT_SECONDS)

    def setattr(self, call: Call, changes: Changes) -> bytes:
        return self.getattr(call)

    def mkdir(self, call: Call, name: bytes, mode: int) -> bytes:
        ino = self._directories[call.inode][name] = next(self._next)
        self._directories[ino] = {}
        return self._entry(ino)

    def create(self, call: Call, name: bytes, mode: int, flags: int) -> bytes:
        ino = self._directories[call.inode][name] = next(self._next)
        return self._entry(ino) + protocol.opened(ino, Opened.KEEP_CACHE)

    def unlink(self, call: Call, name: bytes) -> None:
        del self._directories[call.inode][name]

    def rename(
        self, call: Call, name: bytes, new_directory: int, new_name: bytes, flags: int
    ) -> None:
        ino = self._directories[call.inode].pop(name)
        self._directories[new_directory][new_name] = ino

    def forget(self, call: Call, count: int) -> None:
        pass

    def batch_forget(self, call: Call, forgotten: list[tuple[int, int]]) -> None:
        pass

    def _entry(self, ino: int) -> bytes:
        return protocol.entry(ino, self._attributes(ino), _TIMEOUT_SECONDS, _TIMEOUT_SECONDS)

    def _attributes(self, ino: int) -> bytes:
        is_directory = ino in self._directories
        mode = stat.S_IFDIR | 0o755 if is_directory else stat.S_IFREG | 0o644
        size = 0 if is_directory else _SIZE
        return protocol.attributes(ino, mode, 1, 0, 0, 0, size, 0, 4096, 0, 0, 0)

    # -- directories

    def opendir(self, call: Call) -> bytes:
        handle = next(self._next)
        self._listings[handle] = list(self._directories[call.inode].items())
        return protocol.opened(handle, Opened(0))

    def readdir(self, call: Call, fh: int, cookie: int, size: int) -> bytes:
        return self._list(fh, cookie, size, b"")

    def readdirplus(self, call: Call, fh: int, cookie: int, size: int) -> bytes:
        return self._list(fh, cookie, size, protocol.NOT_LOOKED_UP)

    def _list(self, fh: int, cookie: int, size: int, found: bytes) -> bytes:
        listing = self._listings[fh]
        entries: list[bytes] = []
        for number in range(cookie, len(listing)):
            name, ino = listing[number]
            entry = protocol.directory_entry(ino, name, stat.S_IFREG, number + 1, found)
            size -= len(entry)
            if size < 0:
                break
            entries.append(entry)
        return b"".join(entries)

    def releasedir(self, call: Call, fh: int) -> None:
        del self._listings[fh]

    # -- files

    def open(self, call: Call, flags: int, kills_suid: bool) -> bytes:
        return protocol.opened(call.inode, Opened.KEEP_CACHE)

    def read(self, call: Call, fh: int, offset: int, size: int) -> memoryview:
        return self._zeros[:size]

    def write(self, call: Call, fh: int, offset: int, data: memoryview, flags: int) -> bytes:
        return protocol.written(len(data))

    def release(self, call: Call, fh: int) -> None:
        pass

    def fsync(self, call: Call, fh: int) -> None:
        pass


async def _serve(loop: Loop, point: Path) -> None:
    connection = attach(point, {"default_permissions", "fsname=null"})
    session = Session(connection, NullHandlers(), loop, _DEADLINE_SECONDS)
    loop.add_signal_handler(signal.SIGTERM, session.stop)
    try:
        await session.serve()
    finally:
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mountpoint", type=Path)
    loop = Loop()
    loop.run_until_complete(_serve(loop, parser.parse_args().mountpoint))


if __name__ == "__main__":
    main()

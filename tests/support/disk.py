"""A disk that can be told to fail: an image file behind a FUSE filesystem of its own process.

Who opens `path` has the image's bytes, by way of that process, which can be told to refuse
calls, to leave them unanswered, and to lose what no flush has covered. To the kernel, and so to
a daemon that uses it, it is a device like another: a call that is not answered cannot even be
killed.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvfs.engine.io import Completion, Step, wait
from kvfs.mount import protocol
from kvfs.mount import session as session_module
from kvfs.mount.attach import attach
from kvfs.mount.loop import Loop
from kvfs.mount.protocol import Call, Opened
from kvfs.mount.session import Session
from mount_tools.mountpoints import detach

_NAME = "disk.img"
_ROOT, _FILE = 1, 2
_END_SECONDS = 20
ALL = (0, 1 << 62)


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of calls of these kinds (read, write, flush) that touch [start, end):
    they fail with `error`, or with None are not answered until the rules are lifted. The first
    `after` of them are let through, and all behind the next `times`."""

    kinds: tuple[str, ...]
    error: int | None = None
    start: int = ALL[0]
    end: int = ALL[1]
    after: int = 0
    times: int = 1 << 62


class Disk:
    """Serves `backing` at `path` from a process of its own, until `close`."""

    def __init__(self, backing: Path, point: Path) -> None:
        point.mkdir()
        self.backing, self._point = backing, point
        self.path = point / _NAME
        self.come_back()

    def come_back(self) -> None:
        """As another device, at the same place."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.backing), str(self._point)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._answer() == "ready"

    def vanish(self) -> None:
        """Whatever is asked of what is open of it fails from now on."""
        self._process.kill()
        self._process.wait(_END_SECONDS)
        assert detach(self._point, lazy=True) is None

    def fail(self, *rules: Rule) -> None:
        """From now on these rules hold, and no others."""
        self._tell("rules", [asdict(rule) for rule in rules])

    def work(self) -> None:
        """All is well again; what was not answered is, as if nothing had been."""
        self._tell("rules", [])

    def lose_unflushed(self) -> None:
        """Every second write that no flush has covered is undone: the first, the third ..."""
        self._tell("lose", None)

    @property
    def waiting(self) -> int:
        """Calls that are not answered."""
        return int(self._tell("waiting", None))

    def close(self) -> None:
        if self._process.poll() is None:
            self.work()
            self._tell("end", None)
        assert self._process.wait(_END_SECONDS) == 0

    def _tell(self, word: str, value: Any) -> str:
        assert self._process.stdin is not None
        print(json.dumps([word, value]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


# -- in its process


@dataclass
class _Served:
    """The filesystem: a directory with one file."""

    fd: int
    rules: list[Rule] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    waiting: int = 0
    lifted: Completion[None] = field(default_factory=Completion)
    unflushed: list[tuple[int, bytes]] = field(default_factory=list)

    # -- what it is told

    def told(self, word: str, value: Any) -> str:
        match word:
            case "rules":
                self.rules = [Rule(**{**one, "kinds": tuple(one["kinds"])}) for one in value]
                self.seen = [0] * len(self.rules)
                lifted, self.lifted = self.lifted, Completion()
                lifted.finish()
            case "lose":
                for address, before in reversed(self.unflushed[::2]):
                    os.pwrite(self.fd, before, address)
                self.unflushed.clear()
            case "waiting":
                return str(self.waiting)
        return "done"

    def _passes(self, kind: str, start: int, end: int) -> Step[None]:
        """Raises OSError as the rules say, or waits."""
        for number, rule in enumerate(self.rules):
            if kind in rule.kinds and start < rule.end and end > rule.start:
                self.seen[number] += 1
                if not rule.after < self.seen[number] <= rule.after + rule.times:
                    continue
                if rule.error is not None:
                    raise OSError(rule.error, os.strerror(rule.error))
                self.waiting += 1
                yield from wait(self.lifted)
                self.waiting -= 1
                return

    # -- requests

    def lookup(self, call: Call, name: bytes) -> bytes:
        if (call.inode, name) != (_ROOT, _NAME.encode()):
            return protocol.no_entry(0)
        return protocol.entry(_FILE, self._attributes(_FILE), 0, 0)

    def getattr(self, call: Call) -> bytes:
        return protocol.attributes_answer(self._attributes(call.inode), 0)

    def forget(self, call: Call, count: int) -> None:
        pass

    def batch_forget(self, call: Call, forgotten: Any) -> None:
        pass

    def open(self, call: Call, flags: int, kills_suid: bool) -> bytes:
        return protocol.opened(1, Opened.DIRECT_IO)

    def release(self, call: Call, fh: int) -> None:
        pass

    def read(self, call: Call, fh: int, offset: int, size: int) -> Step[bytes]:
        yield from self._passes("read", offset, offset + size)
        return os.pread(self.fd, size, offset)

    def write(self, call: Call, fh: int, offset: int, data: memoryview, flags: int) -> Step[bytes]:
        yield from self._passes("write", offset, offset + len(data))
        self.unflushed.append((offset, os.pread(self.fd, len(data), offset)))
        return protocol.written(os.pwrite(self.fd, data, offset))

    def fsync(self, call: Call, fh: int) -> Step[None]:
        yield from self._passes("flush", *ALL)
        self.unflushed.clear()

    def statfs(self, call: Call) -> bytes:
        return protocol.statfs(4096, 0, 0, 0, 0, 0, 255)

    def _attributes(self, ino: int) -> bytes:
        mode = stat.S_IFDIR | 0o700 if ino == _ROOT else stat.S_IFREG | 0o600
        size = 0 if ino == _ROOT else os.fstat(self.fd).st_size
        return protocol.attributes(
            ino, mode, 1, os.geteuid(), os.getegid(), 0, size, size // 512, 4096, 0, 0, 0
        )


async def _serve(backing: Path, point: Path, loop: Loop) -> None:
    served = _Served(os.open(backing, os.O_RDWR))
    session = Session(attach(point, {"fsname=disk", "subtype=test"}), served, loop, 1e9)

    def hear(line: str) -> None:
        word, value = json.loads(line)
        print(served.told(word, value), flush=True)
        if word == "end":
            session.stop()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(hear, line)
        # Who started it has ended.
        loop.call_soon_threadsafe(served.told, "rules", [])
        loop.call_soon_threadsafe(session.stop)

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    try:
        await session.serve()
    finally:
        session.close()


def _main() -> None:
    loop = Loop()
    with patch.object(session_module, "_IN_FLIGHT_MAX", 100_000):
        loop.run_until_complete(_serve(Path(sys.argv[1]), Path(sys.argv[2]), loop))


@contextmanager
def disk(backing: Path, point: Path) -> Iterator[Disk]:
    made = Disk(backing, point)
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    _main()

"""Requests and answers on a real mount of a filesystem of a few lines."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs.engine.io import Completion, DeadlineExceeded, Step, wait
from kvfs.mount import protocol
from kvfs.mount import session as session_module
from kvfs.mount.attach import MountError, attach
from kvfs.mount.loop import Loop
from kvfs.mount.protocol import Call, Capability, Opened
from kvfs.mount.session import Session

ROOT = 1
DEADLINE_SECONDS = 20


class Faulty:
    """Every name exists that does not begin with `no`; what a lookup does is what `acts` has for
    the name. What is not here raises."""

    def __init__(self) -> None:
        self.acts: dict[bytes, Callable[[], Any]] = {}
        self.written: list[bytes] = []
        self.asked_for: list[bytes] = []
        self.opened = Opened.DIRECT_IO

    def __getattr__(self, name: str) -> Any:
        def handler(call: Call, *arguments: Any) -> None:
            raise NotImplementedError(name)

        return handler

    def agreed(self, capabilities: Capability) -> None:
        self.capabilities = capabilities

    def getattr(self, call: Call) -> bytes:
        return protocol.attributes_answer(_attributes(call.inode), 0)

    def lookup(self, call: Call, name: bytes) -> Step[bytes]:
        result = self.acts.get(name, lambda: None)()
        if isinstance(result, Completion):
            yield from wait(result)
        if name.startswith(b"no"):
            return protocol.no_entry(0)
        return protocol.entry(1000 + len(name), _attributes(1000 + len(name)), 0, 60)

    def forget(self, call: Call, count: int) -> None:
        raise AssertionError("nobody hears of it, and nothing ends")

    batch_forget = forget

    def open(self, call: Call, flags: int, kills_suid: bool) -> bytes:
        return protocol.opened(1, self.opened)

    def listxattr(self, call: Call, size: int) -> Any:
        return 5

    def setattr(self, call: Call, changes: Any) -> Step[Any]:
        gate: Completion[None] = Completion()
        asyncio.get_running_loop().call_later(0.01, gate.finish)
        yield from wait(gate)
        return "no bytes"

    def getxattr(self, call: Call, name: bytes, size: int) -> bytes:
        self.asked_for.append(name)
        raise OSError(errno.ENODATA, "none")

    def write(self, call: Call, fh: int, offset: int, data: memoryview, flags: int) -> Step[bytes]:
        gate: Completion[None] = Completion()
        asyncio.get_running_loop().call_later(0.05, gate.finish)
        yield from wait(gate)
        self.written.append(bytes(data))
        return protocol.written(len(data))

    def release(self, call: Call, fh: int) -> None:
        pass


def _attributes(ino: int) -> bytes:
    mode = stat.S_IFDIR | 0o700 if ino == ROOT else stat.S_IFREG | 0o600
    return protocol.attributes(ino, mode, 1, 0, 0, 0, 0, 0, 4096, 0, 0, 0)


@contextmanager
def served(
    filesystem: Any, point: Path, deadline_seconds: float = DEADLINE_SECONDS
) -> Iterator[Session]:
    point.mkdir()
    begun: list[Session] = []
    loop = Loop()
    ready = threading.Event()

    async def serve() -> None:
        session = Session(attach(point, {"fsname=test"}), filesystem, loop, deadline_seconds)
        begun.append(session)
        ready.set()
        try:
            await session.serve()
        finally:
            session.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(DEADLINE_SECONDS)
    try:
        yield begun[0]
    finally:
        loop.call_soon_threadsafe(begun[0].stop)
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
        loop.close()


@pytest.fixture
def point(fuse: None, tmp_path: Path) -> Path:
    return tmp_path / "mnt"


def _errno(call: Callable[[], Any]) -> int | None:
    try:
        call()
    except OSError as failure:
        return failure.errno
    raise AssertionError("it did not fail")


def _soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + DEADLINE_SECONDS
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def _raises(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_whatever_a_request_raises_is_an_errno_and_the_next_is_served(point: Path) -> None:
    faulty = Faulty()
    raised = {
        b"full": (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        b"nameless": (OSError("no number"), errno.EIO),
        b"late": (DeadlineExceeded(), errno.ETIMEDOUT),
        b"memory": (MemoryError(), errno.EIO),
        b"fault": (AssertionError("ours"), errno.EIO),
        b"stop": (StopIteration("a generator turns it into another"), errno.EIO),
    }
    faulty.acts = {name: _raises(error) for name, (error, _) in raised.items()}
    with served(faulty, point):
        for name, (_, expected) in raised.items():
            assert _errno(lambda name=name: os.stat(point / os.fsdecode(name))) == expected, name
            assert os.stat(point / "fine").st_ino == 1004


def test_every_handler_that_raises_at_once_is_an_errno_too(point: Path) -> None:
    with served(Faulty(), point):
        for call in (
            lambda: os.mkdir(point / "no"),
            lambda: os.rename(point / "a", point / "no"),
            lambda: os.symlink("x", point / "no"),
            lambda: os.link(point / "a", point / "no"),
            lambda: os.listdir(point),
            lambda: os.statvfs(point),
            lambda: os.setxattr(point, "user.x", b"1"),
            lambda: os.listxattr(point),
            lambda: os.chmod(point / "a", 0o600),
            lambda: os.mkfifo(point / "no"),
        ):
            assert _errno(call) == errno.EIO
        assert os.stat(point / "fine").st_ino == 1004


def test_what_is_no_answer_is_an_error_and_the_next_is_served(point: Path) -> None:
    with served(Faulty(), point) as session:
        for _ in range(3):
            assert _errno(lambda: os.listxattr(point / "fine")) == errno.EIO
            assert _errno(lambda: os.chmod(point / "fine", 0o600)) == errno.EIO
        assert os.stat(point / "fine").st_ino == 1004
        # A request counts for a moment longer than its answer takes.
        assert _soon(lambda: session.in_flight == 0)


def test_more_requests_than_are_taken_at_once_are_all_answered(
    point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_IN_FLIGHT_MAX", 100)
    faulty = Faulty()
    gate: Completion[None] = Completion()
    names = [f"x{number:03}" for number in range(150)]
    faulty.acts = {name.encode(): lambda: gate for name in names}
    with served(faulty, point) as session, ThreadPoolExecutor(len(names)) as clients:
        answers = [clients.submit(os.stat, point / name) for name in names]
        assert _soon(lambda: session.in_flight == 100)
        session.loop.call_soon_threadsafe(gate.finish)
        assert {answer.result(DEADLINE_SECONDS).st_ino for answer in answers} == {1004}


def test_data_of_writes_that_wait_is_kept_apart(point: Path) -> None:
    faulty = Faulty()
    contents = [bytes([number]) * (4096 * (number + 1)) for number in range(20)]

    def write(content: bytes) -> None:
        fd = os.open(point / f"file{content[0]}", os.O_WRONLY)
        try:
            assert os.write(fd, content) == len(content)
        finally:
            os.close(fd)

    with served(faulty, point), ThreadPoolExecutor(len(contents)) as clients:
        list(clients.map(write, contents))
    assert sorted(faulty.written) == sorted(contents)


def test_the_kernel_asks_for_no_xattr_before_each_write(point: Path) -> None:
    faulty = Faulty()
    faulty.opened = Opened.KEEP_CACHE
    with served(faulty, point):
        fd = os.open(point / "file", os.O_WRONLY)
        for _ in range(20):
            os.write(fd, b"bytes")
        os.close(fd)
    assert len(faulty.written) == 20
    assert faulty.asked_for in ([], [b"security.capability"])


def test_what_is_under_way_is_answered_before_the_end(point: Path) -> None:
    faulty = Faulty()
    gate: Completion[None] = Completion()
    faulty.acts = {b"slow": lambda: gate}
    with ThreadPoolExecutor(1) as client:
        with served(faulty, point) as session:
            answer = client.submit(os.stat, point / "slow")
            assert _soon(lambda: session.in_flight == 1)
            session.loop.call_soon_threadsafe(session.stop)
            session.loop.call_soon_threadsafe(session.loop.call_later, 0.2, gate.finish)
        assert answer.result(DEADLINE_SECONDS).st_ino == 1004
    assert not os.path.ismount(point)


def test_who_waits_for_longer_than_the_deadline_is_told(point: Path) -> None:
    faulty = Faulty()
    faulty.acts = {b"never": Completion}
    with served(faulty, point, deadline_seconds=0.2):
        assert _errno(lambda: os.stat(point / "never")) == errno.ETIMEDOUT
        assert os.stat(point / "fine").st_ino == 1004


def test_who_cannot_mount_is_told_why(fuse: None, tmp_path: Path) -> None:
    with pytest.raises(MountError, match="missing"):
        attach(tmp_path / "missing", {"fsname=test"})

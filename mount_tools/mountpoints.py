"""Mountpoints: what is there, does it answer, take it away.

A daemon may be dead or hang. So the table of mounts is asked first, it touches no
mount, and what does touch one runs in a thread that can be left behind.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from kvfs.mount.mounts import Mount, containing_mount, find_mount
from mount_tools.common import CommandError

T = TypeVar("T")

ANSWER_SECONDS = 5.0
STATS = Path(".kvfs") / "stats.json"


class State(Enum):
    """Of a mounted KVFS: it answers, its daemon has ended, or it does not answer."""

    ALIVE = "alive"
    DEAD = "dead"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Stats:
    """What a daemon says of itself. `document` is all of it, as it came."""

    pid: int
    source: Path
    total: int
    free: int
    read_only: bool
    damage: str | None
    unrecovered: bool
    superblock_lost: bool
    recovered_operations: int
    document: dict[str, Any]


def canonical(path: Path) -> Path:
    """Absolute and without symlinks, as the table of mounts has it. Raises CommandError
    where a mount on the way does not answer."""
    path = Path(os.path.abspath(path))
    # As it is written first: that touches nothing.
    require_answer(containing_mount(path.parent))
    path = Path(answered(path, lambda: os.path.realpath(path.parent))) / path.name
    # The last name is followed only when nothing is mounted there that could hang.
    return path if find_mount(path) else Path(answered(path, lambda: os.path.realpath(path)))


def require_answer(mount: Mount | None) -> None:
    """Raises CommandError when the daemon has ended or hangs."""
    if mount is None:
        return
    match state_of(mount.mountpoint):
        case State.DEAD:
            raise CommandError(
                f"{mount.mountpoint}: its daemon has ended; mount it again with: "
                f"kvfs mount {mount.mountpoint} {mount.source}"
            )
        case State.HUNG:
            raise CommandError(
                f"{mount.mountpoint} does not answer; detach it with: "
                f"kvfs umount --force {mount.mountpoint}"
            )


def answered(path: Path, work: Callable[[], T]) -> T:
    """The result of work that touches a path. Raises CommandError where a mount on the way
    does not answer."""
    try:
        return _within(ANSWER_SECONDS, work)
    except TimeoutError:
        raise CommandError(
            f"{path} does not answer: is the daemon of a mount on the way hung?"
        ) from None


def state_of(mountpoint: Path) -> State:
    """Asks the daemon: attributes may come from the kernel's cache, statvfs never does."""
    try:
        _within(ANSWER_SECONDS, lambda: os.statvfs(mountpoint))
    except TimeoutError:
        return State.HUNG
    except OSError as failure:
        if failure.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return State.DEAD
        raise
    return State.ALIVE


def may_enter(mountpoint: Path) -> bool:
    """Whether its owner lets this user in. True also when it is dead or does not answer:
    then there is more to say of it."""
    try:
        _within(ANSWER_SECONDS, lambda: os.scandir(mountpoint).close())
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def read_stats(mountpoint: Path) -> Stats:
    """Raises CommandError when the daemon does not answer."""
    try:
        text = _within(ANSWER_SECONDS, (mountpoint / STATS).read_text)
    except TimeoutError:
        raise CommandError(
            f"{mountpoint} does not answer; detach it with: kvfs umount --force {mountpoint}"
        ) from None
    except PermissionError:
        raise CommandError(f"{mountpoint} belongs to another user; run as its owner") from None
    except OSError as failure:
        if failure.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            raise CommandError(
                f"{mountpoint}: its daemon has ended; mount it again with: "
                f"kvfs mount {mountpoint} DEV"
            ) from None
        raise
    document = json.loads(text)
    return Stats(
        pid=document["pid"],
        source=Path(document["source"]),
        total=document["space"]["total"],
        free=document["space"]["free"],
        read_only=document["read_only"],
        damage=document["damage"],
        unrecovered=document["unrecovered"],
        superblock_lost=document["superblock_lost"],
        recovered_operations=document["counters"]["recovered_operations"],
        document=document,
    )


def detach(mountpoint: Path, *, lazy: bool) -> str | None:
    """Unmount. Returns the reason if that failed."""
    program = shutil.which("fusermount3")
    if program is None:
        raise CommandError("fusermount3 is missing; install the package fuse3")
    command = [program, "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    return result.stderr.strip() if result.returncode else None


def _within(seconds: float, work: Callable[[], T]) -> T:
    """The result of work that may hang. Raises TimeoutError; the thread is left behind."""
    results: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except Exception as failure:
            results.put((None, failure))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, failure = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]

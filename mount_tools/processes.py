"""Which processes hold a mount, by what the kernel says of them: no mount is touched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has `path` open, mapped or as its directory."""

    pid: int
    command: str
    path: str


def holders_of(mountpoint: Path) -> list[Holder]:
    """Those that this user may look at."""
    found = []
    for process in psutil.process_iter(["pid", "name"]):
        path = next(_paths_below(process.pid, str(mountpoint)), None)
        if path is not None:
            found.append(Holder(process.pid, process.info["name"] or "?", path))
    return found


def process_of(pid: int) -> psutil.Process | None:
    """None if it has ended already, or is not visible from this container."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def has_ended(process: psutil.Process) -> bool:
    """A zombie has, too: its files are closed and nobody may be there to collect it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_held_up(process: psutil.Process, seconds: float) -> bool:
    """Whether one that has ended is still kept, for longer than that, by threads that wait for
    a device: then its files are not closed yet."""
    limit = time.monotonic() + seconds
    while _has_threads(process.pid):
        if time.monotonic() > limit:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _has_threads(pid: int) -> bool:
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_for_end(process: psutil.Process, seconds: float) -> bool:
    """True when it has ended within that time."""
    limit = time.monotonic() + seconds
    while not has_ended(process):
        if time.monotonic() > limit:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _paths_below(pid: int, mountpoint: str) -> Iterator[str]:
    for path in _paths_of(Path("/proc") / str(pid)):
        if path == mountpoint or path.startswith(mountpoint + "/"):
            yield path


def _paths_of(process: Path) -> Iterator[str]:
    """Links are read and not followed, so nothing of the mount is asked."""
    try:
        links = [process / "cwd", process / "root", process / "exe", *(process / "fd").iterdir()]
        for link in links:
            try:
                yield os.readlink(link)
            except FileNotFoundError:
                continue
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]
    except OSError:
        # It has ended meanwhile, or belongs to another user.
        return

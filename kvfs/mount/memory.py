"""How much of the machine's memory the warm tier may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_MOST = 16 * 1024**3
_NO_LIMIT = 1 << 62  # what has none shows a number of pages near this
_CGROUPS = Path("sys/fs/cgroup")


def warm_limit(directory: Path, tmpfs: Path, wanted: int | None) -> int:
    """In bytes: what was wanted, else 16 GiB, a quarter of the memory or half of what the
    control group allows, whichever is least; never more than the tmpfs has free, with what an
    earlier process left in `directory`."""
    status = os.statvfs(tmpfs)
    free = status.f_bavail * status.f_frsize + _taken(directory)
    if wanted is not None:
        return min(wanted, free)
    return min(_MOST, psutil.virtual_memory().total // 4, _allowed() // 2, free)


def _taken(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """What the control groups of this process allow, in bytes: the least of its own and of
    those above it. None where none has a limit. `root` is where /proc and /sys are."""
    limits = [limit for file in _limit_files(root) if (limit := _limit(file)) is not None]
    return min(limits, default=None)


def _allowed() -> int:
    limit = cgroup_limit()
    return _NO_LIMIT if limit is None else limit


def _limit_files(root: Path) -> Iterator[Path]:
    """Of version 1 and 2 (cgroups(7)). In a container the path may be the host's, of which only
    the container's own group can be seen, as the topmost."""
    top = root / _CGROUPS
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, name = [top, top / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            tops, name = [top / "memory"], "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        yield from (each / above / name for each in tops for above in (group, *group.parents))


def _lines(file: Path) -> list[str]:
    try:
        return os.fsdecode(file.read_bytes()).splitlines()
    except OSError:
        return []


def _limit(file: Path) -> int | None:
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):
        return None  # no such group here, or "max"
    return limit if limit < _NO_LIMIT else None

"""How much of the machine's memory the warm tier may take."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

_MOST = 16 * 1024**3
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


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


def _allowed() -> int:
    """By the control group of this process; more than there is where it has no limit."""
    for file in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            return int(file.read_text())
    return 1 << 62

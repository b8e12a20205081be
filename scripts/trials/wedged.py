"""Readers that stop in the midst of what they do, and hold what they have: what a debugger, a
suspended job or a frozen container looks like to a mount."""

from __future__ import annotations

import mmap
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

from scripts.trials.crew import IsOver
from scripts.trials.reading import offered

_FILES_MAX = 200
_PAGE = mmap.PAGESIZE
_MIB = 1024 * 1024


def _open_files(mountpoint: Path, flags: int) -> list[int]:
    """Many of others' files; they may go meanwhile."""
    found: list[int] = []
    for session in _sessions(mountpoint):
        with suppress(FileNotFoundError):
            for path in sorted(session.iterdir()):
                found.append(os.open(path, os.O_RDONLY | flags))
        if len(found) >= _FILES_MAX:
            break
    return found


def _sessions(mountpoint: Path) -> list[Path]:
    found: list[Path] = []
    for agent in mountpoint.iterdir():
        with suppress(FileNotFoundError):
            found += [path for path in agent.iterdir() if path.name != "pool"]
    return found


def reads(is_told_to_stop: IsOver, mountpoint: Path) -> Counter[str]:
    """Large reads past the page cache, with many files open."""
    files = _open_files(mountpoint, os.O_DIRECT)
    with mmap.mmap(-1, 8 * _MIB) as memory:
        while files and not is_told_to_stop():
            os.preadv(random.choice(files), [memory], 0)
    return Counter()


def faults(is_told_to_stop: IsOver, mountpoint: Path) -> Counter[str]:
    """Pages of mappings, which the kernel has to ask for each time."""
    files = _open_files(mountpoint, 0)
    views = [mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) for fd in files if _size(fd)]
    while views and not is_told_to_stop():
        number = random.randrange(len(views))
        os.posix_fadvise(files[number], 0, 0, os.POSIX_FADV_DONTNEED)
        view = views[number]
        view.madvise(mmap.MADV_DONTNEED)
        if _size(files[number]) >= len(view):  # what is cut off would be SIGBUS
            sum(view[at] for at in range(0, len(view), 16 * _PAGE))
    return Counter()


def maps(is_told_to_stop: IsOver, mountpoint: Path) -> Counter[str]:
    """Leases of the daemon's memory, which end with the files."""
    files = _open_files(mountpoint, 0)
    while files and not is_told_to_stop():
        offered(random.choice(files))
    return Counter()


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


WEDGED = (reads, faults, maps)

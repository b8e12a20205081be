"""What a parser may take: some memory, some time."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY_MAX = 1024**3
_PAGE = resource.getpagesize()


class Hangs(Exception):
    """It took longer than it may."""


@contextmanager
def memory_bounded(size: int = MEMORY_MAX) -> Iterator[None]:
    """So many bytes more than there are now, then MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def time_bounded(seconds: float) -> Iterator[None]:
    """Raises Hangs after that. For the main thread."""

    def ring(signal_number: int, frame: object) -> None:
        raise Hangs(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""Bytes of files at the speed of the mount: large requests past the page cache, and the next one
under way while the last is used."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from mount_tools.common import CommandError
from mount_tools.moving.content import BLOCK

T = TypeVar("T")

CHUNK = 4 * 1024 * 1024
"""Read and sent at once; whole blocks."""

# One is filled, one waits, one is used.
BUFFERS = 3
_PIPE_SIZE = 1024 * 1024
_VECTORS_MAX = 1024
_PATIENCE_SECONDS = 1.0
assert CHUNK % BLOCK == 0


class ChangedError(CommandError):
    """A file is not what it was a moment ago."""


def buffers() -> Iterator[memoryview]:
    """Page-aligned memory of CHUNK bytes each, a few in turn."""
    made = [memoryview(mmap.mmap(-1, CHUNK)) for _ in range(BUFFERS)]
    while True:
        yield from made


def pieces(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs [start, end) in pieces of a chunk at most: offset and length."""
    for start, end in runs:
        for at in range(start, end, CHUNK):
            yield at, min(CHUNK, end - at)


def read_at(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill the buffer. Raises ChangedError where the file ends before."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if not count:
            raise ChangedError("a file became shorter while it was read: stop who writes to it")
        done += count


def read_upto(fd: int, buffer: memoryview) -> int:
    """Fill the buffer from a pipe or file, as far as there is something; how far."""
    done = 0
    while done < len(buffer):
        count = os.readv(fd, [buffer[done:]])
        if not count:
            break
        done += count
    return done


def write_at(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """One behind the other, to a pipe or file."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        done = os.writev(fd, left[:_VECTORS_MAX])
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]


def past_page_cache(open_it: Callable[[int], int], flags: int) -> int:
    """A descriptor with O_DIRECT, where that can be."""
    try:
        return open_it(flags | os.O_DIRECT)
    except OSError as failure:
        if failure.errno != errno.EINVAL:
            raise
        return open_it(flags)


def widen_pipe(fd: int) -> None:
    """A pipe of the usual size costs a change of processes each 64 KiB."""
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)


@contextmanager
def ahead(values: Iterator[T]) -> Iterator[Iterator[T]]:
    """The same values, each made in another thread while the one before is used. A thread that
    waits for a pipe when nobody wants more is left behind."""
    made: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(1)
    unwanted = threading.Event()

    def make() -> None:
        try:
            for value in values:
                made.put((value,))
                if unwanted.is_set():
                    return
            made.put(None)
        except BaseException as failure:
            made.put(failure)

    def take() -> Iterator[T]:
        while (one := made.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one[0]

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        unwanted.set()
        # It may wait for room; then it sees that it is not wanted.
        with suppress(queue.Empty):
            made.get_nowait()
        thread.join(_PATIENCE_SECONDS)

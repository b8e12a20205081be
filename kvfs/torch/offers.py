"""What the daemon offers of its warm memory: parts of layer files, which lie in files of a tmpfs.

Those are read, not mapped: the kernel copies them straight to where they belong, as fast as one
copies out of a mapping, and makes no page tables for what is used once.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAP_ATTRIBUTE = "user.kvfs.map"
_XATTR_SIZE_MAX = 65536
# Not offered, not for us, or not what a daemon says: the mount has the same bytes.
_NO_OFFER = (OSError, ValueError, LookupError, TypeError, AttributeError)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fgetxattr.restype = ctypes.c_ssize_t
_libc.fgetxattr.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Segment:
    """Bytes at..end-1 of a layer file: those of the file behind `fd` from `offset` on."""

    at: int
    end: int
    fd: int
    offset: int


Segments = list[Segment]
_Told = tuple[str, int, int, int]  # path, offset, length, at


def covers(segments: Segments, begin: int, end: int) -> bool:
    """Whether every byte begin..end-1 is in a segment; they are in file order."""
    for segment in segments:
        if segment.at <= begin < segment.end:
            begin = segment.end
    return begin >= end


class Offer:
    """Parts of layer files by name. The warm files stay open as long as it lives: what they
    hold there does not change, also when the daemon gives them up."""

    def __init__(self, told: Mapping[str, Iterable[_Told]]) -> None:
        """`told` by the daemon, for each layer file. What was given up since is left out."""
        self._fds: dict[str, int] = {}
        weakref.finalize(self, _close, self._fds)
        self._files = {name: self._segments(parts) for name, parts in told.items()}

    @classmethod
    def of_file(cls, fd: int, name: str) -> Offer:
        """Of an open layer file; nothing if nothing is offered. The daemon brings it to warm
        memory, and keeps it there while the file is open."""
        try:
            told = _ask(fd)["segments"]
            return cls({name: [(p["path"], p["offset"], p["length"], p["at"]) for p in told]})
        except _NO_OFFER:
            return cls({})

    @classmethod
    def of_session(cls, directory: int) -> Offer | None:
        """Of all layer files of a session that are in warm memory now. None if that cannot be
        said at once."""
        try:
            told = _ask(directory)
            paths: list[str] = told["paths"]
            return cls(
                {
                    name: [(paths[number], *where) for number, *where in file["segments"]]
                    for name, file in told["files"].items()
                }
            )
        except _NO_OFFER:
            return None

    def segments(self, name: str) -> Segments:
        """What is offered of a layer file, in file order."""
        return self._files.get(name, [])

    def _segments(self, told: Iterable[_Told]) -> Segments:
        segments = []
        for path, offset, length, at in told:
            with suppress(FileNotFoundError):
                segments.append(Segment(at, at + length, self._open(path), offset))
        return segments

    def _open(self, path: str) -> int:
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]


class SessionOffer:
    """What is offered of a session when that is first asked for: one answer for all layers.

    No lease comes with it, so it is for a copy at once. The files may grow meanwhile, and
    must not be cut. Safe to use from several threads.
    """

    def __init__(self, directory: int) -> None:
        """Of the session with this descriptor."""
        self._directory = directory
        self._lock = threading.Lock()
        self._was_asked_for = False
        self._offer: Offer | None = None

    def get(self) -> Offer | None:
        """It, asked for with the first call; None when each file has to be asked for."""
        with self._lock:
            if not self._was_asked_for:
                self._offer = Offer.of_session(self._directory)
                self._was_asked_for = True
            return self._offer


def _ask(fd: int) -> Any:
    """What the attribute says. Asked for once: os.getxattr asks again when it is longer than 128
    bytes, and to answer is work for the daemon."""
    value = ctypes.create_string_buffer(_XATTR_SIZE_MAX)
    length = _libc.fgetxattr(fd, MAP_ATTRIBUTE.encode(), value, _XATTR_SIZE_MAX)
    if length < 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return json.loads(ctypes.string_at(value, length))


def _close(fds: dict[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)

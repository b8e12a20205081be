"""Warm sessions as `user.kvfs.map` shows them: layers that are parts of files of a tmpfs."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAP = "user.kvfs.map"
_LOOKED_AGAIN_SECONDS = 0.002
_WAIT_SECONDS = 60
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Part:
    """`length` bytes of a layer from `at` on are those of the warm file `path` at `offset`."""

    path: str
    offset: int
    length: int
    at: int


def shown(sessions: Sequence[Path], layers: int) -> list[list[Part]]:
    """The parts of each layer, in the order of sessions and names, once all of them are in warm
    memory; they must be on their way there."""
    return [parts for session in sessions for parts in _shown(session, layers)]


def _shown(session: Path, layers: int) -> list[list[Part]]:
    deadline = time.monotonic() + _WAIT_SECONDS
    while len((answer := json.loads(os.getxattr(session, MAP)))["files"]) < layers:
        if time.monotonic() > deadline:
            raise SystemExit(f"{session} is not in warm memory after {_WAIT_SECONDS} s")
        time.sleep(_LOOKED_AGAIN_SECONDS)
    return [
        [Part(answer["paths"][number], *where) for number, *where in file["segments"]]
        for _, file in sorted(answer["files"].items())
    ]


def map_files(layers: Sequence[Sequence[Part]]) -> dict[str, Bytes]:
    """The warm files by path, with page tables for all of what is there."""
    return {path: _map_file(path) for path in {part.path for parts in layers for part in parts}}


def _map_file(path: str) -> Bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(fd, 0, flags, mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)


def copy_out(
    layers: Sequence[Sequence[Part]], files: dict[str, Bytes], targets: Sequence[Bytes]
) -> None:
    for parts, target in zip(layers, targets, strict=True):
        for part in parts:
            source = files[part.path][part.offset : part.offset + part.length]
            np.copyto(target[part.at : part.at + part.length], source)


def read_out(layers: Sequence[Sequence[Part]], targets: Sequence[memoryview]) -> None:
    """The same by `preadv` of the warm files, as the adapter does it: nothing is mapped."""
    fds: dict[str, int] = {}
    try:
        for parts, target in zip(layers, targets, strict=True):
            for part in parts:
                if part.path not in fds:
                    fds[part.path] = os.open(part.path, os.O_RDONLY)
                buffer = target[part.at : part.at + part.length]
                if os.preadv(fds[part.path], [buffer], part.offset) != part.length:
                    raise SystemExit(f"short read of {part.path}")
    finally:
        for fd in fds.values():
            os.close(fd)

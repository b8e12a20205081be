"""A plain file for each layer, and a numpy array for each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np

from scripts.bench.peers.peer import Layers, Peer


class Files(Peer):
    """Also what reads and writes a mounted ring: there it is KVFS that is measured."""

    name = "plain file per layer"
    flags: ClassVar[int] = 0

    def save(self, session: str, layers: Layers) -> None:
        directory = self.root / session
        directory.mkdir()
        for name, data in layers.items():
            fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | self.flags, 0o600)
            try:
                if os.write(fd, data) != len(data):
                    raise OSError(f"short write of {directory / name}")
            finally:
                os.close(fd)

    def restore(self, session: str, into: Layers) -> None:
        for name, view in into.items():
            self._read(self.root / session / name, view)

    def _read(self, path: Path, view: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY | self.flags)
        try:
            done = 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], done)
                if count == 0:
                    raise EOFError(f"{path} ends after {done} bytes")
                done += count
        finally:
            os.close(fd)

    def remove(self, session: str) -> None:
        shutil.rmtree(self.root / session)


class DirectFiles(Files):
    """Layers of whole blocks, into page-aligned memory."""

    name = "plain file per layer, O_DIRECT"
    is_buffered = False
    flags = os.O_DIRECT


class Arrays(Peer):
    """`np.save`, and `np.load` as a map that is copied from."""

    name = "numpy memmap per layer"

    def save(self, session: str, layers: Layers) -> None:
        directory = self.root / session
        directory.mkdir()
        for name, data in layers.items():
            np.save(directory / f"{name}.npy", np.frombuffer(data, np.uint8))

    def restore(self, session: str, into: Layers) -> None:
        for name, view in into.items():
            mapped = np.load(self.root / session / f"{name}.npy", mmap_mode="r")
            np.frombuffer(view, np.uint8)[:] = mapped

    def remove(self, session: str) -> None:
        shutil.rmtree(self.root / session)

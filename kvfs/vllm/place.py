"""The directory that sessions are in, as long as it lies on a KVFS mount."""

from __future__ import annotations

import os
from pathlib import Path

from kvfs.torch.mounts import require_kvfs
from kvfs.vllm.shape import Shape


class Place:
    """After the mount is gone its path is an ordinary directory: nothing is written there."""

    def __init__(self, path: Path) -> None:
        """Made if it is not there.

        Raises:
            NotKVFSError: it is not on a mount.
            OSError: as the filesystem reports it.
        """
        require_kvfs(path)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._device = _device_of(path)

    def of(self, shape: Shape) -> Path:
        """The part of it that a rank has: each its own, with sessions that are whole in themselves.

        Raises:
            NotKVFSError: it is not on a mount now.
        """
        if _device_of(self._path) != self._device:
            require_kvfs(self._path)
            self._device = _device_of(self._path)
        fingerprint = shape.fingerprint
        if fingerprint.ranks == 1:
            return self._path
        return self._path / f"rank{fingerprint.rank}of{fingerprint.ranks}"


def _device_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_dev
    except FileNotFoundError:
        return None

"""Which filesystem a path lies on, as the kernel tells it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvfs.torch.errors import NotKVFSError

KVFS_TYPE = "fuse.kvfs"
_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: where a filesystem is mounted, and its type."""

    point: str
    fstype: str


def require_kvfs(path: str | os.PathLike[str]) -> None:
    """Pass silently if `path` lies on a KVFS mount.

    Raises:
        NotKVFSError: it lies on another filesystem; the message names both.
    """
    mount = mount_of(path)
    if mount.fstype != KVFS_TYPE:
        raise NotKVFSError(
            f"{os.fspath(path)} is on {mount.fstype} (mounted at {mount.point}), not on KVFS: "
            f"mount one with `kvfs mount MNT DEV` and give a directory below MNT"
        )


def mount_of(path: str | os.PathLike[str]) -> Mount:
    """The mount that `path` lies on, symlinks resolved."""
    real = os.path.realpath(path)
    # Later lines cover earlier ones at the same point, so of equal lengths the last wins.
    covering = (mount for mount in _mounts() if _is_below(real, mount.point))
    return max(enumerate(covering), key=lambda entry: (len(entry[1].point), entry[0]))[1]


def _mounts() -> list[Mount]:
    # The kernel escapes a newline in a name, and no carriage return.
    return [_parse(line) for line in _MOUNTINFO.read_bytes().rstrip(b"\n").split(b"\n")]


def _parse(line: bytes) -> Mount:
    place, _, filesystem = line.partition(b" - ")
    return Mount(_unescape(place.split(b" ")[4]), _unescape(filesystem.split(b" ")[0]))


def _unescape(field: bytes) -> str:
    return os.fsdecode(_OCTAL_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")

"""The kernel's table of mounts: which KVFS is where."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FILESYSTEM_TYPE = "fuse.kvfs"
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted KVFS. `device` is the kernel's number, as MAJOR:MINOR."""

    mountpoint: Path
    source: str
    device: str


def mounts() -> list[Mount]:
    """All mounted KVFS that this process can see."""
    found = []
    # Names of all users' mounts are in it: of any bytes, but for what the kernel escapes.
    table = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    for line in table.rstrip("\n").split("\n"):
        before, _, after = line.partition(" - ")
        kind, source, *_ = after.split(" ")
        if kind == FILESYSTEM_TYPE:
            fields = before.split(" ")
            found.append(Mount(Path(_unescape(fields[4])), _unescape(source), fields[2]))
    return found


def find_mount(mountpoint: Path) -> Mount | None:
    """The KVFS mounted exactly there. Does not touch it, so a dead one is found too."""
    wanted = Path(os.path.abspath(mountpoint))
    for mount in reversed(mounts()):
        if mount.mountpoint == wanted:
            return mount
    return None


def containing_mount(path: Path) -> Mount | None:
    """The KVFS that a path lies on."""
    wanted = Path(os.path.abspath(path))
    within = [mount for mount in mounts() if wanted.is_relative_to(mount.mountpoint)]
    return max(within, key=lambda mount: len(mount.mountpoint.parts), default=None)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)

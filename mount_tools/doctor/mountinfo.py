"""Which filesystem a path lies on, by the table of mounts: no filesystem is touched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mount_tools.doctor.system import System

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Filesystem:
    """`device` is MAJOR:MINOR, `options` those of the filesystem itself (proc(5), mountinfo)."""

    mountpoint: Path
    kind: str
    source: str
    device: str
    options: frozenset[str]


def filesystem_of(system: System, path: Path) -> Filesystem | None:
    """The one mounted last of those nearest to the path. None where the table cannot be read."""
    found: Filesystem | None = None
    for line in (system.text("/proc/self/mountinfo") or "").splitlines():
        each = _parse(line)
        if each is None or not path.is_relative_to(each.mountpoint):
            continue
        if found is None or len(each.mountpoint.parts) >= len(found.mountpoint.parts):
            found = each
    return found


def _parse(line: str) -> Filesystem | None:
    before, _, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if len(fields) < 5 or len(rest) < 3:
        return None
    return Filesystem(
        mountpoint=Path(_unescape(fields[4])),
        kind=rest[0],
        source=_unescape(rest[1]),
        device=fields[2],
        options=frozenset(rest[2].split(",")),
    )


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)

"""What can be seen of a process from outside: its memory, and what of it is KV."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvfs.mount.mounts import Mount
from mount_tools.doctor.system import System

_WARM_FILE = re.compile(r"/kvfs-\d+/[0-9a-f-]{36}/.*\.kvmap( \(deleted\))?$")
_FIELDS = {"VmRSS": "rss", "RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Of several processes together, in bytes; shared pages count in each of them."""

    rss: int = 0
    anon: int = 0
    file: int = 0
    shmem: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.rss + other.rss,
            self.anon + other.anon,
            self.file + other.file,
            self.shmem + other.shmem,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """What of KVFS a process has open or mapped. `warm_mapped` in bytes; `open_sessions` are
    directories; `is_whole` is False where another user's process shows only a part."""

    warm_mapped: int
    warm_open: int
    open_files: int
    open_sessions: frozenset[Path]
    mounts: frozenset[Path]
    has_torch: bool
    is_whole: bool


def memory_of(system: System, pid: int) -> Memory | None:
    """None where it has ended, or is not shown."""
    text = system.text(f"/proc/{pid}/status")
    if text is None:
        return None
    facts = {
        _FIELDS[match[1]]: int(match[2]) * 1024
        for match in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
        if match[1] in _FIELDS
    }
    return Memory(**facts)


def held_by(system: System, pids: list[int], mounts: list[Mount]) -> Held:
    """Links are read and not followed: a mount that hangs is not asked."""
    warm_mapped = warm_open = open_files = 0
    sessions: set[Path] = set()
    found_mounts: set[Path] = set()
    has_torch, is_whole = False, True
    for pid in pids:
        maps = system.text(f"/proc/{pid}/maps")
        is_whole &= maps is not None
        for size, path in _mappings(maps or ""):
            warm_mapped += size if _WARM_FILE.search(path) else 0
            has_torch |= "/libtorch" in path
        for path in _open_paths(system, pid):
            warm_open += bool(_WARM_FILE.search(path))
            mount = _mount_of(Path(path), mounts)
            if mount is not None:
                found_mounts.add(mount.mountpoint)
                open_files += 1
                sessions |= _session_of(path)
    return Held(
        warm_mapped, warm_open, open_files, frozenset(sessions), frozenset(found_mounts),
        has_torch, is_whole,
    )  # fmt: skip


def command_line(system: System, pid: int) -> list[str]:
    return [word for word in (system.text(f"/proc/{pid}/cmdline") or "").split("\0") if word]


def _mappings(maps: str) -> Iterator[tuple[int, str]]:
    """Sizes and paths, of those that have one (proc(5), maps)."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            begin, _, end = fields[0].partition("-")
            yield int(end, 16) - int(begin, 16), fields[5]


def _open_paths(system: System, pid: int) -> Iterator[str]:
    place = system.path(f"/proc/{pid}/fd")
    for name in system.names(f"/proc/{pid}/fd"):
        try:
            yield str((place / name).readlink())
        except OSError:
            continue


def _mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    within = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    return max(within, key=lambda mount: len(mount.mountpoint.parts), default=None)


def _session_of(path: str) -> set[Path]:
    """Of a layer file, or of a file that belongs to one; its adapter keeps these open."""
    file = Path(path.removesuffix(" (deleted)"))
    is_of_session = file.name.startswith(("layer.", "tokens", "session.json"))
    return {file.parent} if is_of_session else set()

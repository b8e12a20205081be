"""Sessions as ordinary files show them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfs.mount.mounts import Mount, containing_mount, mounts
from mount_tools.common import CommandError, warn
from mount_tools.mountpoints import answered, require_answer
from mount_tools.paths import opened

_DIRECTORIES_MAX = 100_000
_TOKEN_BYTES = 4
LAYER_PREFIX = "layer."
_BLOCK_UNIT = 512


@dataclass(frozen=True, slots=True)
class File:
    """A file of a session. `stored` is what it takes on the device."""

    name: str
    size: int
    stored: int
    last_use: float


@dataclass(frozen=True, slots=True)
class Session:
    """A directory with a KV cache. `tokens` and `model` are None where nothing says so; `tier`
    is warm, cold or mixed; `heat` as of all uses of the mount up to now."""

    path: Path
    name: str
    tokens: int | None
    layers: int
    size: int
    stored: int
    last_use: float
    model: str | None
    tier: str | None
    heat: float | None
    pinned: bool
    files: list[File]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "ratio": ratio(self.size, self.stored)}


def locate(path: Path) -> tuple[Mount, Path]:
    """The KVFS that a path lies on, which answers, and the path without symlinks."""
    # As it is written first: that touches nothing, should the mount be dead or hang.
    mount = containing_mount(path)
    require_answer(mount)
    resolved = Path(answered(path, lambda: os.path.realpath(path)))
    mount = containing_mount(resolved)
    require_answer(mount)
    try:
        os.stat(resolved)
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    except PermissionError:
        raise CommandError(f"{path} belongs to another user; run as its owner") from None
    if mount is None:
        raise CommandError(f"{path} is not on KVFS; mount one with: kvfs mount MNT DEV")
    return mount, resolved


def find_sessions(top: Path) -> Iterator[Session]:
    """All sessions in and below a directory. A bounded walk that stays on its mount."""
    others = {mount.mountpoint for mount in mounts()}
    waiting = [top]
    for _ in range(_DIRECTORIES_MAX):
        if not waiting:
            return
        directory = waiting.pop()
        try:
            session = read_session(directory, str(directory.relative_to(top)))
            waiting += [d for d in _directories_in(directory) if d not in others]
        except (FileNotFoundError, PermissionError):
            # Removed meanwhile, or another user's.
            continue
        if session is not None:
            yield session
    warn(f"{top}: only the first {_DIRECTORIES_MAX} directories were looked at")


def read_session(directory: Path, name: str) -> Session | None:
    """None if the directory holds no session."""
    with opened(directory) as fd:
        if not _is_session(fd):
            return None
        files = sorted(_files_in(fd), key=lambda file: file.name)
        model, tier = read_xattr(fd, "model"), read_xattr(fd, "tier")
        heat, pin = read_xattr(fd, "heat"), read_xattr(fd, "pin")
    by_name = {file.name: file for file in files}
    return Session(
        path=directory,
        name=name if name != "." else directory.name,
        tokens=by_name["tokens"].size // _TOKEN_BYTES if "tokens" in by_name else None,
        layers=sum(file.name.startswith(LAYER_PREFIX) for file in files),
        size=sum(file.size for file in files),
        stored=sum(file.stored for file in files),
        last_use=max((file.last_use for file in files), default=0),
        model=model,
        tier=tier,
        heat=None if heat is None else float(heat),
        pinned=pin == "1",
        files=files,
    )


def read_xattr(path: Path | int, name: str) -> str | None:
    """`user.kvfs.NAME`, None where it is not set. Its owner may have set any bytes."""
    try:
        return os.fsdecode(os.getxattr(path, f"user.kvfs.{name}"))
    except OSError as failure:
        if failure.errno == errno.ENODATA:
            return None
        raise


def stored_bytes(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK_UNIT


def ratio(size: int, stored: int) -> float | None:
    """None while nothing is stored."""
    return round(size / stored, 3) if stored else None


def _is_session(directory: int) -> bool:
    """By the names alone: a directory of other files may be long."""
    with os.scandir(directory) as entries:
        return any(
            entry.name == "session.json" or entry.name.startswith(LAYER_PREFIX) for entry in entries
        )


def _files_in(directory: int) -> Iterator[File]:
    with os.scandir(directory) as entries:
        for entry in entries:
            # Not asked of a directory: another mount may lie there, and hang.
            if not entry.is_file(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                used = max(status.st_atime, status.st_mtime)
                yield File(entry.name, status.st_size, stored_bytes(status), used)


def _directories_in(directory: Path) -> list[Path]:
    with opened(directory) as fd, os.scandir(fd) as entries:
        return [directory / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

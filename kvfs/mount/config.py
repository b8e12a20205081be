"""What a mount is told to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from kvfs.engine.store import StoreOptions
from kvfs.mount.scrubbing import ScrubOptions
from kvfs.tiers.profiles import Profile

WARM_DIRECTORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where the metrics are served: an IP address, and a TCP port."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class MountConfig:
    """What a mount needs to know. Sizes in bytes; `options` are fusermount3's."""

    mountpoint: Path
    source: Path
    warm_directory: Path = WARM_DIRECTORY
    warm_size: int | None = None
    options: frozenset[str] = frozenset()
    deadline_seconds: float = 30.0
    window_size: int = 16 * 1024 * 1024
    profile: Profile = field(default_factory=Profile)
    store: StoreOptions = field(default_factory=StoreOptions)
    scrub: ScrubOptions = field(default_factory=ScrubOptions)
    metrics: MetricsAddress | None = None

    @property
    def read_only(self) -> bool:
        return "ro" in self.options

    def as_toml(self) -> bytes:
        """With tables for what is nested, and without what is None."""
        text = tomli_w.dumps(_plain(asdict(self)))
        # TOML is UTF-8, and the name of a file may be any bytes.
        return f"# Sizes are in bytes.\n{text}".encode(errors="replace")


def _plain(value: Any) -> Any:
    """In types that TOML has."""
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items() if inner is not None}
        case Path():
            return str(value)
        case frozenset():
            return sorted(value)
    return value

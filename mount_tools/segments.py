"""How the segments of a ring are filled, as `/.kvfs/segments` tells."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SEGMENTS = Path(".kvfs") / "segments"
FREE = -1


@dataclass(frozen=True, slots=True)
class Segments:
    """`size` of a segment in bytes; the log goes on at `head_offset` of segment `head`, then in
    `next`; a mount would replay it from `tail` on; `victim` is cleaned next. `live_pct` by
    segment: FREE for what may be overwritten, 0 for what waits for a checkpoint to be."""

    size: int
    free: int
    head: int
    head_offset: int
    next: int | None
    tail: int
    victim: int | None
    live_pct: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        return self.live_pct.size

    @property
    def live_share(self) -> float:
        """Of the whole ring, from 0 to 1."""
        return float(np.maximum(self.live_pct, 0).mean()) / 100


def read_segments(mountpoint: Path) -> Segments:
    """Raises OSError; PermissionError for who is neither root nor the daemon's user."""
    document = json.loads((mountpoint / SEGMENTS).read_text())
    del document["count"]
    return Segments(**document | {"live_pct": np.array(document["live_pct"], np.int64)})

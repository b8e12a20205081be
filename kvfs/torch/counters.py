"""What one cache has moved, and what it waited for."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass
class Counters:
    """Sums since the cache was opened; a block is one layer x one slab of tokens."""

    hot_hits: int = 0
    """Blocks that a forward found in hot memory."""
    fetched_blocks: int = 0
    """Blocks that were brought in from their file."""
    fetched_bytes_warm: int = 0
    """Bytes read from the daemon's warm memory."""
    fetched_bytes_mount: int = 0
    """Bytes read through the mount."""
    written_bytes: int = 0
    """Bytes written to layer files."""
    fetch_seconds: float = 0.0
    """Time in fetches, those in the background too."""
    wait_seconds: float = 0.0
    """Time that a forward stood still for a fetch."""
    evict_seconds: float = 0.0
    """Time in moving blocks out of hot memory."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to several at once, from any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

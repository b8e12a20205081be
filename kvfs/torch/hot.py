"""Hot memory: equal slabs under one budget of bytes, for all sessions of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable

DEFAULT_BUDGET_BYTES = 128 << 20
SLAB_BYTES = 256 << 10


class HotPool:
    """The hot bytes that the caches of a process share. Safe to use from several threads.

    `on_pressure(nbytes)` is called, if it is set, when a slab is wanted and none is free
    within the budget: whoever owns the sessions then demotes something.
    """

    def __init__(self, budget_bytes: int | None = None, slab_bytes: int = SLAB_BYTES) -> None:
        """Without a budget 128 MiB, raised to two layers of the longest session."""
        self.budget_bytes = DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes
        self.slab_bytes = slab_bytes
        self.on_pressure: Callable[[int], None] | None = None
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that hold KV."""
        return self._used

    @property
    def free_slabs(self) -> int:
        """How many slabs can be taken before the budget is reached."""
        return max(0, self.budget_bytes - self._used) // self.slab_bytes

    def charge(self, nbytes: int) -> None:
        """Account for `nbytes` more (or, negative, less)."""
        if nbytes > 0 and self._used + nbytes > self.budget_bytes and self.on_pressure:
            self.on_pressure(nbytes)
        with self._lock:
            self._used += nbytes

"""Which warm files others may have mapped: by leases, which keep them, or shown for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from cachetools import TTLCache

from kvfs.tiers.kvmap import Kvmap

_SHOWN_SECONDS = 10  # so long at most does it take to copy what was shown
_SHOWN_MAX = 65_536


@dataclass(slots=True)
class Leases:
    """`limit` is the most that is lent, in bytes; whole warm files count. A lease is of one
    inode, and ends when nobody has that open any longer."""

    limit: int
    clock: Callable[[], float] = time.monotonic
    _by_inode: dict[int, dict[int, Kvmap]] = field(default_factory=dict)
    _leased: dict[int, Kvmap] = field(default_factory=dict)
    _shown: TTLCache[int, int] = field(init=False)  # bytes by the serial of a warm file

    def __post_init__(self) -> None:
        self._shown = TTLCache(_SHOWN_MAX, _SHOWN_SECONDS, self.clock)

    @property
    def total(self) -> int:
        """Bytes of the warm files that others may have mapped."""
        shown = sum(taken for serial, taken in self._shown.items() if serial not in self._leased)
        return shown + sum(kvmap.taken for kvmap in self._leased.values())

    def give(self, ino: int, kvmaps: Collection[Kvmap]) -> bool:
        """Keep these until `end`. False when too much is lent."""
        if not self._may_lend(kvmaps):
            return False
        mine = self._by_inode.setdefault(ino, {})
        for kvmap in kvmaps:
            serial = kvmap.header.serial
            if serial not in mine:
                mine[serial] = self._leased[serial] = kvmap
                kvmap.users += 1
                kvmap.leases += 1
        return True

    def end(self, ino: int) -> None:
        for kvmap in self._by_inode.pop(ino, {}).values():
            kvmap.users -= 1
            kvmap.leases -= 1
            if not kvmap.leases:
                del self._leased[kvmap.header.serial]

    def show(self, kvmaps: Collection[Kvmap]) -> bool:
        """Count these as lent for a few seconds, and keep none. False when too much is lent."""
        if not self._may_lend(kvmaps):
            return False
        self._shown.update((kvmap.header.serial, kvmap.taken) for kvmap in kvmaps)
        return True

    def gone(self, kvmap: Kvmap) -> None:
        """It was given up."""
        self._shown.pop(kvmap.header.serial, None)

    def _may_lend(self, kvmaps: Collection[Kvmap]) -> bool:
        known = self._leased.keys() | self._shown.keys()
        more = sum(kvmap.taken for kvmap in kvmaps if kvmap.header.serial not in known)
        return self.total + more <= self.limit

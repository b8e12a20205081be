"""How often each inode is held: some 20 bytes for each that the kernel remembers.

The kernel remembers as many as its memory allows, and says when it forgets one. A dict
would take a hundred bytes for each; here only lately changed counts are in one, and
the others in two arrays by inode number, into which those are merged now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_RECENT_MIN = 4096
_RECENT_SHARE = 64  # at most one part in so many is in the dict

_END = np.iinfo(np.int64).max

Numbers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Pins:
    """`_recent` has what is to be added to the counts in the arrays. These end with a
    number that no inode has, so that there is always a place to look at."""

    _inos: Numbers = field(default_factory=lambda: np.array([_END]))
    _counts: Numbers = field(default_factory=lambda: np.array([1]))
    _recent: dict[int, int] = field(default_factory=dict)

    def __contains__(self, ino: int) -> bool:
        return self._settled(ino) + self._recent.get(ino, 0) > 0

    def __len__(self) -> int:
        self._merge()
        return len(self._inos) - 1

    def add(self, ino: int) -> None:
        self._change(ino, 1)

    def remove(self, ino: int, count: int) -> bool:
        """So many holders less. False when none is left."""
        held = self._settled(ino) + self._recent.get(ino, 0)
        self._change(ino, -min(count, held))
        return held > count

    def _change(self, ino: int, change: int) -> None:
        self._recent[ino] = self._recent.get(ino, 0) + change
        if len(self._recent) > max(_RECENT_MIN, len(self._inos) // _RECENT_SHARE):
            self._merge()

    def _settled(self, ino: int) -> int:
        at = int(self._inos.searchsorted(ino))
        return int(self._counts[at]) if self._inos[at] == ino else 0

    def _merge(self) -> None:
        recent, self._recent = self._recent, {}
        inos = np.fromiter(recent.keys(), np.int64, len(recent))
        changes = np.fromiter(recent.values(), np.int64, len(recent))
        order = inos.argsort()
        inos, changes = inos[order], changes[order]
        places = self._inos.searchsorted(inos)
        known = self._inos[places] == inos
        self._counts[places[known]] += changes[known]
        new = places[~known]
        all_inos = np.insert(self._inos, new, inos[~known])
        counts = np.insert(self._counts, new, changes[~known])
        self._inos, self._counts = all_inos[counts > 0], counts[counts > 0]

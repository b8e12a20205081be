"""The heat of blocks: the sum of 1 / age over their last uses, an age counted in uses of all.

H = sum of 1 / (now + 1 - tick) over the ticks of a block's last uses. A window of 100
ticks would take 800 bytes a block. Instead 1 / x is written as a sum of exponentials (the
trapezoidal rule for the integral of exp(u - x exp(u)) over u; Beylkin and Monzon, "On
approximation of functions by exponential sums", 2005): each of them decays by itself, so a
block keeps one number for each and the tick it is as of. With rates a factor of 8 apart the sum is
within 10 % of 1 / x for ages up to 50 million uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Heats = npt.NDArray[np.float32]

HOT_SHARE = 1.8
COLD_SHARE = 0.9

_FACTOR = 8.0
_TERMS = 11
_RATES = (_FACTOR ** (1.0 - np.arange(_TERMS))).astype(np.float32)
_WEIGHTS = (np.log(_FACTOR) * _RATES).astype(np.float32)
_CHUNK = 1 << 15  # blocks at a time: what is computed in between stays in the cache


class Temperature(IntEnum):
    COLD = -1
    WARM = 0
    HOT = 1


@dataclass(slots=True)
class HeatMap:
    """Blocks are small ints that the caller gives, and may give again once forgotten. Takes 52
    bytes a block, and an eighth more for growth.

    `window`: so many uses of a block count. A use beyond it does not drop out at once: each
    use takes 1 / window from those before.
    """

    window: int = 100
    now: int = 0
    _sums: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, _TERMS), "f4"))
    _ticks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes + self._ticks.nbytes

    def add(self, ids: Ids) -> None:
        """Blocks that were not used yet: their heat is 0."""
        if ids.size:
            self.reserve(int(ids.max()) + 1)
            self._sums[ids] = 0

    def forget(self, ids: Ids) -> None:
        """Their heat is 0 until they are used, as something else maybe."""
        self._sums[ids] = 0

    def access(self, ids: Ids) -> None:
        """Uses in this order, a tick each. A block may be among them several times."""
        if not ids.size:
            return
        self.reserve(int(ids.max()) + 1)
        # Those of each block side by side, in their order.
        order = np.argsort(ids, kind="stable")
        blocks, starts, uses = np.unique(ids[order], return_index=True, return_counts=True)
        ticks = self.now + 1 + order
        self.now += ids.size
        last = ticks[starts + uses - 1]
        later = np.repeat(starts + uses, uses) - 1 - np.arange(ids.size)
        new = _decay(np.repeat(last, uses) - ticks) * self._kept(later)
        old = self._sums[blocks] * _decay(last - self._ticks[blocks]) * self._kept(uses)
        self._sums[blocks] = old + np.add.reduceat(new, starts)
        self._ticks[blocks] = last

    def _kept(self, uses: Ids) -> Heats:
        """What so many uses leave of those before, as a column."""
        left: Heats = np.float32(1 - 1 / self.window) ** uses.astype(np.float32)[:, None]
        return left

    def heat(self, ids: Ids) -> Heats:
        """H of each block, as of the newest tick."""
        heats = np.empty(ids.size, np.float32)
        for start in range(0, ids.size, _CHUNK):
            chunk = ids[start : start + _CHUNK]
            decay = _decay(self.now + 1 - self._ticks[chunk])
            heats[start : start + _CHUNK] = (self._sums[chunk] * decay) @ _WEIGHTS
        return heats

    def classify(self, ids: Ids) -> npt.NDArray[np.int8]:
        """A Temperature for each of the hot and warm blocks: `ids` must be all of them, since
        their mean decides."""
        heats = self.heat(ids)
        mean = heats.mean() if ids.size else 0
        is_hot, is_cold = heats > HOT_SHARE * mean, heats < COLD_SHARE * mean
        return is_hot.astype(np.int8) - is_cold.astype(np.int8)

    def reserve(self, size: int) -> None:
        """Have room for ids below `size`."""
        grown = size - len(self._ticks)
        if grown > 0:
            grown = max(grown, size // 8)
            self._sums = np.concatenate([self._sums, np.zeros((grown, _TERMS), np.float32)])
            self._ticks = np.concatenate([self._ticks, np.zeros(grown, np.int64)])


def _decay(ages: Ids) -> npt.NDArray[np.float32]:
    decay: npt.NDArray[np.float32] = np.exp(-ages.astype(np.float32)[:, None] * _RATES)
    return decay

"""Figures as characters: bars, columns, and what is where in a ring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_STEPS = len(_HEIGHTS) - 1


def bar(share: float, width: int) -> str:
    """From the left, `width` characters in all; `share` from 0 to 1."""
    eighths = round(min(max(share, 0), 1) * width * _STEPS)
    whole, rest = divmod(eighths, _STEPS)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def column(share: float) -> str:
    """One character. What is more than nothing is seen."""
    return _HEIGHTS[min(_STEPS, max(1, round(share * _STEPS)))] if share > 0 else " "


def columns(values: Iterable[float]) -> str:
    """Side by side, the largest one full."""
    values = list(values)
    largest = max(values, default=0)
    return "".join(column(value / largest if largest else 0) for value in values)


def heat_share(heat: float, hottest: float) -> float:
    """How long a bar of it is, from 0 to 1: by its logarithm, over three decades, since heat falls
    as 1 / age."""
    return max(0.0, 1 + math.log10(heat / hottest) / 3) if heat > 0 and hottest > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Which of `count` things in a row each of `cells` characters stands for: several, or a part
    of one."""

    count: int
    cells: int

    def means(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of the things that each character stands for."""
        starts = self._starts()
        ends = np.maximum(starts + 1, np.append(starts[1:], self.count))
        sums = np.concatenate([[0.0], np.cumsum(values)])
        means: npt.NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
        return means

    def cell_of(self, number: int) -> int:
        """The first character of a thing."""
        starts = self._starts()
        first = int(np.searchsorted(starts, number, "left"))
        if first < self.cells and starts[first] == number:
            return first
        return int(np.searchsorted(starts, number, "right")) - 1

    def _starts(self) -> npt.NDArray[np.int64]:
        starts: npt.NDArray[np.int64] = np.arange(self.cells) * self.count // self.cells
        return starts

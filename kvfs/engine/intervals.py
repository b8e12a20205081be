"""Non-overlapping runs of a file, each with a value that can be cut.

Two of these describe a file: what lies in the ring (runs of extents) and, above
it, what does not yet (runs of dirty bytes).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Run(Generic[V]):
    """The bytes [start, end) of a file. Offsets in bytes."""

    start: int
    end: int
    value: V


class Intervals(Generic[V]):
    """Runs in order. `cut(value, from, to)` is the value of a part of a run, in bytes
    relative to the run's start."""

    __slots__ = ("_cut", "_runs", "_starts")

    def __init__(self, cut: Callable[[V, int, int], V]) -> None:
        self._cut = cut
        self._starts: list[int] = []
        self._runs: list[Run[V]] = []

    def __iter__(self) -> Iterator[Run[V]]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def end(self) -> int:
        """The offset after the last run; 0 when there is none."""
        return self._runs[-1].end if self._runs else 0

    def insert(self, start: int, end: int, value: V) -> tuple[list[Run[V]], list[Run[V]]]:
        """Put a run over what is there. Returns the runs that went and those that came
        instead (what was left of them, and the new one)."""
        run = Run(start, end, value)
        if start >= self.end:
            self._starts.append(start)
            self._runs.append(run)
            return [], [run]
        removed, added = self.punch(start, end)
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._runs.insert(at, run)
        added.append(run)
        return removed, added

    def punch(self, start: int, end: int) -> tuple[list[Run[V]], list[Run[V]]]:
        """Remove [start, end). Returns the runs that went and what was left of them."""
        low, high = self._span(start, end)
        removed = self._runs[low:high]
        left: list[Run[V]] = []
        for run in removed:
            if run.start < start:
                left.append(self._part(run, run.start, start))
            if run.end > end:
                left.append(self._part(run, end, run.end))
        self._runs[low:high] = left
        self._starts[low:high] = [run.start for run in left]
        return removed, left

    def overlapping(self, start: int, end: int) -> Iterator[Run[V]]:
        """The runs within [start, end), cut to it."""
        low, high = self._span(start, end) if start < end else (0, 0)
        for run in self._runs[low:high]:
            if run.start >= start and run.end <= end:
                yield run
            else:
                yield self._part(run, max(run.start, start), min(run.end, end))

    def _span(self, start: int, end: int) -> tuple[int, int]:
        low = bisect_right(self._starts, start)
        if low and self._runs[low - 1].end > start:
            low -= 1
        return low, max(low, bisect_left(self._starts, end))

    def _part(self, run: Run[V], start: int, end: int) -> Run[V]:
        return Run(start, end, self._cut(run.value, start - run.start, end - run.start))

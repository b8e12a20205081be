"""How long things took: counts by bucket, from which quantiles follow."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper bounds in seconds, a factor of 2 ** (1 / 4) apart: a quantile is at most 19 % too high.
BOUNDS = tuple(1e-5 * 2 ** (step / 4) for step in range(88))


@dataclass(slots=True)
class Latencies:
    """`total` and bounds in seconds; the last count is of what took longer than all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def saw(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def quantile(self, share: float) -> float:
        """The bound in seconds that this share stayed below; 0 when nothing was seen."""
        wanted = share * sum(self.counts)
        seen = 0
        for count, bound in zip(self.counts, (*BOUNDS, BOUNDS[-1]), strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0

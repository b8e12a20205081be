"""`window=`: attention to the last rounds and the first tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfs.torch.ranges import Ranges, union


@dataclass
class Window:
    """The last `rounds` ended rounds, the one that runs, the first `sinks` tokens.

    And the rounds in `recalled`, by their number from 0 on.
    """

    rounds: int
    sinks: int
    recalled: set[int] = field(default_factory=set)

    def attended(self, ends: Sequence[int], length: int) -> Ranges:
        """The tokens that are attended to; `ends` are the token counts at round ends."""
        begin = ends[-self.rounds - 1] if len(ends) > self.rounds else 0
        recalled = (span_of(number, ends) for number in self.recalled if number < len(ends))
        return union([(0, min(self.sinks, length)), (begin, length), *recalled])


def span_of(number: int, ends: Sequence[int]) -> tuple[int, int]:
    """The tokens of a round, first and last + 1."""
    return (ends[number - 1] if number else 0), ends[number]

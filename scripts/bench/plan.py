"""What a run of the suite is to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

Work = TypeVar("Work")


@dataclass(frozen=True, slots=True)
class Plan:
    """`directory` is an empty one on the disk, for the images; `rounds` that count, each after
    one that only touches what is used again. `is_short`: minutes instead of an hour; each row
    says in its remark where it measures less."""

    directory: Path
    rounds: int
    is_short: bool

    def command(self, number: int) -> str:
        """What measures a row so again."""
        short = " --short" if self.is_short else ""
        return f"python -m scripts.bench{short} --rows {number} --rounds {self.rounds}"

    def pick(self, full: int, short: int) -> int:
        return short if self.is_short else full


def shuffled(works: Mapping[str, Work], number: int) -> list[tuple[str, Work]]:
    """In another order each round: a throttled disk is quick for who comes after a rest."""
    return Random(number).sample(list(works.items()), len(works))

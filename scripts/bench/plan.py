"""What a run of the suite is to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plan:
    """`directory` is an empty one on the disk, for the images; `rounds` that count, each after
    one that only touches what is used again. `is_short`: minutes instead of an hour; each row
    says in its remark where it measures less."""

    directory: Path
    rounds: int
    is_short: bool

    def pick(self, full: int, short: int) -> int:
        return short if self.is_short else full

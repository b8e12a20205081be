"""Python packages that agents need, where this command runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.system import System


@dataclass(frozen=True, slots=True)
class Range:
    """Versions from `least` on and before `before`; as in pyproject.toml."""

    least: tuple[int, int]
    before: tuple[int, int] | None
    extra: str

    def __str__(self) -> str:
        end = "" if self.before is None else f", before {self.before[0]}"
        return f"{self.least[0]}.{self.least[1]} or newer{end}"


RANGES = {
    "torch": Range((2, 5), None, "torch"),
    "transformers": Range((5, 20), (6, 0), "hf"),
}


def checks(system: System) -> Iterator[Check]:
    for name, wanted in RANGES.items():
        yield _package(system, name, wanted)


def _package(system: System, name: str, wanted: Range) -> Check:
    question = Question(
        "software",
        name,
        str(wanted),
        "the adapter (KVFSCache) is written for and tested with these; the mount needs neither",
        f"pip install 'kvfs[{wanted.extra}]'",
    )
    version = system.package_version(name)
    if version is None:
        return question.unknown("not installed where this command runs", question.command)
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    good = wanted.least <= numbers and (wanted.before is None or numbers < wanted.before)
    return question.judged(version, good=good, otherwise=Status.WARNING)

"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NOTHING = "-"
"""Wanted of a figure that is only told."""


class Status(str, Enum):
    """From the best to the worst: advice could make it faster, a warning will make trouble, with
    an error it does not work. Unknown: the machine does not tell."""

    OK = "ok"
    UNKNOWN = "unknown"
    ADVICE = "advice"
    WARNING = "warning"
    ERROR = "error"

    @property
    def is_trouble(self) -> bool:
        return self in (Status.WARNING, Status.ERROR)


@dataclass(frozen=True, slots=True)
class Check:
    """`command` changes it, or tells what is unknown; None where no command does."""

    group: str
    name: str
    status: Status
    found: str
    wanted: str
    why: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What is known of a check before anybody looks."""

    group: str
    name: str
    wanted: str
    why: str
    command: str | None = None

    def ok(self, found: str) -> Check:
        return self._answered(Status.OK, found, None)

    def unknown(self, found: str, command: str | None = None) -> Check:
        return self._answered(Status.UNKNOWN, found, command)

    def bad(self, status: Status, found: str, command: str | None = None) -> Check:
        """`command` where another one than usual is needed."""
        return self._answered(status, found, command or self.command)

    def judged(self, found: str, *, good: bool, otherwise: Status) -> Check:
        return self.ok(found) if good else self.bad(otherwise, found)

    def _answered(self, status: Status, found: str, command: str | None) -> Check:
        return Check(self.group, self.name, status, found, self.wanted, self.why, command)

"""What agents say of their sessions by `user.kvfs.hint`.

tool_started            the model waits for a tool
tool_done               the tool has answered: the next turn begins at once
turn_expected=SECONDS   the next turn begins in so many seconds
hot_stats=JSON          what of the session the accelerator holds: {"bytes": N}, and
                        how often it was asked, {"hits": N, "misses": N}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import Any

_TEXT_MAX = 4096
_SECONDS_MAX = 30 * 24 * 3600.0
_COUNT_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ToolStarted:
    pass


@dataclass(frozen=True, slots=True)
class ToolDone:
    pass


@dataclass(frozen=True, slots=True)
class TurnExpected:
    seconds: float


@dataclass(frozen=True, slots=True)
class HotStats:
    """`bytes` on the accelerator; blocks that were found there, and not, so far."""

    bytes: int
    hits: int = 0
    misses: int = 0


Said = ToolStarted | ToolDone | TurnExpected | HotStats


def parse(value: bytes) -> Said:
    """Raises ValueError, with what is wrong, for what is no hint."""
    if len(value) > _TEXT_MAX:
        raise ValueError(f"a hint has at most {_TEXT_MAX} bytes")
    name, given, argument = value.decode("utf-8").strip().partition("=")
    match name, bool(given):
        case "tool_started", False:
            return ToolStarted()
        case "tool_done", False:
            return ToolDone()
        case "turn_expected", True:
            return TurnExpected(_seconds(argument))
        case "hot_stats", True:
            return _hot_stats(argument)
    raise ValueError("a hint is tool_started, tool_done, turn_expected=SECONDS or hot_stats=JSON")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"turn_expected={text} is no number of seconds") from None
    if not isfinite(seconds) or not 0 <= seconds <= _SECONDS_MAX:
        raise ValueError(f"turn_expected is from 0 to {_SECONDS_MAX:.0f} seconds")
    return seconds


def _hot_stats(text: str) -> HotStats:
    try:
        figures: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("hot_stats is no JSON") from None
    known = HotStats.__dataclass_fields__
    if not isinstance(figures, dict) or "bytes" not in figures or figures.keys() - known.keys():
        raise ValueError('hot_stats is an object of "bytes" and, if known, "hits" and "misses"')
    if not all(type(n) is int and 0 <= n <= _COUNT_MAX for n in figures.values()):
        raise ValueError("the figures of hot_stats are whole numbers, not negative")
    return HotStats(**figures)

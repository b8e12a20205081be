"""What each driver does: `DRIVER DIR ARGUMENT...` reads `store` or `load` line by line from its
standard input and answers each with a line of JSON.

    {"seconds": 1.2, "bytes": 1000, "hits": 3, "digest": "..."}

Drivers run with the Python of their engine. What that prints, from the import of this module on,
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    seconds: float
    bytes: int
    hits: int
    digest: str


def _take_stdout() -> int:
    """A descriptor of its own, so that what an engine prints is no answer."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


_ANSWERS = _take_stdout()


def serve(store: Callable[[], Outcome], load: Callable[[], Outcome]) -> None:
    """Until the standard input ends."""
    verbs = {"store": store, "load": load}
    answer_lines(lambda line: verbs[line.strip()]()._asdict())


def answer_lines(answer: Callable[[str], dict[str, Any]]) -> None:
    """Until the standard input ends."""
    with os.fdopen(_ANSWERS, "w", buffering=1) as answers:
        for line in sys.stdin:
            answers.write(json.dumps(answer(line)) + "\n")

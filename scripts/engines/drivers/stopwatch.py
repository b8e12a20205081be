"""What a connector takes of an answer; the rest is the model's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Stopwatch:
    seconds = 0.0

    def of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        return timed

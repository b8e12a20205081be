"""What an engine tells by itself: Prometheus' text, over HTTP on this machine."""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

_SECONDS = 2.0
_TEXT_MAX = 8 * 1024 * 1024
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?")
_USUAL_PORTS = frozenset({8000, 8080, 30000, 9090, 9100, 9400, 8001})
"""vLLM, llama.cpp, SGLang, and those that Prometheus clients are used with."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The samples of one process by name, those of all labels summed."""

    port: int
    samples: Mapping[str, float]

    def first(self, names: Iterable[str]) -> float | None:
        """Of the first name that is there: names change with an engine's release."""
        return next((self.samples[name] for name in names if name in self.samples), None)


def may_ask(port: int, command_line: list[str]) -> bool:
    """A listening port may be a store or a ring of ranks, which bytes of HTTP could upset: only
    usual ports are asked, and one that the command line names as --port."""
    words = [part for word in command_line for part in word.split("=", 1)]
    named = {after for word, after in pairwise(words) if word == "--port"}
    return port in _USUAL_PORTS or str(port) in named


def read_endpoint(port: int, host: str = "127.0.0.1") -> Endpoint | None:
    """None where nothing on that port speaks Prometheus' text."""
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return None
        samples = parse_samples(answer.read(_TEXT_MAX).decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return Endpoint(port, samples) if samples else None


def parse_samples(text: str) -> dict[str, float]:
    """Prometheus' text format 0.0.4; lines that are none, and what is not finite, are passed
    over."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        try:
            value = float(match[2]) if match else math.nan
        except ValueError:
            continue
        if match and math.isfinite(value):
            samples[match[1]] = samples.get(match[1], 0.0) + value
    return samples

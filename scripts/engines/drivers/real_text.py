"""Prompts of real text: stretches of the demo's conversations, no two of them beginning alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_TEXTS = Path(__file__).parents[2] / "demo_text"
_STRIDE = 700


def prompts(tokenize: Callable[[str], list[int]], count: int, tokens_each: int) -> list[list[int]]:
    text = "".join(file.read_text() for file in sorted(_TEXTS.glob("*.txt")))
    tokens = tokenize(text)
    return [tokens[start : start + tokens_each] for start in range(0, count * _STRIDE, _STRIDE)]

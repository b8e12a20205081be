"""`window=`: what attention sees, what leaves, and how it comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import HotPool, KVFSCache
from kvfs.torch.window import Window

Prompt = Callable[..., torch.Tensor]
ModelMaker = Callable[..., PreTrainedModel]
LAYERS, SLAB, BLOCK = 8, 4096, 16
ROUND = 3 * BLOCK


def fill(model: PreTrainedModel, cache: object, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache, **options).logits
    return logits


def only(reference: DynamicCache, seen: list[int]) -> DynamicCache:
    """A cache of some tokens of another one."""
    part = DynamicCache()
    for index, layer in enumerate(reference.layers):
        assert isinstance(layer.keys, torch.Tensor) and isinstance(layer.values, torch.Tensor)
        part.update(layer.keys[:, :, seen], layer.values[:, :, seen], index)
    return part


def kept(model: PreTrainedModel, cache: KVFSCache) -> DynamicCache:
    """All that the session holds, as its files say it."""
    whole = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = torch.cat([part.clone() for part in layer.rows_by_block()], dim=3)
        whole.update(keys, values, index)
    return whole


def test_what_is_attended_to() -> None:
    ends = [10, 20, 30, 40]
    assert Window(2, 4).attended(ends, 45) == [(0, 4), (20, 45)]
    assert Window(2, 4, {1}).attended(ends, 45) == [(0, 4), (10, 45)]
    assert Window(1, 0, {0}).attended(ends, 40) == [(0, 10), (30, 40)]
    assert Window(4, 4).attended(ends, 45) == [(0, 45)]
    assert Window(1, 4).attended([], 3) == [(0, 3)]


@pytest.mark.parametrize("budget", [32 << 20, 100 * SLAB])
def test_the_last_rounds_and_the_sinks_are_seen_at_their_own_positions(
    budget: int, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    pool = HotPool(budget, slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool, window=1, sinks=4) as cache:
        for turn in range(3):
            fill(model, cache, prompt(ROUND, seed=turn))
            cache.end_round()
        whole = kept(model, cache)
        length = 3 * ROUND
        seen = [*range(4), *range(2 * ROUND, length)]
        assert cache.left_out == [(4, 2 * ROUND)]
        reference = only(whole, seen)
        for turn, count in enumerate((1, 7, 1)):
            ids = prompt(count, seed=10 + turn)
            positions = torch.arange(length, length + count).unsqueeze(0)
            past = reference.get_seq_length()
            mask = torch.ones(count, past + count, dtype=torch.bool).tril(past)
            expected = fill(
                model, reference, ids, position_ids=positions, attention_mask=mask[None, None]
            )
            torch.testing.assert_close(fill(model, cache, ids), expected)
            length += count
        assert cache.get_seq_length() == length


def test_what_leaves_is_written_freed_and_said_and_comes_back(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HotPool(32 << 20, slab_bytes=SLAB)
    with (
        caplog.at_level(logging.WARNING, "kvfs.torch"),
        KVFSCache.open(kv_directory, "agent", model, pool=pool, window=1, sinks=4) as cache,
    ):
        for turn in range(3):
            fill(model, cache, prompt(ROUND, seed=turn))
            cache.end_round()
        # The next forward waits for what moves, if it needs it; this one needs another round.
        fill(model, cache, prompt(2, seed=5))
        cache.sync()
        cache.crop(0)
        assert f"leaves out tokens 4-{2 * ROUND - 1}" in caplog.text
        hot = [0, 6, 7, 8, 9]
        while any(layer.hot_blocks != hot for layer in cache.layers):
            time.sleep(0.001)
        before = cache.counters.fetched_blocks
        assert before == 0
        cache.bring_back(1)
        assert cache.left_out == [(4, ROUND)]
        fill(model, cache, prompt(2, seed=6))
        assert cache.counters.fetched_blocks == LAYERS * 3
        cache.end_round()
        assert cache.left_out == [(4, 3 * ROUND)]
        # Nothing was thrown away: without a window all of it is there.
        ids = cache.tokens
        whole = kept(model, cache)
    with KVFSCache.open(kv_directory, "agent", model) as full:
        assert full.tokens == ids
        one = prompt(3, seed=7)
        assert torch.equal(fill(model, full, one), fill(model, whole, one))


def test_generation_is_that_of_a_full_cache_while_nothing_has_left(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(30)
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, cache=DynamicCache(), **options)  # type: ignore[operator]
    with KVFSCache.open(kv_directory, "agent", model, window=2) as cache:
        assert torch.equal(model.generate(ids, cache=cache, **options), expected)  # type: ignore[operator]


def test_what_a_window_cannot_be(
    kv_directory: Path, model: PreTrainedModel, make_model: ModelMaker
) -> None:
    with pytest.raises(ValueError, match="a window of 0 rounds"):
        KVFSCache.open(kv_directory, "agent", model, window=0)
    with pytest.raises(ValueError, match="sliding window of its own"):
        KVFSCache.open(kv_directory, "b", make_model("mistral", sliding_window=24), window=2)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        assert cache.left_out == []
        with pytest.raises(ValueError, match="has no window"):
            cache.bring_back(0)
    with (
        KVFSCache.open(kv_directory, "agent", model, window=1) as cache,
        pytest.raises(ValueError, match="has 0 rounds, not 3"),
    ):
        cache.bring_back(3)

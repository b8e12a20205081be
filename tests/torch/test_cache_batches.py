"""Batches and beams: the tokens of DynamicCache, in files without a name."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import HotPool, KVFSCache

Prompt = Callable[..., torch.Tensor]
ModelMaker = Callable[..., PreTrainedModel]
Opener = Callable[..., KVFSCache]
BUDGETS = {"roomy": 16 << 20, "tight": 30 * 4096}


def answer(model: PreTrainedModel, cache: object, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        do_sample=False,
        **{"max_new_tokens": 20, **options},
    )


def fill(model: PreTrainedModel, cache: object, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache).logits
    return logits


@pytest.fixture(params=BUDGETS)
def opener(request: pytest.FixtureRequest, kv_directory: Path, model: PreTrainedModel) -> Opener:
    """`opener()` opens the session, with room for all of it or for less."""
    pool = HotPool(BUDGETS[request.param], slab_bytes=4096)
    return partial(KVFSCache.open, kv_directory, "agent", model, pool=pool)


def test_beam_search(opener: Opener, model: PreTrainedModel, prompt: Prompt) -> None:
    ids = prompt(12)
    expected = answer(model, DynamicCache(), ids, num_beams=3)
    with opener() as cache:
        assert torch.equal(answer(model, cache, ids, num_beams=3), expected)


def test_a_batch(opener: Opener, model: PreTrainedModel, prompt: Prompt) -> None:
    ids = torch.cat([prompt(17, seed=seed) for seed in range(3)])
    expected = answer(model, DynamicCache(), ids)
    with opener() as cache:
        assert torch.equal(answer(model, cache, ids), expected)


def test_a_session_that_is_repeated_and_selected(
    opener: Opener, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    with opener() as cache:
        for one in (cache, reference):
            fill(model, one, prompt(45))
            one.batch_repeat_interleave(3)
        several = torch.cat([prompt(4, seed=seed) for seed in range(3)])
        assert torch.equal(fill(model, cache, several), fill(model, reference, several))
        for one in (cache, reference):
            one.batch_select_indices(torch.tensor([2, 0]))
        two = several[:2]
        assert torch.equal(fill(model, cache, two), fill(model, reference, two))
        for one in (cache, reference):
            one.reorder_cache(torch.tensor([1, 1]))
            one.crop(-3)
        assert torch.equal(fill(model, cache, two), fill(model, reference, two))


def test_what_was_paged_out_is_reordered_too(
    opener: Opener, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    with opener() as cache:
        several = torch.cat([prompt(40, seed=seed) for seed in range(3)])
        for one in (cache, reference):
            fill(model, one, several)
        cache.release()
        assert cache.resident_bytes == 0
        for one in (cache, reference):
            one.reorder_cache(torch.tensor([2, 2, 0]))
        more = several[:, :5]
        assert torch.equal(fill(model, cache, more), fill(model, reference, more))
        # All is hot now or was paged once more: what files hold of the old order is not used.
        for one in (cache, reference):
            one.reorder_cache(torch.tensor([1, 0, 2]))
        cache.release()
        assert torch.equal(fill(model, cache, more), fill(model, reference, more))


def test_the_session_stays_what_it_was_and_refuses_to_store_a_batch(
    opener: Opener, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(30)
    reference = DynamicCache()
    fill(model, reference, ids)
    with opener() as cache:
        fill(model, cache, ids)
        cache.end_round()
        cache.batch_repeat_interleave(2)
        fill(model, cache, torch.cat([prompt(5, seed=1), prompt(5, seed=2)]))
        for refused in (cache.sync, cache.end_round, lambda: cache.tokens):
            with pytest.raises(ValueError, match="holds a batch, and a session is one sequence"):
                refused()
        assert sorted(os.listdir(cache.path)) == [
            *(f"layer.{index:03d}" for index in range(8)),
            "session.json",
            "tokens",
        ]
        longer = torch.cat([ids, prompt(9, seed=3)], dim=1)
        assert cache.rewind_to(longer) == 30
        assert cache.tokens == ids[0].tolist()
        assert torch.equal(
            fill(model, cache, longer[:, 30:]), fill(model, reference, longer[:, 30:])
        )
        cache.sync()
    with opener() as again:
        assert again.tokens == longer[0].tolist()
        assert again.pool.used_slabs == 0


def test_a_batch_and_close_leaves_the_session(
    opener: Opener, model: PreTrainedModel, prompt: Prompt
) -> None:
    with opener() as cache:
        fill(model, cache, prompt(30))
        cache.batch_repeat_interleave(2)
    with opener() as again:
        assert again.get_seq_length() == 30
        again.batch_repeat_interleave(2)
        again.reset()
        assert again.tokens == []
        assert again.pool.used_slabs == 0


def test_another_batch_than_the_one_it_holds_is_refused(
    opener: Opener, model: PreTrainedModel, prompt: Prompt
) -> None:
    with opener() as cache:
        fill(model, cache, prompt(8))
        with pytest.raises(ValueError, match=r"holds 1 sequence\(s\), not 2"):
            fill(model, cache, prompt(8).repeat(2, 1))
        assert cache.tokens == prompt(8)[0].tolist()

"""The KV of a real model with real weights, on a real mount."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.demo import AGENTS, load_model, read_script

TOKENS = 2048
TOKENS_PAGED = 512


def text() -> str:
    messages = [m for agent in AGENTS for turn in read_script(agent) for m in turn]
    return "\n".join(message.content for message in messages)


def test_real_bf16_kv_shrinks_and_comes_back_bit_for_bit(kv_directory: Path) -> None:
    import torch
    from transformers import DynamicCache

    from kvfs.torch import KVFSCache

    model, tokenizer = load_model()
    ids = tokenizer(text(), return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS
    expected = DynamicCache()
    os.setxattr(kv_directory, "user.kvfs.codec", b"planes")
    with torch.no_grad(), KVFSCache.open(kv_directory, "agent", model) as cache:
        model(ids, past_key_values=expected)
        model(ids, past_key_values=cache)
        cache.sync()
        cache.release()
        cache.load()
        for ours, theirs in zip(cache.layers, expected.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        layers = sorted(cache.path.glob("layer.*"))
    size = sum(path.stat().st_size for path in layers)
    stored = sum(path.stat().st_blocks * 512 for path in layers)
    assert size == 30 * TOKENS * 2 * 3 * 64 * 2
    assert size / stored >= 1.45


def test_a_real_model_pages_and_gives_the_same_tokens(kv_directory: Path) -> None:
    import torch
    from transformers import DynamicCache

    from kvfs.torch import HotPool, KVFSCache

    model, tokenizer = load_model()
    ids = tokenizer(text(), return_tensors="pt").input_ids[:, :TOKENS_PAGED]
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, cache=DynamicCache(), **options)  # type: ignore[operator]
    # A third of the session's 30 layers x 8 slabs of 64 tokens.
    pool = HotPool(5 << 20, slab_bytes=48 << 10)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        assert torch.equal(model.generate(ids, cache=cache, **options), expected)  # type: ignore[operator]
        assert cache.counters.fetched_blocks > 12 * 100
        assert cache.resident_bytes <= pool.budget_bytes

"""Hot memory that is smaller than the session: the tokens stay, and only what must move moves."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import HotBudgetError, HotPool, KVFSCache
from kvfs.torch.offers import MAP_ATTRIBUTE

Prompt = Callable[..., torch.Tensor]
ModelMaker = Callable[..., PreTrainedModel]
LAYERS = 8
ROW_BYTES = 2 * 2 * 16 * 4
SLAB = 4096
BLOCK = SLAB // ROW_BYTES


def fill(model: PreTrainedModel, cache: object, ids: torch.Tensor) -> torch.Tensor:
    """Run `ids`, shape [1, n], and return their logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache).logits
    return logits


def budget_of(tokens: int, slabs: int) -> int:
    """Two workspaces for `tokens` tokens, and so many slabs."""
    pages = -(-tokens * ROW_BYTES // 4096) * 4096
    return 2 * pages + slabs * SLAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slabs", [0, 3, 11, 30])
@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", {}), ("mistral", {"sliding_window": 24}), ("gemma3", {"sliding_window": 24})],
    ids=["llama", "mistral-sliding", "gemma3-some-sliding"],
)
def test_any_budget_gives_the_same_numbers(
    name: str,
    config: dict[str, int],
    slabs: int,
    dtype: torch.dtype,
    kv_directory: Path,
    make_model: ModelMaker,
    prompt: Prompt,
) -> None:
    model = make_model(name, dtype=dtype, **config)
    reference = DynamicCache(config=model.config)
    lengths = (90, 1, 1, 1, 37, 1, 1)
    pool = HotPool(budget_of(sum(lengths), slabs), slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        for turn, length in enumerate(lengths):
            ids = prompt(length, seed=turn)
            assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
            assert pool.allocated_bytes <= pool.budget_bytes
    assert pool.used_slabs == 0


def test_what_does_not_fit_is_read_each_time_and_what_fits_never(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    tokens = 8 * BLOCK
    pool = HotPool(budget_of(tokens + 20, slabs=40), slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        fill(model, cache, prompt(tokens - 10))
        blocks_cold = 8 * LAYERS - pool.used_slabs
        assert 20 <= blocks_cold <= 24
        read = []
        for turn in range(4):
            before = cache.counters.fetched_blocks
            fill(model, cache, prompt(1, seed=turn))
            read.append(cache.counters.fetched_blocks - before)
        assert read == [blocks_cold] * 4


def test_with_room_nothing_is_fetched_twice(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    pool = HotPool(64 << 20, slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        fill(model, cache, prompt(100))
        for turn in range(3):
            fill(model, cache, prompt(5, seed=turn))
        assert cache.counters.fetched_blocks == 0
        cache.release()
        assert (cache.resident_bytes, pool.used_slabs) == (0, 0)
        blocks = LAYERS * -(-115 // BLOCK)
        for turn in range(3):
            fill(model, cache, prompt(5, seed=turn))
        assert cache.counters.fetched_blocks == blocks
        moved = cache.counters.fetched_bytes_warm + cache.counters.fetched_bytes_mount
        assert moved == LAYERS * 115 * ROW_BYTES
        assert cache.resident_bytes == pool.used_bytes == LAYERS * -(-130 // BLOCK) * SLAB


def test_less_than_two_layers_is_an_error(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    hot_bytes = budget_of(4096, slabs=0)
    with KVFSCache.open(kv_directory, "agent", model, hot_bytes=hot_bytes) as cache:
        fill(model, cache, prompt(4096))
        with pytest.raises(HotBudgetError, match=f"hot memory of {hot_bytes} bytes is less than"):
            fill(model, cache, prompt(100))
        assert cache.get_seq_length() == 4096
    with pytest.raises(HotBudgetError, match="two layers of a session"):
        KVFSCache.open(kv_directory, "agent", model, hot_bytes=hot_bytes - 4096)
    with pytest.raises(ValueError, match="not both"):
        KVFSCache.open(kv_directory, "agent", model, hot_bytes=1 << 20, pool=HotPool())


def test_the_cost_of_a_session_that_does_not_fit_is_told_once(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HotPool(budget_of(200, slabs=10), slab_bytes=SLAB)
    with (
        caplog.at_level(logging.WARNING, "kvfs.torch"),
        KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache,
    ):
        for turn in range(3):
            fill(model, cache, prompt(60, seed=turn))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "does not fit" in told and "each forward reads" in told


def test_the_owner_is_asked_for_room_before_a_forward_takes_it(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    pool = HotPool(budget_of(200, slabs=50), slab_bytes=SLAB)
    with (
        KVFSCache.open(kv_directory, "a", model, pool=pool) as first,
        KVFSCache.open(kv_directory, "b", model, pool=pool) as second,
    ):
        pool.on_pressure = lambda nbytes: first.release()
        fill(model, first, prompt(100))
        assert first.resident_bytes == LAYERS * -(-100 // BLOCK) * SLAB
        fill(model, second, prompt(90))
        assert first.resident_bytes == 0
        assert second.counters.fetched_blocks == 0


def test_rounds_are_demoted_from_the_oldest_on(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    pool = HotPool(64 << 20, slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        for turn in range(3):
            for one in (cache, reference):
                fill(model, one, prompt(4 * BLOCK, seed=turn))
            cache.end_round()
        a_round = LAYERS * 4 * SLAB
        assert cache.demote_oldest_round() == a_round
        assert cache.resident_bytes == 2 * a_round
        assert [layer.hot_blocks for layer in cache.layers] == [list(range(4, 12))] * LAYERS
        assert cache.demote_oldest_round() == a_round
        assert cache.demote_oldest_round() == a_round
        assert cache.demote_oldest_round() == 0
        cache.prefetch_all()
        ids = prompt(3, seed=9)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
        assert cache.counters.fetched_blocks == LAYERS * 12


def test_bytes_come_mapped_where_the_daemon_offers_it_else_through_the_mount(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    """Which way it is today is the daemon's choice; the numbers are the same."""
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (cache, reference):
            fill(model, one, prompt(300))
        cache.release()
        fd = os.open(cache.path / "layer.000", os.O_RDONLY)
        try:
            offer: dict[str, Any] | None = json.loads(os.getxattr(fd, MAP_ATTRIBUTE))
        except OSError:
            offer = None
        finally:
            os.close(fd)
        ids = prompt(3, seed=9)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
        counters = cache.counters
        ways = (counters.fetched_bytes_warm, counters.fetched_bytes_mount)
        assert sum(ways) == LAYERS * 300 * ROW_BYTES
        if offer is None:
            assert ways[0] == 0
        else:
            assert offer["size"] == 300 * ROW_BYTES
            assert ways[1] == 0


def test_a_session_is_loaded_as_far_as_the_daemon_shows_it(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    """What is warm is mapped, what is cold is read, and the numbers are the same."""
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (cache, reference):
            fill(model, one, prompt(300))
        cache.sync()
        for cold in ([], [0, 3, 7], range(LAYERS)):
            cache.release()
            os.setxattr(cache.path, "user.kvfs.demote", b"1")
            for layer in set(range(LAYERS)) - set(cold):
                os.getxattr(cache.path / f"layer.{layer:03d}", MAP_ATTRIBUTE)
            before = cache.counters.fetched_bytes_warm, cache.counters.fetched_bytes_mount
            cache.load()
            counters = cache.counters
            assert counters.fetched_bytes_mount - before[1] == len(cold) * 300 * ROW_BYTES
            assert counters.fetched_bytes_warm - before[0] == (LAYERS - len(cold)) * 300 * ROW_BYTES
            for ours, theirs in zip(cache.layers, reference.layers, strict=True):
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)


def test_a_session_that_does_not_fit_in_one_answer_is_warm_all_the_same(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, prompt(100))
        cache.sync()
        for number in range(1100):  # as those of other ranks are
            (cache.path / f"layer.{number:03d}.r1").touch()
        cache.release()
        cache.load()
        ways = cache.counters.fetched_bytes_warm, cache.counters.fetched_bytes_mount
        assert ways == (LAYERS * 100 * ROW_BYTES, 0)


@pytest.mark.parametrize("changed", ["grown", "cut"])
def test_what_was_asked_for_before_a_change_gives_nothing_old(
    changed: str, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (cache, reference):
            fill(model, one, prompt(130))
        for turn in range(5):
            cache.release()
            cache.prefetch_all()
            if changed == "cut":
                for one in (cache, reference):
                    one.crop(-40)
            ids = prompt(45, seed=turn)
            assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
            cache.prefetch_all()


def test_a_forward_waits_for_slabs_that_are_on_their_way(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    """All of the budget may be: then nothing can be given back yet."""
    pool = HotPool(budget_of(80, slabs=0), slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        fill(model, cache, prompt(64))
        for turn in range(15):
            cache.release()
            os.setxattr(cache.path, "user.kvfs.demote", b"1")
            cache.prefetch_all()
            fill(model, cache, prompt(1, seed=turn))


@pytest.mark.parametrize("option", [{"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 7}])
def test_generation_that_looks_ahead_under_a_small_budget(
    option: dict[str, Any], kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(8).repeat(1, 6)
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, cache=DynamicCache(), **options, **option)  # type: ignore[operator]
    pool = HotPool(budget_of(80, slabs=9), slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        ours = model.generate(ids, cache=cache, **options, **option)  # type: ignore[operator]
        assert torch.equal(ours, expected)
        assert cache.counters.fetched_blocks > 0


@pytest.mark.parametrize("demoted", [False, True])
def test_a_fork_in_the_middle_goes_on_apart(
    demoted: bool, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    references = [DynamicCache(), DynamicCache()]
    pool = HotPool(budget_of(400, slabs=60), slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        for one in (cache, *references):
            fill(model, one, prompt(90))
        cache.end_round()
        if demoted:
            cache.demote_oldest_round()
        os.setxattr(cache.path, "user.kvfs.fork", b"agent-try")
        with KVFSCache.open(kv_directory, "agent-try", model, pool=pool) as branch:
            assert branch.tokens == cache.tokens
            assert branch.rounds == [90]
            for turn in range(3):
                for number, one in enumerate((cache, branch)):
                    ids = prompt(9 + number, seed=10 * turn + number)
                    expected = fill(model, references[number], ids)
                    assert torch.equal(fill(model, one, ids), expected)
            branch.crop(-20)
        assert cache.get_seq_length() == 90 + 27


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_sequence_of_calls_gives_the_numbers_of_dynamic_cache(
    data: st.DataObject, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    slabs = data.draw(st.integers(0, 40), "slabs")
    name = f"agent-{len(os.listdir(kv_directory))}"
    reference = DynamicCache()
    pool = HotPool(budget_of(400, slabs), slab_bytes=SLAB)
    with KVFSCache.open(kv_directory, name, model, pool=pool) as cache:
        for _ in range(data.draw(st.integers(1, 8), "calls")):
            call = data.draw(
                st.sampled_from(
                    ["forward", "crop", "release", "demote", "prefetch", "load", "round", "sync"]
                )
            )
            if call == "forward":
                ids = prompt(data.draw(st.integers(1, 50)), seed=data.draw(st.integers(0, 9)))
                assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
            elif call == "crop":
                count = data.draw(st.integers(0, 40))
                kept = max(0, cache.get_seq_length() - count)
                cache.crop(-count)
                assert cache.get_seq_length() == kept
                # DynamicCache refuses to be cropped to nothing.
                reference = reference if kept else DynamicCache()
                if kept and count:
                    reference.crop(-count)
            else:
                {
                    "release": cache.release,
                    "demote": cache.demote_oldest_round,
                    "prefetch": cache.prefetch_all,
                    "load": cache.load,
                    "round": cache.end_round,
                    "sync": cache.sync,
                }[call]()
            assert pool.allocated_bytes <= pool.budget_bytes
            assert len(pool.handles) == sum(
                -(-cache.get_seq_length() // BLOCK) for _ in range(LAYERS)
            )
    assert (pool.used_slabs, len(pool.handles)) == (0, 0)

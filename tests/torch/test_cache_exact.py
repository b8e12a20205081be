"""The numbers are those of an all-in-memory cache, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import KVFSCache
from kvfs.torch.files import SessionFile

Prompt = Callable[..., torch.Tensor]
ModelMaker = Callable[..., PreTrainedModel]
TURNS = (37, 1, 64, 5)


def run_turn(model: PreTrainedModel, cache: object, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the new tokens `ids`, shape [1, n, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache).logits
    return logits


def all_kv(cache: Any) -> list[torch.Tensor]:
    """K and V of each layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def answer(
    model: PreTrainedModel, cache: object, ids: torch.Tensor, new: int = 12, **options: Any
) -> torch.Tensor:
    """The whole sequence after greedy decoding of `new` tokens."""
    generated: torch.Tensor = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=new,
        do_sample=False,
        **options,
    )
    return generated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", {}), ("qwen2", {}), ("mistral", {"sliding_window": 24})],
    ids=["llama", "qwen2", "mistral-sliding"],
)
def test_logits_and_kv_are_bitwise_equal_over_turns_from_files(
    name: str,
    config: dict[str, int],
    dtype: torch.dtype,
    kv_directory: Path,
    make_model: ModelMaker,
    prompt: Prompt,
) -> None:
    model = make_model(name, dtype=dtype, **config)
    reference = DynamicCache(config=model.config)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for turn, length in enumerate(TURNS):
            ids = prompt(length, seed=turn)
            expected = run_turn(model, reference, ids)
            assert torch.equal(run_turn(model, cache, ids), expected)
            cache.release()
        cache.load()
        if not any(cache.is_sliding):
            for ours, theirs in zip(all_kv(cache), all_kv(reference), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("small_slabs")
def test_generate_gives_the_same_tokens_with_slabs_that_fill_and_grow(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache(config=model.config)
    ours = theirs = torch.empty(1, 0, dtype=torch.long)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for turn, length in enumerate(TURNS):
            question = prompt(length, seed=turn)
            theirs = answer(model, reference, torch.cat([theirs, question], dim=1))
            ours = answer(model, cache, torch.cat([ours, question], dim=1))
            assert torch.equal(ours, theirs)
            # The last token of an answer is known, but its KV is not computed yet.
            assert cache.tokens == ours[0, :-1].tolist()
            cache.release()


def test_a_sliding_window_model_gives_the_tokens_of_its_own_cache(
    kv_directory: Path, make_model: ModelMaker, prompt: Prompt
) -> None:
    model = make_model("mistral", sliding_window=24)
    expected = answer(model, DynamicCache(config=model.config), prompt(40), new=30)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        assert torch.equal(answer(model, cache, prompt(40), new=30), expected)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_older_keyword_works(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(20)
    expected = run_turn(model, DynamicCache(), ids)
    with KVFSCache.open(kv_directory, "agent", model) as cache, torch.no_grad():
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)
        assert cache.tokens == ids[0].tolist()


def test_chunked_prefill_and_prompt_lookup(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(8).repeat(1, 6)
    options: list[dict[str, Any]] = [{"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 4}]
    for option in options:
        expected = answer(model, DynamicCache(), ids, new=24, **option)
        with KVFSCache.open(kv_directory, next(iter(option)), model) as cache:
            assert torch.equal(answer(model, cache, ids, new=24, **option), expected)
            assert cache.tokens == expected[0, : cache.get_seq_length()].tolist()


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("released", [False, True])
def test_crop_then_another_continuation(
    released: bool, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (reference, cache):
            run_turn(model, one, prompt(60))
        if released:
            cache.release()
        for one in (reference, cache):
            one.crop(-23)
        assert cache.get_seq_length() == 37
        other = prompt(30, seed=9)
        assert torch.equal(run_turn(model, cache, other), run_turn(model, reference, other))
        cache.release()
        more = prompt(3, seed=10)
        assert torch.equal(run_turn(model, cache, more), run_turn(model, reference, more))


def test_crop_takes_minus_the_tokens_to_remove(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        run_turn(model, cache, prompt(10))
        cache.crop(0)
        assert cache.get_seq_length() == 10
        with pytest.raises(ValueError, match="minus the tokens"):
            cache.crop(4)
        cache.crop(-40)
        assert cache.get_seq_length() == 0
        assert cache.tokens == []


def test_reset_begins_anew(kv_directory: Path, model: PreTrainedModel, prompt: Prompt) -> None:
    expected = run_turn(model, DynamicCache(), prompt(9))
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        run_turn(model, cache, prompt(30, seed=1))
        cache.sync()
        cache.reset()
        assert torch.equal(run_turn(model, cache, prompt(9)), expected)


def test_inference_mode_and_gradients_may_alternate(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for turn, mode in enumerate((torch.inference_mode, torch.enable_grad, torch.no_grad)):
            ids = prompt(11, seed=turn)
            expected = run_turn(model, reference, ids)
            with mode():
                logits = model(input_ids=ids, cache=cache).logits.detach()
            assert torch.equal(logits, expected)
            assert not any(tensor.requires_grad for tensor in all_kv(cache))


def test_two_sessions_of_one_model_do_not_mix(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    references = [DynamicCache(), DynamicCache()]
    with (
        KVFSCache.open(kv_directory, "agent-1", model) as first,
        KVFSCache.open(kv_directory, "agent-2", model) as second,
    ):
        for turn in range(3):
            for agent, cache in enumerate((first, second)):
                ids = prompt(13 + agent, seed=10 * turn + agent)
                expected = run_turn(model, references[agent], ids)
                assert torch.equal(run_turn(model, cache, ids), expected)
                cache.release()


def test_single_layers_go_and_come_back(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (reference, cache):
            run_turn(model, one, prompt(20))
        for index in (0, 3, 7):
            cache.offload(index)
            assert cache.layers[index].keys is None
        cache.prefetch(3)
        ids = prompt(5, seed=1)
        assert torch.equal(run_turn(model, cache, ids), run_turn(model, reference, ids))


def test_the_next_layer_is_read_while_this_one_computes(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, readers = SessionFile.open_direct, {}

    def noted(self: SessionFile) -> int:
        readers[self.path.name] = threading.current_thread()
        return real(self)

    with KVFSCache.open(kv_directory, "agent", model) as cache:
        run_turn(model, cache, prompt(20))
        cache.release()
        monkeypatch.setattr(SessionFile, "open_direct", noted)
        run_turn(model, cache, prompt(5))
    assert sorted(readers) == [f"layer.{index:03d}" for index in range(8)]
    assert threading.main_thread() not in readers.values()

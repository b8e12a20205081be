"""Tensor-parallel ranks: one session, a set of files for each."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import FingerprintError, KVFSCache, SessionBusyError
from kvfs.torch.files import SessionFile

Prompt = Callable[..., torch.Tensor]
ROW_BYTES = 2 * 1 * 16 * 4


def shard(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """The heads that one rank of two has: attention alone, without the sum over ranks."""
    part = copy.deepcopy(model)
    for layer in part.get_submodule("model.layers").children():
        attention = layer.get_submodule("self_attn")
        for name, axis in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            projection = attention.get_submodule(name)
            assert isinstance(projection, nn.Linear)
            half = projection.weight.detach().chunk(2, dim=axis)[rank].clone()
            projection.weight = nn.Parameter(half)
    return part


def fill(model: PreTrainedModel, cache: object, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache).logits
    return logits


def test_each_rank_has_its_own_files_in_the_session(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    parts = [shard(model, rank) for rank in range(2)]
    references = [DynamicCache(), DynamicCache()]
    for _ in range(2):
        caches = [
            KVFSCache.open(kv_directory, "agent", part, rank=rank, world=2)
            for rank, part in enumerate(parts)
        ]
        for rank, cache in enumerate(caches):
            ids = prompt(20 + cache.get_seq_length())
            expected = fill(parts[rank], references[rank], ids)
            assert torch.equal(fill(parts[rank], cache, ids), expected)
            cache.end_round()
        for cache in caches:
            cache.close()
    session = kv_directory / "agent"
    assert sorted(os.listdir(session)) == [
        *(f"fingerprint.r{rank}" for rank in range(2)),
        *(f"layer.{index:03d}.r{rank}" for index in range(8) for rank in range(2)),
        "session.json",
        *(f"tokens.r{rank}" for rank in range(2)),
    ]
    said = json.loads((session / "session.json").read_text())
    assert (said["fingerprint"]["ranks"], said["rounds"]) == (2, [20, 60])
    assert said["layers"][0]["shape"] == [2, 1, 16]
    assert (session / "layer.003.r1").stat().st_size == 60 * ROW_BYTES


def test_a_rank_reads_only_its_own(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = SessionFile.open_direct, []

    def noted(self: SessionFile) -> int:
        read.append(self.path.name)
        return real(self)

    monkeypatch.setattr(SessionFile, "open_direct", noted)
    parts = [shard(model, rank) for rank in range(2)]
    for rank, part in enumerate(parts):
        with KVFSCache.open(kv_directory, "agent", part, rank=rank, world=2) as cache:
            fill(part, cache, prompt(20))
        # Rank 1 was not there yet: what rank 0 wrote alone is nothing that both have.
    assert read == []
    with KVFSCache.open(kv_directory, "agent", parts[1], rank=1, world=2) as cache:
        assert cache.get_seq_length() == 20
        fill(parts[1], cache, prompt(3, seed=1))
    assert sorted(read) == [f"layer.{index:03d}.r1" for index in range(8)]


def test_one_rank_behind_another_is_what_all_have(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    parts = [shard(model, rank) for rank in range(2)]
    caches = [
        KVFSCache.open(kv_directory, "agent", part, rank=rank, world=2)
        for rank, part in enumerate(parts)
    ]
    for part, cache in zip(parts, caches, strict=True):
        fill(part, cache, prompt(30))
        cache.close()
    os.truncate(kv_directory / "agent" / "layer.005.r1", 24 * ROW_BYTES)
    for rank, part in enumerate(parts):
        with KVFSCache.open(kv_directory, "agent", part, rank=rank, world=2) as cache:
            assert cache.get_seq_length() == 24


def test_ranks_lock_and_know_their_weights(kv_directory: Path, model: PreTrainedModel) -> None:
    parts = [shard(model, rank) for rank in range(2)]
    with KVFSCache.open(kv_directory, "agent", parts[0], rank=0, world=2):
        KVFSCache.open(kv_directory, "agent", parts[1], rank=1, world=2).close()
        with pytest.raises(SessionBusyError, match=r"rank 0 of session .* is open in another"):
            KVFSCache.open(kv_directory, "agent", parts[0], rank=0, world=2)
    with pytest.raises(FingerprintError, match=r"rank 0/2.*differ in weights:"):
        KVFSCache.open(kv_directory, "agent", parts[1], rank=0, world=2)
    with pytest.raises(FingerprintError, match=r"rank 0/2.*differ in .*ranks"):
        KVFSCache.open(kv_directory, "agent", model)


def test_a_world_that_cannot_be(kv_directory: Path, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="2 KV heads cannot be dealt to 3 ranks"):
        KVFSCache.open(kv_directory, "agent", model, rank=0, world=3)
    with pytest.raises(ValueError, match="rank 2 of a world of 2 does not exist"):
        KVFSCache.open(kv_directory, "agent", model, rank=2, world=2)

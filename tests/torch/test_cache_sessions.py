"""Sessions on disk: what they say, who may open them, what they go on from."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import (
    FingerprintError,
    KVFSCache,
    NotASessionError,
    NotKVFSError,
    SessionBusyError,
)
from kvfs.torch.fingerprint import Fingerprint
from kvfs.torch.session import Session
from tests.support.users import as_user, needs_root

Prompt = Callable[..., torch.Tensor]
ModelMaker = Callable[..., PreTrainedModel]

RESUME = """
import sys, torch
from transformers import AutoModelForCausalLM
from kvfs.torch import KVFSCache
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
with KVFSCache.open(sys.argv[1], "agent", model) as cache:
    ids = torch.tensor([[*cache.tokens, 7, 8, 9]])
    print(model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)[0].tolist())
"""


def fill(model: PreTrainedModel, cache: object, ids: torch.Tensor) -> torch.Tensor:
    """Run `ids`, shape [1, n], and return their logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache).logits
    return logits


def test_resume_in_a_new_process(
    kv_directory: Path, tmp_path: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    ids = prompt(50)
    with KVFSCache.open(kv_directory, "agent", saved) as cache:
        fill(saved, cache, ids)
    longer = torch.cat([ids, torch.tensor([[7, 8, 9]])], dim=1)
    expected = model.generate(  # type: ignore[operator]
        longer, cache=DynamicCache(), max_new_tokens=8, do_sample=False
    )
    resumed = subprocess.run(
        [sys.executable, "-c", RESUME, str(kv_directory), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout) == expected[0].tolist()


def test_what_a_session_looks_like(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, prompt(10))
        cache.end_round()
        fill(model, cache, prompt(5, seed=1))
        cache.end_round()
        cache.end_round()
        cache.sync()
    session = kv_directory / "agent"
    assert stat.S_IMODE(session.stat().st_mode) == 0o700
    assert sorted(os.listdir(session)) == [
        *(f"layer.{index:03d}" for index in range(8)),
        "session.json",
        "tokens",
    ]
    assert (session / "layer.000").stat().st_size == 15 * 2 * 2 * 16 * 4
    assert (session / "tokens").stat().st_size == 15 * 4
    said = json.loads((session / "session.json").read_text())
    assert said["rounds"] == [10, 15]
    assert said["layers"] == [{"shape": [2, 2, 16], "dtype": "float32"}] * 8
    told = said["fingerprint"]
    assert (told["type"], told["layers"], told["kv_heads"], told["head_dim"]) == ("llama", 8, 2, 16)
    assert (told["dtype"], told["layout"], told["ranks"]) == ("float32", "NHD", 1)
    assert told["rope"]["rope_type"] == "default"


@needs_root
def test_a_session_is_its_makers_alone_whatever_the_umask(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    before = os.umask(0)
    try:
        with KVFSCache.open(kv_directory, "agent", model) as cache:
            fill(model, cache, prompt(10))
            cache.end_round()
            cache.sync()
    finally:
        os.umask(before)
    session = kv_directory / "agent"
    assert stat.S_IMODE(session.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in session.iterdir()} == {0o600}


@needs_root
def test_a_directory_that_another_user_made_is_no_session(model: PreTrainedModel) -> None:
    top = Path(tempfile.mkdtemp())
    try:
        top.chmod(0o755)
        (top / "agent").mkdir()
        (top / "agent").chmod(0o777)
        fingerprint = Fingerprint.of(model)
        with pytest.raises(NotASessionError, match="belongs to another user"):
            as_user(12345, lambda: Session(top / "agent", fingerprint).close())
        assert os.listdir(top / "agent") == []
        os.chown(top / "agent", 12345, 12345)
        as_user(12345, lambda: Session(top / "agent", fingerprint).close())
        assert "session.json" in os.listdir(top / "agent")
    finally:
        shutil.rmtree(top)


def test_the_files_hold_token_major_rows(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    ids = prompt(10)
    fill(model, reference, ids)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, ids)
    stored = (kv_directory / "agent" / "layer.003").read_bytes()
    rows = torch.frombuffer(bytearray(stored), dtype=torch.float32).view(10, 2, 2, 16)
    layer: Any = reference.layers[3]
    assert torch.equal(rows[:, 0], layer.keys[0].transpose(0, 1))
    assert torch.equal(rows[:, 1], layer.values[0].transpose(0, 1))
    tokens = (kv_directory / "agent" / "tokens").read_bytes()
    assert torch.frombuffer(bytearray(tokens), dtype=torch.int32).tolist() == ids[0].tolist()


def test_xattrs_name_model_type_and_shape(kv_directory: Path, model: PreTrainedModel) -> None:
    with KVFSCache.open(kv_directory, "agent", model):
        pass
    session = kv_directory / "agent"
    fingerprint = os.getxattr(session, "user.kvfs.model").decode()
    assert fingerprint.startswith("LlamaForCausalLM llama 8x2x16 float32 NHD #")
    assert os.getxattr(session / "layer.007", "user.kvfs.dtype") == b"float32"
    assert os.getxattr(session / "layer.007", "user.kvfs.shape") == b"2,2,16"


def test_resume_keeps_tokens_and_rounds(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(20)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, ids)
        cache.end_round()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        assert cache.tokens == ids[0].tolist()
        assert cache.rounds == [20]
        assert cache.get_seq_length() == 20


@pytest.mark.parametrize("stored", [False, True])
def test_rewind_crops_to_the_common_prefix(
    stored: bool, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(30)
    other = torch.cat([ids[:, :18], prompt(9, seed=4)], dim=1)
    other[0, 18] = (ids[0, 18] % 255) + 1
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, ids[:, :12])
        cache.end_round()
        fill(model, cache, ids[:, 12:])
        if stored:
            cache.end_round()
        assert cache.rewind_to(other) == 18
        assert cache.rounds == [12]
        logits = fill(model, cache, other[:, 18:])
        assert cache.tokens == other[0].tolist()
    reference = DynamicCache()
    fill(model, reference, other[:, :18])
    torch.testing.assert_close(logits, fill(model, reference, other[:, 18:]))


def test_rewind_leaves_one_token_to_compute(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(30)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, ids)
        assert cache.rewind_to(ids[0].tolist()) == 29
        assert cache.rewind_to(ids[:, :10]) == 9
        with pytest.raises(ValueError, match="one sequence"):
            cache.rewind_to(ids.repeat(2, 1))


def test_another_model_is_refused_with_both_named(
    kv_directory: Path, make_model: ModelMaker, model: PreTrainedModel
) -> None:
    KVFSCache.open(kv_directory, "agent", model).close()
    with pytest.raises(FingerprintError) as refused:
        KVFSCache.open(kv_directory, "agent", make_model("qwen2", dtype=torch.bfloat16))
    assert "LlamaForCausalLM llama 8x2x16 float32" in str(refused.value)
    assert "Qwen2ForCausalLM qwen2 8x2x16 bfloat16" in str(refused.value)
    assert "dtype" in str(refused.value)
    KVFSCache.open(kv_directory, "agent", model).close()


def test_other_weights_of_the_same_shape_are_refused(
    kv_directory: Path, make_model: ModelMaker, model: PreTrainedModel
) -> None:
    KVFSCache.open(kv_directory, "agent", model).close()
    with pytest.raises(FingerprintError, match="differ in weights:"):
        KVFSCache.open(kv_directory, "agent", make_model(seed=1))


def test_other_rope_parameters_are_refused(
    kv_directory: Path, make_model: ModelMaker, model: PreTrainedModel
) -> None:
    KVFSCache.open(kv_directory, "agent", model).close()
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    with pytest.raises(FingerprintError, match="differ in rope:"):
        KVFSCache.open(kv_directory, "agent", make_model(rope_parameters=rope))


def test_a_session_has_one_opener(kv_directory: Path, model: PreTrainedModel) -> None:
    with (
        KVFSCache.open(kv_directory, "agent", model),
        pytest.raises(SessionBusyError, match="is open in another"),
    ):
        KVFSCache.open(kv_directory, "agent", model)
    KVFSCache.open(kv_directory, "agent", model).close()


def test_a_path_that_is_not_on_kvfs_is_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    with pytest.raises(NotKVFSError, match="not on KVFS: mount one with `kvfs mount"):
        KVFSCache.open(tmp_path, "agent", model)
    assert os.listdir(tmp_path) == []


def test_a_directory_with_other_content_is_left_alone(
    kv_directory: Path, model: PreTrainedModel
) -> None:
    (kv_directory / "photos").mkdir()
    (kv_directory / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(NotASessionError, match=r"cat\.jpg"):
        KVFSCache.open(kv_directory, "photos", model)
    assert os.listdir(kv_directory / "photos") == ["cat.jpg"]


def test_a_session_json_that_cannot_be_read_is_named(
    kv_directory: Path, model: PreTrainedModel
) -> None:
    KVFSCache.open(kv_directory, "agent", model).close()
    (kv_directory / "agent" / "session.json").write_text('{"version": 99}')
    with pytest.raises(NotASessionError, match=r"session\.json cannot be read"):
        KVFSCache.open(kv_directory, "agent", model)


def test_what_a_crash_while_creating_leaves_is_taken_over(
    kv_directory: Path, model: PreTrainedModel
) -> None:
    (kv_directory / "agent").mkdir()
    (kv_directory / "agent" / ".session.json.tmp").write_text("{")
    KVFSCache.open(kv_directory, "agent", model).close()
    assert ".session.json.tmp" not in os.listdir(kv_directory / "agent")


@pytest.mark.parametrize("name", ["", ".", "..", ".kvfs", "a/b"])
def test_names_that_cannot_be_used(name: str, kv_directory: Path, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="cannot name a session"):
        KVFSCache.open(kv_directory, name, model)


def test_a_session_stores_token_ids(kv_directory: Path, model: PreTrainedModel) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        with pytest.raises(ValueError, match="input_ids"):
            model(inputs_embeds=torch.zeros(1, 4, 96), cache=cache)
        assert cache.get_seq_length() == 0


def test_a_model_that_was_not_opened_with_the_session_is_refused(
    kv_directory: Path, model: PreTrainedModel, make_model: ModelMaker, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        with pytest.raises(RuntimeError, match="not the one"):
            fill(make_model(), cache, prompt(4))
        assert cache.tokens == []


def test_a_closed_cache_is_refused(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    cache = KVFSCache.open(kv_directory, "agent", model)
    fill(model, cache, prompt(4))
    cache.close()
    cache.close()
    with pytest.raises(ValueError, match="is closed"):
        cache.sync()
    with pytest.raises(RuntimeError, match="is closed"):
        fill(model, cache, prompt(4))

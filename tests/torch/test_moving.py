"""A session that was moved gives the tokens that it would have given where it was."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.mounter import KVFS, Mounter, kvfs

if TYPE_CHECKING:
    import torch

    from tests.torch.conftest import ModelMaker


@pytest.fixture
def elsewhere(tmp_path: Path) -> Any:
    """The mountpoint of another ring, encrypted and of other segments."""
    key = tmp_path / "key"
    key.write_text("the key of another ring")
    key.chmod(0o600)
    mounter = Mounter("256M", "--segment-size", "2M", "--encrypt", "--key-file", str(key))
    try:
        mounter.mount("--key-file", str(key))
        yield mounter.mountpoint
    finally:
        mounter.close()


def test_moved_sessions_give_the_same_tokens(
    make_model: ModelMaker,
    prompt: Callable[..., torch.Tensor],
    kv_directory: Path,
    elsewhere: Path,
    tmp_path: Path,
) -> None:
    import torch
    from safetensors.torch import load_file

    from kvfs.torch import KVFSCache

    model = make_model(dtype=torch.bfloat16)
    first, second = prompt(150), prompt(20, seed=1)

    def go_on(directory: Path, name: str, ids: torch.Tensor) -> torch.Tensor:
        with KVFSCache.open(directory, name, model) as cache:
            past = cache.tokens
            whole = torch.cat((torch.tensor([list(past)], dtype=ids.dtype), ids), 1)
            tokens: torch.Tensor = model.generate(
                whole, cache=cache, max_new_tokens=20, do_sample=False,
                attention_mask=torch.ones_like(whole),
            )  # fmt: skip
            cache.end_round()
            cache.sync()
        return tokens

    go_on(kv_directory, "agent", first)
    kvfs("fork", kv_directory / "agent", "base")
    file, archive = tmp_path / "agent.safetensors", tmp_path / "agent.tar"
    kvfs("export", kv_directory / "agent", file)
    kvfs("export", "--tar", kv_directory / "agent", archive)
    kvfs("import", file, elsewhere / "of tensors")
    kvfs("import", archive, elsewhere / "of an archive")
    _send(kv_directory / "base", elsewhere / "base")
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        tensors = load_file(file)
        cache.load()
        for number, layer in enumerate(cache.layers):
            kv = tensors[f"layer.{number:03d}"]
            assert kv.dtype == torch.bfloat16
            assert torch.equal(kv[:, 0].transpose(0, 1)[None], layer.keys)
            assert torch.equal(kv[:, 1].transpose(0, 1)[None], layer.values)
    expected = go_on(kv_directory, "agent", second)
    for name in ("of tensors", "of an archive", "base"):
        assert os.getxattr(elsewhere / name, "user.kvfs.model")
        assert torch.equal(go_on(elsewhere, name, second), expected), name
    # What it was told since the fork alone, on top of that.
    kvfs("fork", kv_directory / "base", "try")
    tried = go_on(kv_directory, "try", second)
    kvfs("import", archive, elsewhere / "base", "--force")
    sent = _send(kv_directory / "try", elsewhere / "try", "--since", kv_directory / "base")
    assert sent["base"] is not None
    third = prompt(5, seed=2)
    assert torch.equal(tried, expected)
    assert torch.equal(go_on(elsewhere, "try", third), go_on(kv_directory, "agent", third))


def test_ranks_move_with_their_session(
    make_model: ModelMaker,
    prompt: Callable[..., torch.Tensor],
    kv_directory: Path,
    elsewhere: Path,
    tmp_path: Path,
) -> None:
    import torch

    from kvfs.torch import KVFSCache
    from tests.torch.test_cache_ranks import fill, shard

    model = make_model()
    parts = [shard(model, rank) for rank in range(2)]
    logits = []
    for name in ("agent", "moved"):
        for rank, part in enumerate(parts):
            where = kv_directory if name == "agent" else elsewhere
            with KVFSCache.open(where, name, part, rank=rank, world=2) as cache:
                if name == "agent":
                    fill(part, cache, prompt(30))
                else:
                    assert cache.get_seq_length() == 30
                    logits.append(fill(part, cache, prompt(3, seed=1)))
        if name == "agent":
            kvfs("export", kv_directory / "agent", tmp_path / "agent.safetensors")
            kvfs("import", tmp_path / "agent.safetensors", elsewhere / "moved")
            assert (elsewhere / "moved" / "fingerprint.r1").exists()
    for rank, part in enumerate(parts):
        with KVFSCache.open(kv_directory, "agent", part, rank=rank, world=2) as cache:
            assert torch.equal(fill(part, cache, prompt(3, seed=1)), logits[rank])


def _send(session: Path, target: Path, *options: str | Path) -> dict[str, Any]:
    sender = subprocess.Popen(
        [KVFS, "send", "--json", session, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    subprocess.run([KVFS, "receive", target], stdin=sender.stdout, check=True, timeout=120)
    told: dict[str, Any] = json.loads(sender.communicate(timeout=120)[1])
    return told

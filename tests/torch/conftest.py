"""Small random models, and the all-in-memory run that a session is compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.mounter import mounted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ModelMaker = Callable[..., "PreTrainedModel"]


@pytest.fixture(scope="session")
def shared_mount(fuse: None) -> Iterator[Path]:
    """One mount for all tests here, since mounting takes longer than most of them."""
    with mounted() as mountpoint:
        yield mountpoint


@pytest.fixture
def kv_directory(shared_mount: Path) -> Path:
    """A new directory on the mount, for the sessions of one test."""
    return Path(tempfile.mkdtemp(dir=shared_mount))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and on a busy machine lose much."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model() -> ModelMaker:
    """`make_model(name="llama", dtype=torch.float32, seed=0, **config)`: random weights, GQA."""

    def make(name: str = "llama", dtype: Any = None, seed: int = 0, **config: Any) -> Any:
        import torch
        import transformers

        shape: dict[str, Any] = {
            "vocab_size": 256,
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        kinds = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "gemma3": "Gemma3Text"}
        kind = kinds[name]
        torch.manual_seed(seed)
        built = getattr(transformers, f"{kind}Config")(**{**shape, **config})
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(built)
        return model.to(dtype or torch.float32).eval()

    return make


@pytest.fixture
def model(make_model: ModelMaker) -> PreTrainedModel:
    """A Llama of 8 layers in float32."""
    return make_model()


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs that fill within a turn, workspaces that grow, reads of several requests."""
    pytest.importorskip("torch")
    from kvfs.torch import HotPool

    monkeypatch.setattr("kvfs.torch.cache.HotPool", partial(HotPool, slab_bytes=4096))
    monkeypatch.setattr("kvfs.torch.staging._PIECE_BYTES", 4096)


@pytest.fixture
def prompt() -> Callable[..., torch.Tensor]:
    """`prompt(n, seed=0)`: n random token ids, shape [1, n]."""

    def make(length: int, seed: int = 0) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, 256, (1, length), generator=generator)

    return make

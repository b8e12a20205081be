"""What vLLM says of the model, as the fingerprint that a session keeps."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from kvfs.torch.fingerprint import Fingerprint
from kvfs.torch.layout import name_of
from kvfs.vllm.shape import Shape

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 256
_SAMPLE_BYTES = 4096
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def shapes_of(config: Any, kv_cache: Any) -> list[Shape]:
    """Of each tensor-parallel rank, from vLLM's VllmConfig and KVCacheConfig.

    Raises:
        ValueError: the engine keeps something else than K and V of each token in each layer, or
            has spread it in a way that is not supported.
    """
    spec = _spec_of(config, kv_cache)
    ranks = config.parallel_config.tensor_parallel_size
    text = config.model_config.hf_text_config
    fingerprints = [
        Fingerprint(
            model=_name_of(str(config.model_config.model)),
            type=text.model_type,
            layers=len(kv_cache.kv_cache_groups[0].layer_names),
            kv_heads=spec.num_kv_heads * ranks,
            head_dim=spec.head_size,
            dtype=name_of(spec.dtype),
            rope=json.loads(json.dumps(getattr(text, "rope_parameters", None) or {})),
            weights=_weights_of(config.model_config, config.load_config),
            ranks=ranks,
            rank=rank,
        )
        for rank in range(ranks)
    ]
    return [Shape(fingerprint, spec.block_size) for fingerprint in fingerprints]


def _spec_of(config: Any, kv_cache: Any) -> Any:
    parallel = config.parallel_config
    groups = kv_cache.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    unsupported = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "several kinds of layers": len(groups) != 1,
        "attention without K and V of each token": type(spec).__name__ != "FullAttentionSpec",
        "a quantised KV cache": getattr(spec, "dtype", None) not in _DTYPES,
    }
    if found := [what for what, is_so in unsupported.items() if is_so]:
        raise ValueError(f"KVFSConnector does not support {found[0]}: start without the connector")
    return spec


def _name_of(model: str) -> str:
    """The hub name; of a local directory its last part, since its place may change."""
    return Path(model).resolve().name if os.path.isdir(model) else model


def _weights_of(model: Any, load: Any) -> str:
    """A digest of samples of the files, so that a fine-tuned model of the same shape is told
    apart at small cost; the name and revision where there are none here."""
    digest = hashlib.blake2b(digest_size=8)
    folder = _folder_of(str(model.model), model.revision)
    files = [] if folder is None else sorted(one for kind in _WEIGHTS for one in folder.glob(kind))
    if load.load_format == "dummy" or not files:
        digest.update(f"{model.model} {model.revision} {load.load_format} {model.seed}".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as content:
            for at in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                content.seek(at)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _folder_of(model: str, revision: str | None) -> Path | None:
    """Where the files are: a directory, or the hub's cache."""
    if os.path.isdir(model):
        return Path(model)
    if os.path.isfile(model):
        return Path(model).parent
    known = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(known).parent if isinstance(known, str) else None

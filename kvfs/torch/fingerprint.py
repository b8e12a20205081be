"""What must be equal for one model's KV to be valid in another process."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvfs.torch.layout import RowLayout, name_of

_SAMPLED_ELEMENTS = 512


@dataclass(frozen=True)
class Fingerprint:
    """The model and the layout that a session's bytes belong to."""

    model: str
    type: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    rope: Mapping[str, Any]
    weights: str
    layout: str = "NHD"
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, rank: int = 0, ranks: int = 1) -> Fingerprint:
        """Read a loaded model, or the part of it that this tensor-parallel rank has.

        The weights enter by a digest of the first numbers of each parameter, so that a
        fine-tuned or re-quantised model of the same shape is told apart at small cost.

        Raises:
            ValueError: the KV heads cannot be dealt out evenly, or there is no such rank.
        """
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of a world of {ranks} does not exist")
        fingerprint = cls(
            model=_model_name(model),
            type=config.model_type,
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=name_of(model.dtype),
            rope=_rope(config),
            weights=_weights_digest(model),
            ranks=ranks,
            rank=rank,
        )
        if fingerprint.kv_heads % ranks:
            raise ValueError(f"{fingerprint.kv_heads} KV heads cannot be dealt to {ranks} ranks")
        return fingerprint

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Fingerprint:
        """The inverse of `to_json`; KeyError if a field is missing."""
        return cls(**{field.name: stored[field.name] for field in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `session.json` stores them."""
        return asdict(self)

    def row_layout(self) -> RowLayout:
        """The row of each layer file: that of one rank."""
        return RowLayout(self.kv_heads // self.ranks, self.head_dim, getattr(torch, self.dtype))

    def shared(self) -> Fingerprint:
        """What all ranks have in common; with one rank, everything."""
        return self if self.ranks == 1 else replace(self, weights="", rank=0)

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields in which the two are not equal."""
        mine, theirs = self.to_json(), other.to_json()
        return [name for name in mine if mine[name] != theirs[name]]

    def __str__(self) -> str:
        """One short line: the name, the shape, and a digest of all fields."""
        digest = hashlib.blake2b(
            json.dumps(self.to_json(), sort_keys=True).encode(), digest_size=6
        ).hexdigest()
        shape = f"{self.layers}x{self.kv_heads}x{self.head_dim}"
        ranks = f" rank {self.rank}/{self.ranks}" if self.ranks > 1 else ""
        return f"{self.model} {self.type} {shape} {self.dtype} {self.layout}{ranks} #{digest}"


def sliding_windows(model: PreTrainedModel) -> list[int | None]:
    """The sliding window of each layer, in tokens, as the model's configuration says."""
    config = model.config.get_text_config(decoder=True)
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _model_name(model: PreTrainedModel) -> str:
    """The hub name; of a local directory its last part, since its place may change."""
    name = str(model.config.name_or_path)
    if os.path.isdir(name):
        return Path(name).resolve().name
    return name or type(model).__name__


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    plain: dict[str, Any] = json.loads(json.dumps(parameters))
    return plain


def _weights_digest(model: PreTrainedModel) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        if not parameter.is_meta:
            digest.update(_first_bytes(parameter))
    return digest.hexdigest()


def _first_bytes(parameter: torch.Tensor) -> bytes:
    sample = parameter.detach().flatten()[:_SAMPLED_ELEMENTS].cpu().contiguous()
    return sample.view(torch.uint8).numpy().tobytes()

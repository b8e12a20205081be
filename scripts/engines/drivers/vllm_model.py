"""vLLM on the CPU, in one process, with a real model and prompts of real text."""

from __future__ import annotations

import hashlib
import os
from typing import Any

# Before vLLM is imported. Without workers an engine starts in half the time; more threads wait for
# each other in loops: on a busy machine, for ever.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from real_text import prompts
from smollm2 import folder
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

KV_BYTES = 96 << 20  # of the engine's memory
BLOCK_TOKENS = 32  # the CPU's attention takes multiples of it
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 2, 256, 4


def transfer_to(connector: str, module: str | None = None, **settings: Any) -> KVTransferConfig:
    """`module` is where the connector is, if vLLM does not know it."""
    return KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )


class Served:
    """In float32, so that an answer does not depend on what part of its prompt was computed in one
    step: found or made anew, it is the same."""

    def __init__(self, connector: str, module: str | None = None, **settings: Any) -> None:
        self._llm = LLM(
            str(folder()),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=1024,
            gpu_memory_utilization=0.1,  # the rest of the memory is not looked at
            kv_cache_memory_bytes=KV_BYTES,
            enforce_eager=True,
            seed=0,
            distributed_executor_backend="uni",
            kv_transfer_config=transfer_to(connector, module, **settings),
        )
        self._prompts = [
            {"prompt_token_ids": tokens}
            for tokens in prompts(self._llm.get_tokenizer().encode, PROMPTS, PROMPT_TOKENS)
        ]

    def answer(self) -> tuple[int, str]:
        """To all prompts, with nothing of them in memory: how many tokens of them were found, and
        a digest of the answers."""
        self._forget()
        greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        hits, tokens = 0, hashlib.blake2b(digest_size=16)
        # One at a time: each as it would be alone.
        for prompt in self._prompts:
            (answer,) = self._llm.generate([prompt], greedy, use_tqdm=False)
            hits += answer.num_cached_tokens or 0
            tokens.update(str(answer.outputs[0].token_ids).encode())
        self._forget()
        return hits, tokens.hexdigest()

    def _forget(self) -> None:
        """What is in memory. Files that are being written are waited for."""
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise RuntimeError("the engine keeps what it has in memory")

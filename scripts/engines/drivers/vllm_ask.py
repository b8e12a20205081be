"""vLLM with KVFS's connector, asked line by line: vllm_ask.py DIR DTYPE, `-` for no connector.

Each line of the standard input is a JSON object, `{"prompts": [[17, 4, ...], ...], "count": 8}`:
the prompts go in at once. The answer: `{"tokens": [[...], ...], "hits": [256, ...]}`. With
`"aborted": N` the first prompt is aborted after N steps, and what was sampled of it is left out.
The engine has room for few tokens and takes few in a step: prompts are computed in parts, and
requests that meet are preempted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# On a busy machine threads that wait for each other cost more than they bring.
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

from serving import answer_lines
from smollm2 import folder
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm_model import BLOCK_TOKENS, transfer_to

_BLOCKS = 16
_KV_BYTES = 256 << 20
_STEP_TOKENS = 96


class Asked:
    def __init__(self, place: str, dtype: str) -> None:
        self._llm = LLM(
            str(folder()),
            dtype=dtype,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=_BLOCKS,
            max_num_batched_tokens=_STEP_TOKENS,
            max_num_seqs=4,
            max_model_len=256,
            kv_cache_memory_bytes=_KV_BYTES,  # else it asks for nearly all of the machine's memory
            gpu_memory_utilization=0.1,
            enforce_eager=True,
            seed=0,
            distributed_executor_backend="uni",
            kv_transfer_config=None
            if place == "-"
            else transfer_to("KVFSConnector", "kvfs.vllm", path=place),
            disable_log_stats=False,
        )

    def ask(
        self, prompts: list[list[int]], count: int, aborted: int | None = None
    ) -> dict[str, Any]:
        self._llm.reset_prefix_cache(reset_connector=True)
        engine, found = self._llm.llm_engine, dict[str, Any]()
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{number}", {"prompt_token_ids": prompt}, greedy)
        steps, preemptions = 0, 0
        while engine.has_unfinished_requests():
            if steps == aborted:
                engine.abort_request(["0"])
            scheduler = engine.engine_core.engine_core.scheduler
            preemptions = max(
                [preemptions, *(one.num_preemptions for one in scheduler.requests.values())]
            )
            found.update((one.request_id, one) for one in engine.step() if one.finished)
            steps += 1
        if has_kv_transfer_group():
            get_kv_transfer_group().flush()
        answers = [found[key] for key in sorted(found) if aborted is None or key != "0"]
        return {
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "hits": [answer.num_cached_tokens or 0 for answer in answers],
            "preemptions": preemptions,
        }


asked = Asked(*sys.argv[1:])
answer_lines(lambda line: asked.ask(**json.loads(line)))

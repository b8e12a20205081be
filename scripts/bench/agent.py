"""Row 13: an agent's turn after its session was idle: resumed from the ring, or computed anew.

Until its first token: the session is opened and brought in, and the words of the new turn go
through the model; or all the words do. Before it the session was sent down to the ring, and all
that the kernel caches dropped; or the ring was unmounted as well, and mounted again, so that
the daemon has no memory that was touched.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import KVFSCache
from scripts.bench.disk import drop_caches
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.real_kv import load_with_text
from scripts.bench.rows import Row, Series, speed_row

TOKENS = 2000
NEW_TOKENS = 16
TIMES_BETTER_MIN = 10
_SESSION = "agent"


def measure(plan: Plan) -> list[Row]:
    model, ids = load_with_text(TOKENS + NEW_TOKENS)
    resumed, remounted, recomputed = [], [], []
    with fresh_mount(plan.directory, "2G", "--warm", "1G") as mount:
        with torch.no_grad(), KVFSCache.open(mount.point, _SESSION, model) as cache:
            model(torch.tensor([ids[:TOKENS]]), cache=cache, logits_to_keep=1)
            cache.sync()
        for number in range(plan.rounds + 1):
            again, token = _recompute(model, ids)
            mount.make_cold(mount.point / _SESSION)
            cold, same = _resume(model, ids, mount)
            mount.umount()
            drop_caches()
            mount.mount()
            colder, same_again = _resume(model, ids, mount)
            if {token, same, same_again} != {token}:
                raise SystemExit(f"{same}, {same_again} after a resume, {token} computed anew")
            if number:
                resumed.append(cold)
                remounted.append(colder)
                recomputed.append(again)
    anew = _rates("computed anew", recomputed)
    what = f"first token of a turn of {NEW_TOKENS} tokens after {TOKENS}, cold"
    rows = []
    for id, title, goal, seconds in (
        ("13a", what, TIMES_BETTER_MIN, resumed),
        ("13b", "  after a new mount", None, remounted),
    ):
        ours = _rates("resumed", seconds)
        remark = f"{1000 / ours.median:.0f} ms, anew {1000 / anew.median:.0f} ms"
        rows.append(speed_row(id, title, goal, ours, anew, unit="1/s", remark=remark))
    return rows


def _rates(name: str, seconds: list[float]) -> Series:
    return Series(name, [1 / one for one in seconds])


def _recompute(model: PreTrainedModel, ids: list[int]) -> tuple[float, int]:
    started = time.perf_counter()
    token = _first_token(model, ids, DynamicCache(config=model.config))
    return time.perf_counter() - started, token


def _resume(model: PreTrainedModel, ids: list[int], mount: Mount) -> tuple[float, int]:
    """The turn is not kept: the next round finds the session as it was."""
    started = time.perf_counter()
    cache = KVFSCache.open(mount.point, _SESSION, model)
    try:
        token = _first_token(model, ids, cache)
        seconds = time.perf_counter() - started
        cache.crop(-NEW_TOKENS)
    finally:
        cache.close()
    return seconds, token


def _first_token(model: PreTrainedModel, ids: list[int], cache: Any) -> int:
    prompt = torch.tensor([ids])
    output = model.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=1,
        do_sample=False,
    )
    return int(output[0, len(ids)])

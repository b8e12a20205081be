"""What KVFSCache costs a decoding step: with everything hot, and with a part of it cold.

    python scripts/bench_decode.py [--tokens 512 2048 4096] [--steps 100] [--json FILE]

SmolLM2-135M decodes one token at a time after a prompt of random tokens; the caches take
turns, token by token, so that each ratio is one of steps that lie next to each other. Beside the
clock's ratio stands that of the CPU time of the thread that decodes: with --threads 1 it is the
cost without what else runs on the machine.

- hot: everything fits, against DynamicCache;
- paged: hot memory for two layers and half of the session, so that each step brings in the
  other half from the mount, while layers compute.

Then what it costs to promote and to demote a batch of blocks, without the copies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.tiers.handles import State
from kvfs.torch import HotPool, KVFSCache
from kvfs.torch.hot import SLAB_BYTES
from kvfs.torch.layout import RowLayout
from scripts.demo import load_model

KVFS = str(Path(sys.executable).with_name("kvfs"))
BATCH = 1000
PAGE = 4096
PAGED_STEPS = 20
WARMING_STEPS = 5


@dataclass(frozen=True)
class Step:
    """One forward of one token, by the clock and by the CPU of its thread."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Decoding:
    """Medians over the steps at one context length; ratios are to DynamicCache."""

    tokens: int
    dynamic_ms: float
    hot_ms: float
    hot_ratio: float
    hot_cpu_ratio: float
    paged_ms: float
    paged_mb_a_step: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, _ = load_model()
    results = []
    with mounted() as mountpoint, torch.no_grad():
        for tokens in arguments.tokens:
            results.append(decode(model, mountpoint, tokens, arguments.steps))
            print(line(results[-1]), flush=True)
    promotion_us = promotion()
    print(f"{promotion_us:.2f} us a block to promote and demote, {BATCH} at a time, copies apart")
    if arguments.json is not None:
        report = {"decoding": [asdict(one) for one in results], "promotion_us": promotion_us}
        arguments.json.write_text(json.dumps(report, indent=1))


@contextmanager
def mounted() -> Iterator[Path]:
    """An empty KVFS on an image."""
    with tempfile.TemporaryDirectory() as name:
        image, mountpoint = Path(name) / "ring.img", Path(name) / "mnt"
        mountpoint.mkdir()
        subprocess.run([KVFS, "mkfs", image, "--size", "4G"], check=True, capture_output=True)
        log = ["--log", Path(name) / "log"]
        subprocess.run([KVFS, "mount", mountpoint, image, *log], check=True, capture_output=True)
        try:
            yield mountpoint
        finally:
            subprocess.run([KVFS, "umount", mountpoint], check=True, capture_output=True)


def decode(model: PreTrainedModel, mountpoint: Path, tokens: int, steps: int) -> Decoding:
    prompt = torch.randint(10, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
    with KVFSCache.open(mountpoint, f"hot-{tokens}", model, pool=HotPool(4 << 30)) as hot:
        step(model, hot, prompt)
        dynamic = DynamicCache()
        for index, layer in enumerate(hot.layers):
            dynamic.update(layer.keys, layer.values, index)
        taken = interleaved(model, {"dynamic": dynamic, "hot": hot}, steps)
        assert not hot.counters.fetched_blocks
    paged_ms, paged_mb = decode_paged(model, mountpoint, prompt)
    return Decoding(
        tokens=tokens,
        dynamic_ms=median_ms(taken["dynamic"]),
        hot_ms=median_ms(taken["hot"]),
        hot_ratio=ratio(taken, lambda one: one.seconds),
        hot_cpu_ratio=ratio(taken, lambda one: one.cpu_seconds),
        paged_ms=paged_ms,
        paged_mb_a_step=paged_mb,
    )


def median_ms(steps: list[Step]) -> float:
    return 1e3 * statistics.median(one.seconds for one in steps)


def ratio(taken: dict[str, list[Step]], of: Callable[[Step], float]) -> float:
    """Median of the ratios of steps that lie next to each other."""
    pairs = zip(taken["dynamic"], taken["hot"], strict=True)
    return statistics.median(of(hot) / of(dynamic) for dynamic, hot in pairs)


def interleaved(
    model: PreTrainedModel, caches: dict[str, Any], steps: int
) -> dict[str, list[Step]]:
    """Each step of each cache; the first ones, which warm up, left out."""
    taken: dict[str, list[Step]] = {name: [] for name in caches}
    token = torch.tensor([[17]])
    for number in range(steps + WARMING_STEPS):
        # In turn first and second: what follows a step is not always the same cache.
        order = list(caches) if number % 2 else list(reversed(caches))
        for name in order:
            one = step(model, caches[name], token)
            if number >= WARMING_STEPS:
                taken[name].append(one)
    return taken


def decode_paged(
    model: PreTrainedModel, mountpoint: Path, prompt: torch.Tensor
) -> tuple[float, float]:
    """Milliseconds and MB a step with hot memory for half of the session's slabs."""
    layout_bytes = prompt.shape[1] * model.config.num_key_value_heads * 64 * 2 * 2
    layers = model.config.num_hidden_layers
    slabs = -(-layout_bytes // SLAB_BYTES) * layers // 2
    budget = 3 * layout_bytes + (1 << 20) + slabs * SLAB_BYTES
    name = f"paged-{prompt.shape[1]}"
    with KVFSCache.open(mountpoint, name, model, pool=HotPool(budget)) as cache:
        step(model, cache, prompt)
        before = cache.counters.fetched_bytes_warm + cache.counters.fetched_bytes_mount
        steps = interleaved(model, {"paged": cache}, PAGED_STEPS)["paged"]
        after = cache.counters.fetched_bytes_warm + cache.counters.fetched_bytes_mount
    return median_ms(steps), (after - before) / (PAGED_STEPS + WARMING_STEPS) / 1e6


def step(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> Step:
    began, cpu_began = time.perf_counter(), time.thread_time()
    model(input_ids=ids, past_key_values=cache)
    return Step(time.perf_counter() - began, time.thread_time() - cpu_began)


def promotion() -> float:
    """Microseconds a block to promote and to demote again, without the copies.

    What a layer does besides them: slabs taken and seen as K and V, handles marked and
    published, and slabs given back.
    """
    pool, layout = HotPool(2 * BATCH * PAGE, slab_bytes=PAGE), RowLayout(3, 64, torch.bfloat16)
    ids = pool.handles.add(BATCH, State.COLD)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        places = pool.take(BATCH)
        with pool.handles.migrating(ids) as migration:
            slabs = [pool.slab(place, layout) for place in places]
            migration.publish(State.HOT, np.array(places))
        assert len(slabs) == BATCH
        with pool.handles.migrating(ids) as migration:
            migration.publish(State.COLD)
        pool.give(migration.before.places.tolist())
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds) / BATCH


def line(one: Decoding) -> str:
    return (
        f"{one.tokens:6} tokens: DynamicCache {one.dynamic_ms:.1f} ms, hot {one.hot_ms:.1f} ms "
        f"(ratio {one.hot_ratio:.3f}, CPU {one.hot_cpu_ratio:.3f}), paged {one.paged_ms:.1f} ms "
        f"with {one.paged_mb_a_step:.1f} MB a step from the mount"
    )


if __name__ == "__main__":
    main()

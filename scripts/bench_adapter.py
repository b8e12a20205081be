"""Bring a session in by the adapter: warm beside a memcpy, cold beside the raw device.

    python scripts/bench_adapter.py [--dir DIR] [--rounds 5] [--json FILE]

A session of 30 layers x 8 MiB of random bytes, shaped as those of an 8B model (8 KV heads of
128, bfloat16). Each round measures, one after the other: a memcpy of as many bytes, layer by
layer, between memory that was touched; `load()` of the session when it is warm, read from
the daemon's memory where it offers that; fio reading as many bytes of a new file (O_DIRECT,
1 MiB, depth 8); `load()` when the session is cold, the kernel's page cache dropped (needs
root). Then the same warm load into small slabs: what a block costs besides its bytes. Figures
are medians of the rounds' ratios: machine and disk drift, the rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvfs.torch import HotPool, KVFSCache
from scripts.bench_restore import LAYER_SIZE, LAYERS, SIZE, drop_caches, fio
from scripts.demo import DemoError, Mount, console, fresh_mount, work_directory

KV_HEADS, HEAD_DIM = 8, 128
ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
TOKENS = LAYER_SIZE // ROW_BYTES
SESSION = "session"
SLAB_BYTES, SMALL_SLAB_BYTES = 256 << 10, 16 << 10
WAIT_SECONDS = 60


@dataclass(frozen=True)
class Round:
    """MB/s (10^6 bytes), and what of a load came from warm memory; `block_us` in microseconds."""

    memcpy: float
    warm: float
    warm_share: float
    raw: float
    cold: float
    cold_share: float
    block_us: float


def make_model() -> PreTrainedModel:
    """A model whose KV has that shape; what it computes does not matter."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def write_session(mount: Mount, model: PreTrainedModel) -> None:
    """The files of a session of TOKENS tokens."""
    KVFSCache.open(mount.point, SESSION, model).close()
    directory = mount.point / SESSION
    data = os.urandom(LAYER_SIZE)
    for layer in range(LAYERS):
        fd = os.open(directory / f"layer.{layer:03d}", os.O_WRONLY)
        try:
            if os.pwrite(fd, data, 0) != LAYER_SIZE:
                raise DemoError("short write")
            os.fsync(fd)
        finally:
            os.close(fd)
    (directory / "tokens").write_bytes(np.zeros(TOKENS, "<i4").tobytes())


def bring(mount: Mount, tier: str) -> None:
    """See the session in that tier of the daemon."""
    directory = mount.point / SESSION
    os.setxattr(directory, f"user.kvfs.{'prefetch' if tier == 'warm' else 'demote'}", b"1")
    deadline = time.monotonic() + WAIT_SECONDS
    while os.getxattr(directory, "user.kvfs.tier") != tier.encode():
        if time.monotonic() > deadline:
            raise DemoError(f"the session is not {tier} after {WAIT_SECONDS} s")
        time.sleep(0.05)


def speed(work: Callable[[], None]) -> float:
    """MB/s of what moves the bytes of the session."""
    started = time.perf_counter()
    work()
    return SIZE / (time.perf_counter() - started) / 1e6


def load(cache: KVFSCache) -> tuple[float, float]:
    """MB/s, and the share of the bytes that was read from the daemon's warm memory."""
    cache.release()
    before = cache.counters.fetched_bytes_warm
    fast = speed(cache.load)
    if cache.resident_bytes < SIZE:
        raise DemoError("not all of the session is hot")
    return fast, (cache.counters.fetched_bytes_warm - before) / SIZE


def measure(directory: Path, rounds: int) -> list[Round]:
    """The rounds, the first of which only touches what is used again."""
    model = make_model()
    source, target = (np.ones((LAYERS, LAYER_SIZE), np.uint8) for _ in range(2))

    def memcpy() -> None:
        for one, other in zip(target, source, strict=True):
            np.copyto(one, other)

    with fresh_mount(directory, "--warm", "1G") as mount:
        write_session(mount, model)

        def opened(slab_bytes: int) -> KVFSCache:
            return KVFSCache.open(
                mount.point, SESSION, model, pool=HotPool(2 * SIZE, slab_bytes=slab_bytes)
            )

        def one_round() -> Round:
            raw_file = directory / "raw"
            fio(raw_file, "write")
            with opened(SLAB_BYTES) as cache:
                bring(mount, "warm")
                cache.load()  # touches the slabs
                copied = speed(memcpy)
                warm, warm_share = load(cache)
            with opened(SMALL_SLAB_BYTES) as cache:
                cache.load()
                small, _ = load(cache)
            with opened(SLAB_BYTES) as cache:
                cache.load()
                cache.release()
                raw = fio(raw_file, "read")
                bring(mount, "cold")
                drop_caches()
                cold, cold_share = load(cache)
            raw_file.unlink()
            more_blocks = SIZE / SMALL_SLAB_BYTES - SIZE / SLAB_BYTES
            block_us = (SIZE / small - SIZE / warm) / more_blocks
            return Round(copied, warm, warm_share, raw, cold, cold_share, block_us)

        return [one_round() for _ in range(rounds + 1)][1:]


def report(rounds: list[Round], path: Path | None) -> None:
    """The table, and the same as JSON."""
    rows = []
    for title, what, share, limit, goal in (
        ("warm, beside memcpy", "warm", "warm_share", "memcpy", 0.8),
        ("cold, beside raw O_DIRECT", "cold", "cold_share", "raw", 0.8),
    ):
        ratio = statistics.median(getattr(r, what) / getattr(r, limit) for r in rounds)
        row = {
            "what": title,
            "mb_s": statistics.median(getattr(r, what) for r in rounds),
            "limit_mb_s": statistics.median(getattr(r, limit) for r in rounds),
            "from_warm": statistics.median(getattr(r, share) for r in rounds),
            "ratio": ratio,
            "goal": goal,
        }
        rows.append(row)
        console.print(
            f"{title:26} {row['mb_s']:6.0f} MB/s  limit {row['limit_mb_s']:6.0f}  "
            f"from warm {row['from_warm']:4.0%}  ratio {ratio:5.2f}  goal {goal}"
        )
    block_us = statistics.median(r.block_us for r in rounds)
    console.print(f"{'a block besides its bytes':26} {block_us:6.2f} us")
    if path is not None:
        document = {"rows": rows, "block_us": block_us, "rounds": [asdict(r) for r in rounds]}
        path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Exit code 0 if it could be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="a directory on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        with work_directory(options.dir, keep=False) as directory:
            rounds = measure(directory, options.rounds)
    except (DemoError, OSError) as error:
        console.print(f"bench_adapter: {error}", style="red", markup=False, highlight=False)
        return 1
    report(rounds, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

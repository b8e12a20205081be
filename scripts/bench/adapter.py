"""Row 2: a session comes in by the adapter: cold beside the raw disk, warm beside a memcpy.

A session of 30 layers x 8 MiB, shaped as those of an 8B model (8 KV heads of 128, bfloat16), by
`KVFSCache.load()` into the slabs of a pool, on the accelerator where there is one. The memcpy
moves as many bytes, layer by layer, between memory that was touched. What a block costs besides
its bytes is what the same warm load takes longer into smaller slabs, a block each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvfs.torch import HotPool, KVFSCache
from scripts.bench.disk import MIB, best_speed, pwritev, read_limit, speed, touched
from scripts.bench.layers import check, cut, layer_paths, noise, save
from scripts.bench.mount import Mount, fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, bound_row, speed_row

LAYERS, LAYER_SIZE = 30, 8 * MIB
SIZE = LAYERS * LAYER_SIZE
KV_HEADS, HEAD_DIM = 8, 128
TOKENS = LAYER_SIZE // (2 * KV_HEADS * HEAD_DIM * 2)
SLAB_BYTES, SMALL_SLAB_BYTES = 256 << 10, 16 << 10
NAME = "session"


@dataclass(frozen=True, slots=True)
class Loaded:
    """MB/s, and the share of the bytes that was read from the daemon's warm memory."""

    mb_s: float
    from_warm: float


@dataclass(frozen=True, slots=True)
class Round:
    """MB/s of the limits; `block_us` in microseconds."""

    raw: float
    cold: Loaded
    memcpy: float
    warm: Loaded
    block_us: float


@dataclass(frozen=True, slots=True)
class Bench:
    mount: Mount
    model: PreTrainedModel
    data: memoryview

    @property
    def session(self) -> Path:
        return self.mount.point / NAME

    def write(self) -> None:
        """The files of a session of TOKENS tokens."""
        KVFSCache.open(self.mount.point, NAME, self.model).close()
        save(layer_paths(self.session, LAYERS), cut(self.data, LAYER_SIZE))
        (self.session / "tokens").write_bytes(np.zeros(TOKENS, "<i4").tobytes())

    def cold(self) -> Loaded:
        with self._opened(SLAB_BYTES) as cache:
            self.mount.make_cold(self.session)
            return self._load(cache)

    def warm(self, slab_bytes: int) -> Loaded:
        with self._opened(slab_bytes) as cache:
            return self._load(cache)

    @contextmanager
    def _opened(self, slab_bytes: int) -> Iterator[KVFSCache]:
        """It, and a pool whose slabs were touched."""
        pool = HotPool(2 * SIZE, slab_bytes=slab_bytes, device=self.model.device)
        with KVFSCache.open(self.mount.point, NAME, self.model, pool=pool) as cache:
            self.mount.make_warm(self.session)
            cache.load()
            cache.release()
            yield cache

    def _load(self, cache: KVFSCache) -> Loaded:
        before = cache.counters.fetched_bytes_warm
        mb_s = speed(SIZE, lambda: _load_all(cache))
        from_warm = (cache.counters.fetched_bytes_warm - before) / SIZE
        if cache.resident_bytes < SIZE:
            raise SystemExit("not all of the session is hot")
        for layer, expected in zip(cache.layers, cut(self.data, LAYER_SIZE), strict=True):
            check(_bytes_of(list(layer.rows_by_block())), expected)
        return Loaded(mb_s, from_warm)


def measure(plan: Plan) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = _rounds(plan)
    finally:
        torch.set_num_threads(threads)
    cold, warm = (
        statistics.median(one.from_warm for one in each)
        for each in ([r.cold for r in rounds], [r.warm for r in rounds])
    )
    where = "the accelerator" if torch.cuda.is_available() else "host memory"
    return [
        speed_row(
            "2a", f"load() of 30 x 8 MiB by the adapter, cold, into {where}", 0.9,
            Series("KVFS", [r.cold.mb_s for r in rounds]),
            Series("raw sequential", [r.raw for r in rounds]),
            remark=f"{cold:.0%} read from warm memory, which KVFS had filled by then",
        ),
        speed_row(
            "2b", "  warm", 0.8,
            Series("KVFS", [r.warm.mb_s for r in rounds]),
            Series("memcpy", [r.memcpy for r in rounds]),
            remark=f"{warm:.0%} read from warm memory",
        ),
        bound_row(
            "2c", "  a block besides its bytes, warm", [r.block_us for r in rounds], "us",
            at_most=5,
        ),
    ]  # fmt: skip


def _rounds(plan: Plan) -> list[Round]:
    source, target = (cut(touched(SIZE), LAYER_SIZE) for _ in range(2))
    raw_file = plan.directory / "raw"
    with fresh_mount(plan.directory, "4G", "--warm", "1G") as mount:
        bench = Bench(mount, _make_model(), noise(SIZE))
        bench.write()

        def one_round() -> Round:
            memcpy = best_speed(SIZE, lambda: list(map(_copy, source, target)))
            warm, small = bench.warm(SLAB_BYTES), bench.warm(SMALL_SLAB_BYTES)
            pwritev(raw_file, SIZE)
            raw = read_limit(raw_file, SIZE)
            raw_file.unlink()
            more_blocks = SIZE / SMALL_SLAB_BYTES - SIZE / SLAB_BYTES
            block_us = (SIZE / small.mb_s - SIZE / warm.mb_s) / more_blocks
            return Round(raw, bench.cold(), memcpy, warm, block_us)

        return [one_round() for _ in range(plan.rounds + 1)][1:]


def _copy(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _make_model() -> PreTrainedModel:
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def _load_all(cache: KVFSCache) -> None:
    cache.load()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _bytes_of(blocks: list[torch.Tensor]) -> memoryview:
    """As in the file of a layer, of its blocks `[K,V][batch][kv_head][token][head_dim]`."""
    rows = torch.cat([block.permute(3, 0, 1, 2, 4).cpu() for block in blocks])
    return rows.contiguous().view(torch.uint8).numpy().reshape(-1).data

"""Hot memory on a device: the numbers of host memory, bit for bit, and of DynamicCache.

Each test runs on the CPU through the code for devices, with streams that do nothing and
memory that is not pinned, and on a GPU where there is one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import HotPool, KVFSCache
from kvfs.torch.files import SessionFile
from kvfs.torch.layout import RowLayout
from kvfs.torch.slab import Rows
from kvfs.torch.source import opened
from kvfs.torch.transfer import DeviceMover, HostMover, Mover, Part

Prompt = Callable[..., torch.Tensor]
ModelMaker = Callable[..., PreTrainedModel]
See = Callable[[torch.Tensor, RowLayout], Any]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLAB = 4096
needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose pools move rows as those of a GPU do, in small pieces."""
    monkeypatch.setattr("kvfs.torch.hot.mover_for", DeviceMover)
    monkeypatch.setattr("kvfs.torch.staging._PIECE_BYTES", 4096)
    return torch.empty(0, device=request.param).device


def random_rows(layout: RowLayout, count: int) -> memoryview:
    """Any bytes, so numbers that are not numbers too."""
    return memoryview(bytearray(os.urandom(count * layout.row_bytes)))


def filled(see: See, mover: Mover, layout: RowLayout, at: int, rows: memoryview) -> Any:
    """Zeros, and `rows` from token `at` on, as they come from a file."""
    memory = mover.memory(1 << 16)
    memory.zero_()
    seen = see(memory, layout)
    while rows:
        with mover.staging(layout) as staging:
            piece = staging[: len(rows)]
            piece[:], rows = rows[: len(piece)], rows[len(piece) :]
            seen.put_rows(at, np.frombuffer(piece, np.uint8) if isinstance(seen, Rows) else piece)
            at += len(piece) // layout.row_bytes
    mover.settle()
    return seen


def outgoing(mover: Mover, parts: list[Part], layout: RowLayout) -> bytes:
    return b"".join(bytes(part) for some in mover.outgoing(parts, layout) for part in some)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "kv_heads", "head_dim"), [(1, 2, 16), (3, 2, 8), (1, 1, 25)])
@pytest.mark.parametrize(("at", "count"), [(0, 1), (5, 41), (0, 100)])
def test_rows_come_and_go_as_in_host_memory(
    at: int,
    count: int,
    batch: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    layout = RowLayout(kv_heads, head_dim, dtype, batch)
    rows = random_rows(layout, count)
    host, mover = HostMover(), DeviceMover(device)
    expected, slab = (
        filled(host.rows, host, layout, at, rows),
        filled(mover.rows, mover, layout, at, rows),
    )
    heads = filled(mover.heads, mover, layout, at, rows)
    assert slab.kv.device == heads.kv.device == device
    first, last = at + count // 3, at + count
    for seen in (slab, heads):
        assert bits(seen.part(at, last)) == bits(expected.part(at, last))
        assert mover.rows_of(seen.part(first, last)) == host.rows_of(expected.part(first, last))
        assert bytes(mover.rows_of(seen.part(at, last))) == bytes(rows)
    left = rows[(first - at) * layout.row_bytes :]
    parts = [(slab, first, last), (slab, at, last)]
    assert outgoing(mover, parts, layout) == bytes(left) + bytes(rows)
    assert outgoing(host, [(expected, *part[1:]) for part in parts], layout) == bytes(left) + bytes(
        rows
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "kv_heads", "head_dim"), [(1, 2, 16), (3, 2, 8), (1, 1, 25)])
def test_slabs_are_gathered_head_by_head(
    batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    layout = RowLayout(kv_heads, head_dim, dtype, batch)
    rows = random_rows(layout, 41)
    for mover in (HostMover(), DeviceMover(device)):
        slab = filled(mover.rows, mover, layout, 3, rows)
        heads = mover.heads(mover.memory(1 << 16), layout)
        heads.gather(7, slab, 5, 44)
        mover.settle()
        assert bytes(mover.rows_of(heads.part(7, 46))) == bytes(rows[2 * layout.row_bytes :])


def test_a_file_is_read_to_staging_that_starts_on_a_page(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, content = RowLayout(1, 25, torch.float32), os.urandom(20_000)
    path = tmp_path / "layer.000"
    path.write_bytes(content)
    file = SessionFile(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), path)
    mover = DeviceMover(device)
    with mover.staging(layout) as memory:
        assert np.frombuffer(memory, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    with opened(file, layout, mover) as source:
        assert b"".join(map(bytes, source.rows(3, 97))) == content[600:19_400]
    warm = tmp_path / "warm"
    warm.write_bytes(b"-" * 50 + content)
    part = {"path": str(warm), "offset": 50, "length": 20_000, "at": 0}
    monkeypatch.setattr("kvfs.torch.offers._ask", lambda _: {"segments": [part]})
    with opened(file, layout, mover) as source:
        pieces = [bytes(rows) for rows in source.rows(3, 97)]
        assert source.moved.warm == 18_800
    assert b"".join(pieces) == content[600:19_400]


def generate(model: PreTrainedModel, cache: object, ids: torch.Tensor, **options: Any) -> Any:
    """The whole sequences after decoding 12 tokens without chance."""
    return model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=12,
        do_sample=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slabs", [0, 11, 200])
def test_tokens_are_those_of_dynamic_cache_under_any_budget(
    slabs: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_directory: Path,
    make_model: ModelMaker,
    prompt: Prompt,
) -> None:
    model = make_model(dtype=dtype).to(device)  # type: ignore[arg-type]
    reference = DynamicCache(config=model.config)
    ours = theirs = torch.empty(1, 0, dtype=torch.long, device=device)
    workspaces = 2 * -(-160 * 2 * 2 * 16 * dtype.itemsize // SLAB)
    pool = HotPool((workspaces + slabs) * SLAB, SLAB, device)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        for turn, length in enumerate((37, 1, 64, 5)):
            question = prompt(length, seed=turn).to(device)
            theirs = generate(model, reference, torch.cat([theirs, question], dim=1))
            ours = generate(model, cache, torch.cat([ours, question], dim=1))
            assert torch.equal(ours, theirs)
            cache.end_round()
            (cache.release, cache.demote_oldest_round, cache.prefetch_all, cache.sync)[turn]()
            for one in (cache, reference):
                one.crop(-3)
            ours, theirs = ours[:, :-3], theirs[:, :-3]
        length = cache.get_seq_length()
        assert cache.counters.fetched_blocks > 0
    assert pool.used_slabs == 0
    # What was written is what is found by who opens it next. (On a GPU attention may choose
    # another kernel for memory that lies otherwise: there the tokens are compared, not the bits.)
    with KVFSCache.open(kv_directory, "agent", model, hot_bytes=64 << 20) as cache:
        assert cache.get_seq_length() == length
        cache.load()
        for mine, layer in zip(cache.layers, reference.layers, strict=True):
            assert mine.keys is not None and mine.values is not None
            if device.type == "cpu":
                assert torch.equal(mine.keys, layer.keys[:, :, :length])  # type: ignore[index]
                assert torch.equal(mine.values, layer.values[:, :, :length])  # type: ignore[index]


@pytest.mark.parametrize("slabs", [0, 200])
def test_beams_go_and_the_session_stays(
    slabs: int, device: torch.device, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    model = model.to(device)  # type: ignore[arg-type]
    ids = prompt(40).to(device)
    expected = generate(model, DynamicCache(), ids, num_beams=3)
    pool = HotPool((40 + slabs) * SLAB, SLAB, device)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool) as cache:
        assert torch.equal(generate(model, cache, ids, num_beams=3), expected)
        cache.rewind_to(ids)
        assert torch.equal(generate(model, cache, ids), generate(model, DynamicCache(), ids))
    assert pool.used_slabs == 0


def test_what_leaves_a_window_comes_back(
    device: torch.device, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    model = model.to(device)  # type: ignore[arg-type]
    ids = [prompt(64, seed=turn).to(device) for turn in range(3)]
    reference = DynamicCache()
    pool = HotPool(64 << 20, SLAB, device)
    with KVFSCache.open(kv_directory, "agent", model, pool=pool, window=1) as cache:
        for turn in ids:
            with torch.no_grad():
                model(input_ids=turn, cache=cache)
                cache.end_round()
        cache.bring_back(0)
        cache.bring_back(1)
        assert cache.left_out == []
        with torch.no_grad():
            model(input_ids=ids[0], cache=reference)
        cache.load()
        assert cache.counters.fetched_blocks > 0
        for mine, theirs in zip(cache.layers, reference.layers, strict=True):
            assert mine.keys is not None and theirs.keys is not None
            torch.testing.assert_close(mine.keys[:, :, :64], theirs.keys, rtol=1e-4, atol=1e-5)


def test_a_pool_of_another_device_is_refused(
    kv_directory: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HotPool(1 << 20)
    monkeypatch.setattr(pool.mover, "device", torch.device("cuda:1"))
    with pytest.raises(ValueError, match=r'on cuda:1 and the model on cpu.*HotPool\(device="cpu"'):
        KVFSCache.open(kv_directory, "agent", model, pool=pool)
    with pytest.raises(ValueError, match="on the CPU or on a CUDA device, not on meta"):
        HotPool(device="meta")


def test_a_model_on_two_devices_is_refused(kv_directory: Path, model: PreTrainedModel) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model.get_output_embeddings().to("cuda")
    with pytest.raises(ValueError, match="spread over cpu, cuda:0"):
        KVFSCache.open(kv_directory, "agent", model)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_churn_does_not_fragment_the_memory_of_a_gpu() -> None:
    """What torch keeps and nobody uses does not grow while sessions come, grow and go."""
    random, layout = np.random.default_rng(0), RowLayout(3, 64, torch.bfloat16)
    pool = HotPool(256 << 20, device="cuda")
    limit = pool.budget_bytes // pool.slab_bytes // 2
    sessions: dict[int, list[int]] = {}
    unused = []
    for number in range(5000):
        slabs = min(limit // 2, int(random.geometric(1 / 40)))
        while sum(map(len, sessions.values())) + slabs > limit:
            pool.give(sessions.pop(int(random.choice(list(sessions)))))
        sessions[number] = pool.take(slabs)
        assert len(sessions[number]) == slabs
        spaces = pool.lend(number, slabs * pool.slab_bytes // 4, want=8, slabs=0)
        assert spaces is not None
        for place in sessions[number]:
            pool.slab(place, layout).kv.zero_()
        for space in spaces:
            space.seen_as(layout).kv.zero_()
        pool.rest(number)
        if random.random() < 0.3:
            pool.forgo(number)
        unused.append(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    assert max(unused[1000:]) <= max(unused[:1000]) + pool.budget_bytes // 10

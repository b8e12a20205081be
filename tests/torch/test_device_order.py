"""The order between streams, without a GPU: every access to hot memory and staging is ordered.

The whole cache runs on the CPU, with streams that only keep account (`streams.py`). That the
account sees what is missing is shown by leaving out each of the rules of `transfer.py` in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import PreTrainedModel

from kvfs.torch import HotPool, KVFSCache
from kvfs.torch.layer import KVFSLayer
from kvfs.torch.layout import RowLayout
from kvfs.torch.transfer import DeviceMover
from tests.torch.streams import Event, Seen, Streams, address_of

Prompt = Callable[..., torch.Tensor]
SLAB = 4096
ROW_BYTES = 2 * 2 * 16 * 4


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Pools are of a device whose streams keep account."""
    streams = Streams()

    class Mover(DeviceMover):
        def memory(self, nbytes: int) -> torch.Tensor:
            memory = super().memory(nbytes)
            streams.watch(memory, memory.data_ptr(), nbytes)
            return memory

        @contextmanager
        def staging(self, layout: RowLayout) -> Iterator[memoryview]:
            with super().staging(layout) as memory:
                streams.watch(memory, address_of(memory), len(memory))
                streams.on_host("a read into staging", memory, write=True)
                yield memory

    write = KVFSLayer._write

    def seen_write(self: KVFSLayer, rows: list[memoryview]) -> None:
        for part in rows:
            streams.on_host("a write to a file", part, write=False)
        write(self, rows)

    monkeypatch.setattr(torch, "get_device_module", lambda _: streams)
    monkeypatch.setattr("kvfs.torch.hot.mover_for", Mover)
    monkeypatch.setattr("kvfs.torch.staging._PIECE_BYTES", 4096)
    monkeypatch.setattr(KVFSLayer, "_write", seen_write)
    return streams


def use(streams: Streams, directory: Path, model: PreTrainedModel, prompt: Prompt) -> None:
    """Two sessions that page, grow, are cropped and go to beams, under little memory."""
    pool = HotPool(4 * 160 * ROW_BYTES + 30 * SLAB, SLAB)
    with (
        torch.no_grad(),
        Seen(streams),
        KVFSCache.open(directory, "one", model, pool=pool) as one,
        KVFSCache.open(directory, "two", model, pool=pool, window=1) as two,
    ):
        for turn, length in enumerate((40, 1, 1, 30, 1)):
            for cache in (one, two):
                model(input_ids=prompt(length, seed=turn), cache=cache)
                cache.end_round()
            (one.release, two.release, one.prefetch_all, one.demote_oldest_round, one.load)[turn]()
        two.bring_back(0)
        one.crop(-20)
        for cache in (one, two):
            model(input_ids=prompt(9), cache=cache)
        one.batch_repeat_interleave(2)
        one.reorder_cache(torch.tensor([1, 0]))
        model(input_ids=prompt(3).repeat(2, 1), cache=one)
        assert one.counters.fetched_blocks and two.counters.fetched_blocks


def test_every_access_is_ordered(
    streams: Streams, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    use(streams, kv_directory, model, prompt)
    assert streams.accesses > 1000
    assert streams.races == []


def without_order(self: DeviceMover, work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with self._api.stream(self._side):
            work()

    return run


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (DeviceMover, "beside", without_order),
        (DeviceMover, "join", lambda self: None),
        (DeviceMover, "settle", lambda self: None),
        (Event, "synchronize", lambda self: None),
    ],
    ids=["beside", "join", "settle", "synchronize"],
)
def test_the_account_sees_what_is_left_out(
    where: type,
    name: str,
    instead: Any,
    streams: Streams,
    kv_directory: Path,
    model: PreTrainedModel,
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, name, instead)
    use(streams, kv_directory, model, prompt)
    assert streams.races

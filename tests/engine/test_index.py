"""Lookups that wait for the device while what they look for changes its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.engine.btree import Rewrite
from kvfs.engine.format import DATA_START, Checkpoint, Pointer, Position, inode_key, round_up
from kvfs.engine.index import Index
from kvfs.engine.io import Completion, InlineExecutor, Step, Urgency
from kvfs.engine.metadata import EncodedRecord
from kvfs.engine.nodecache import NodeCache
from kvfs.engine.ring import Geometry, Ring
from tests.engine.kit import MIB
from tests.support.devices import RecordingDevice

T = TypeVar("T")
KEY = inode_key(7)


@dataclass
class SlowExecutor(InlineExecutor):
    """Work waits until it is let go."""

    waiting: list[tuple[Callable[[], object], Completion[object]]] = field(default_factory=list)

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Completion[T]:
        completion: Completion[T] = Completion()
        self.waiting.append((work, completion))  # type: ignore[arg-type]
        return completion

    def answer(self) -> None:
        waiting, self.waiting = self.waiting, []
        for work, completion in waiting:
            completion.finish(work())


@dataclass
class Bench:
    """An index whose trees hold one item, and nothing of it in memory."""

    def __post_init__(self) -> None:
        self.device = RecordingDevice.of_size(DATA_START + 4 * MIB)
        self.end = DATA_START
        ring = Ring(Geometry(MIB, 4), bytes(16), 0, Position(0, 0, 1, 1, 0))
        self.slow = SlowExecutor()
        self.index = Index(NodeCache(self.device, self.slow, ring, 0), Checkpoint())
        self.index.apply([(KEY, b"old")])
        self.checkpoint()

    def write(self, records: list[EncodedRecord]) -> Step[list[Pointer]]:
        places = []
        for encoded in records:
            self.device.write(self.end, [encoded.stored])
            record = encoded.record
            places.append(
                Pointer(self.end, record.stored, record.size, record.codec, record.checksum)
            )
            self.end += round_up(record.stored)
        return places
        yield

    def update(self) -> Checkpoint:
        """A checkpoint up to where the superblock would be written."""
        return self.answered(self.index.update(self.rewrite)).checkpoint

    def rewrite(self) -> Rewrite:
        return Rewrite(self.index.nodes, InlineExecutor().submit, self.write)

    def answered(self, step: Step[T]) -> T:
        while True:
            try:
                next(step)
            except StopIteration as ended:
                result: T = ended.value
                return result
            self.slow.answer()

    def checkpoint(self) -> None:
        self.index.checkpointed(self.update())


def change(bench: Bench, moment: str) -> None:
    """A new value on its way down, as far as the name of the moment says."""
    bench.index.put(KEY, b"new")
    if moment == "pending":
        return
    batch, items = bench.index.seal()
    bench.index.apply(items)
    bench.index.settle(batch, items)
    if moment == "merging":
        bench.update()
    elif moment == "checkpointed":
        bench.checkpoint()


@pytest.mark.parametrize("moment", ["pending", "recent", "merging", "checkpointed"])
@pytest.mark.parametrize("how", ["get", "scan"])
def test_a_lookup_that_waited_tells_what_is_true_when_it_ends(moment: str, how: str) -> None:
    bench = Bench()
    step = bench.index.get(KEY) if how == "get" else bench.index.scan(KEY, KEY)
    next(step)
    change(bench, moment)
    bench.slow.answer()
    with pytest.raises(StopIteration) as ended:
        while True:
            next(step)
            bench.slow.answer()
    assert ended.value.value == (b"new" if how == "get" else [(KEY, b"new")])


layers = st.dictionaries(st.integers(0, 30), st.one_of(st.none(), st.binary(max_size=3)))


@given(
    tree=layers, merging=layers, recent=layers, pending=layers,
    low=st.integers(0, 30), high=st.integers(0, 30), limit=st.integers(1, 12),
)  # fmt: skip
def test_a_scan_is_of_all_layers_wherever_they_end(
    tree: dict[int, bytes | None],
    merging: dict[int, bytes | None],
    recent: dict[int, bytes | None],
    pending: dict[int, bytes | None],
    low: int,
    high: int,
    limit: int,
) -> None:
    bench = Bench()
    index = bench.index
    index.apply(items(tree))
    bench.checkpoint()
    index.apply(items(merging))
    bench.update()
    index.apply(items(recent))
    for key, value in items(pending):
        if value is None:
            index.delete(key)
        else:
            index.put(key, value)
    model = dict([(KEY, b"old"), *items(tree), *items(merging), *items(recent), *items(pending)])
    expected = [
        (key, value)
        for key, value in sorted(model.items())
        if value is not None and inode_key(low) <= key <= inode_key(high)
    ]
    assert bench.answered(index.scan(inode_key(low), inode_key(high), limit)) == expected[:limit]


def items(layer: dict[int, bytes | None]) -> list[tuple[bytes, bytes | None]]:
    return [(inode_key(number), value) for number, value in layer.items()]

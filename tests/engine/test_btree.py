"""Copy-on-write B-trees against a dict: looked up, scanned, and no node used twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine import btree, metadata
from kvfs.engine.btree import NODE_SIZE, Change, Keep, Rewrite
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    FormatError,
    Pointer,
    Position,
    TreeNode,
    inode_key,
    round_up,
)
from kvfs.engine.io import InlineExecutor, Step, run
from kvfs.engine.metadata import EncodedRecord
from kvfs.engine.nodecache import NodeCache
from kvfs.engine.ring import Geometry, Ring
from tests.engine.kit import MIB
from tests.support.devices import RecordingDevice


@dataclass
class Bench:
    """A tree on a device of its own; nodes are appended, nothing is ever overwritten."""

    device: RecordingDevice = field(
        default_factory=lambda: RecordingDevice.of_size(DATA_START + 64 * MIB)
    )
    root: Pointer = field(default_factory=Pointer)
    cache_size: int = 1 << 20

    def __post_init__(self) -> None:
        self.end = DATA_START
        self.live: set[Pointer] = set()
        ring = Ring(Geometry(MIB, 64), bytes(16), 0, Position(0, 0, 1, 1, 0))
        self.nodes = NodeCache(self.device, InlineExecutor(), ring, self.cache_size)

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

    def update(self, changes: dict[bytes, bytes | Keep | None]) -> Rewrite:
        rewrite = Rewrite(self.nodes, InlineExecutor().submit, self.write)
        ordered: list[Change] = sorted(changes.items())
        self.root = run(rewrite.run(self.root, ordered))
        assert len(set(rewrite.replaced)) == len(rewrite.replaced)
        assert set(rewrite.replaced) <= self.live
        self.live = (self.live - set(rewrite.replaced)) | set(rewrite.written)
        assert set(run(btree.pointers(self.nodes, self.root))) == self.live
        return rewrite

    def all(self, low: int = 0, high: int = 1 << 62, limit: int = 1 << 62) -> list[btree.Entry]:
        step = btree.scan(self.nodes, self.root, inode_key(low), inode_key(high), limit)
        return run(step)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[int, int | None]]:
    """Batches of changes: key to length of a value; None removes."""
    keys = st.one_of(st.integers(0, 40), st.integers(0, 20_000))
    values = st.one_of(st.none(), st.integers(0, 40), st.integers(1000, 30_000))
    dense = st.builds(
        lambda start, count, size: {start + n: size for n in range(count)},
        st.integers(0, 5000), st.integers(1, 1500), st.one_of(st.none(), st.integers(0, 60)),
    )  # fmt: skip
    batch = st.one_of(st.dictionaries(keys, values, max_size=30), dense)
    return draw(st.lists(batch, max_size=8))


@settings(max_examples=60, deadline=None)
@given(history=histories(), probe=st.integers(0, 20_000), limit=st.integers(1, 200))
def test_a_tree_is_a_sorted_dict(
    history: list[dict[int, int | None]], probe: int, limit: int
) -> None:
    bench, model = Bench(), dict[bytes, bytes]()
    random = Random(1)
    for batch in history:
        changes: dict[bytes, bytes | Keep | None] = {}
        for number, size in batch.items():
            key = inode_key(number)
            value = None if size is None else random.randbytes(size)
            changes[key] = value
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
        bench.update(changes)
        assert bench.all() == sorted(model.items())
    for number in {probe, *(n for batch in history for n in list(batch)[:20])}:
        key = inode_key(number)
        assert run(btree.get(bench.nodes, bench.root, key)) == model.get(key)
    expected = [item for item in sorted(model.items()) if item[0] >= inode_key(probe)][:limit]
    assert bench.all(low=probe, limit=limit) == expected


def test_an_update_rewrites_one_path_and_leaves_the_rest() -> None:
    bench = Bench()
    bench.update({inode_key(number): b"x" * 50 for number in range(100_000)})
    assert len(bench.live) > 300
    rewrite = bench.update({inode_key(50_000): b"y"})
    assert len(rewrite.written) == len(rewrite.replaced) == 3, "a leaf, what is above it, the root"


def test_appending_leaves_full_nodes() -> None:
    bench = Bench()
    for start in range(0, 20_000, 100):
        bench.update({inode_key(start + number): b"x" * 50 for number in range(100)})
    packed = 20_000 * (50 + 22)
    leaves = [run(bench.nodes.load(place)) for place in bench.live]
    leaves = [node for node in leaves if node.level == 0]
    assert len(leaves) <= packed / NODE_SIZE * 1.15 + 2


def test_a_tree_whose_items_are_removed_shrinks_with_them() -> None:
    bench = Bench()
    bench.update({inode_key(number): b"x" * 50 for number in range(20_000)})
    before = len(bench.live)
    for number in range(20_000):
        if number % 100 == 0:
            bench.update({inode_key(n): None for n in range(number, number + 99)})
    assert len(bench.all()) == 200
    assert len(bench.live) < before / 20
    bench.update({inode_key(number): None for number in range(20_000)})
    assert bench.root == Pointer()
    assert not bench.live


def test_what_is_kept_lies_elsewhere_afterwards() -> None:
    bench = Bench()
    bench.update({inode_key(number): b"x" * 50 for number in range(1000)})
    before, items = bench.live, bench.all()
    bench.update({inode_key(number): Keep.KEEP for number in range(0, 1000, 10)})
    assert bench.all() == items
    assert not bench.live & before


@pytest.mark.parametrize("cut", [1, 4, 8, 100])
def test_a_cut_node_is_refused(cut: int) -> None:
    packed = TreeNode.pack(0, [(inode_key(number), b"value") for number in range(20)])
    with pytest.raises(FormatError):
        TreeNode(packed[:-cut])


def test_a_node_that_is_not_what_was_written_is_an_error() -> None:
    bench = Bench(cache_size=0)
    bench.update({inode_key(number): b"x" * 50 for number in range(1000)})
    place = next(iter(bench.live - {bench.root}))
    bench.device.write(place.address, [memoryview(bytearray(BLOCK))])
    with pytest.raises(OSError, match="Input/output error"):
        bench.all()
    with pytest.raises(FormatError):
        metadata.read(bench.device, place)

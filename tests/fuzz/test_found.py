"""What fuzzing found, each kind by itself."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import typer

from kvfs.engine import metadata
from kvfs.engine.check import check
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    EXTENT_SIZE_MAX,
    METADATA_SIZE_MAX,
    SUPERBLOCK_ADDRESSES,
    Counts,
    Extent,
    FormatError,
    FrameHeader,
    KvmapLayout,
    Pointer,
    Position,
    Superblock,
    TreeNode,
    counts_key,
    dentry_key,
    extent_key,
    inode_key,
    log_key,
    map_key,
    references_key,
    unit_key,
    xattr_key,
)
from kvfs.engine.io import run
from kvfs.engine.superblocks import read_superblocks
from kvfs.mount.protocol import Opcode
from mount_tools import stat
from mount_tools.common import parse_size
from tests.engine.kit import Bench, failure_of
from tests.fuzz.filesystem import Asked, request
from tests.fuzz.guard import memory_bounded, time_bounded
from tests.fuzz.rings import MIB, Forger, base
from tests.fuzz.targets import error_of
from tests.support.devices import MemoryDevice


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvfs-fuzz-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


# -- lengths and places


def test_a_pointer_does_not_ask_for_what_no_record_is() -> None:
    device = MemoryDevice(bytearray(DATA_START + MIB))
    for stored, size in ((METADATA_SIZE_MAX + 1, 10), (10, 2**32 - 1)):
        with memory_bounded(), pytest.raises(FormatError, match="no record"):
            metadata.read(device, Pointer.unpack(Pointer(DATA_START, stored, size).pack()))
    with pytest.raises(FormatError, match="no record"):
        Pointer.unpack(Pointer(DATA_START + 1, 10, 10).pack())


@pytest.mark.parametrize(
    "changes",
    [{"size": EXTENT_SIZE_MAX + 1}, {"stored": 2**32 - 1}, {"size": 0}, {"stored": 0},
     {"address": DATA_START + 7}],
)  # fmt: skip
def test_an_extent_that_cannot_be_is_none(changes: dict[str, int]) -> None:
    extent = Extent(5, DATA_START, 100, 100, 0, 1, 77)
    assert Extent.unpack(5, extent.pack()) == extent
    with pytest.raises(FormatError, match="cannot be"):
        Extent.unpack(5, dataclasses.replace(extent, **changes).pack())


def test_an_extent_beyond_the_ring_is_eio(directory: Path) -> None:
    bench = Bench(directory)
    ino = bench.make(b"f")
    bench.write(ino, b"x" * 100)
    run(bench.store.sync())
    (extent,) = run(bench.store.extents(ino, 0, 100))
    for address in (0, 1 << 40):
        lost = dataclasses.replace(extent, address=address)
        store = bench.open_image(bench.device.image)
        store._writer.index.apply([(extent_key(extent.extent_id), lost.pack())])
        assert failure_of(store.read(ino, 0, 100)) == errno.EIO


def test_a_node_without_children_is_none() -> None:
    with pytest.raises(FormatError, match="empty"):
        TreeNode(TreeNode.pack(1, []))
    assert TreeNode(TreeNode.pack(0, [])).items() == []


def test_a_layout_has_a_table() -> None:
    with pytest.raises(FormatError, match="no tables"):
        KvmapLayout.unpack(KvmapLayout(5, ()).pack())


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_size": 0}, {"segment_size": MIB + BLOCK}, {"segment_size": 2**31},
        {"segment_count": 0}, {"segment_count": 2**32 - 1}, {"device_size": 0},
        {"device_size": DATA_START + 11 * MIB}, {"id_floor": 2**64 - 1},
        {"replay": Position(12, 0, 1, 1, 0)}, {"replay": Position(0, 0, 12, 1, 0)},
        {"replay": Position(0, 2 * MIB, 1, 1, 0)}, {"replay": Position(0, 100, 1, 1, 0)},
    ],
)  # fmt: skip
def test_a_superblock_of_a_ring_that_cannot_be_is_none(changes: dict[str, object]) -> None:
    image = bytearray(base())
    for number, address in enumerate(SUPERBLOCK_ADDRESSES):
        superblock = Superblock.unpack(image[address : address + BLOCK])
        wrong = dataclasses.replace(superblock, **changes)  # type: ignore[arg-type]
        image[address : address + BLOCK] = wrong.pack()
        if number == 0:
            assert read_superblocks(MemoryDevice(image), "ring").one_is_lost
    with memory_bounded(), pytest.raises(DeviceError, match="kvfs mkfs ring --force"):
        read_superblocks(MemoryDevice(image), "ring")


def test_counts_that_no_inode_number_has_room_for_are_none() -> None:
    with pytest.raises(FormatError, match="more directories"):
        Counts.unpack(Counts(1, 2**60).pack())


# -- items that are not what their keys say

ITEMS: dict[str, tuple[Callable[[int, int], bytes], Callable[[Bench, int], object]]] = {
    "inode": (lambda ino, _: inode_key(ino), lambda bench, ino: bench.store.node(ino)),
    "map": (lambda ino, _: map_key(ino, 0), lambda bench, ino: bench.store.read(ino, 0, 9)),
    "extent": (lambda _, extent: extent_key(extent), lambda b, ino: b.store.read(ino, 0, 9)),
    "references": (
        lambda _, extent: references_key(extent), lambda bench, ino: bench.store.read(ino, 0, 9),
    ),
    "dentry": (
        lambda ino, _: dentry_key(1, 7 << 8), lambda bench, _: bench.store.list_directory(1, 0, 9),
    ),
    "xattr": (lambda ino, _: xattr_key(ino, 7 << 8), lambda b, ino: b.store.xattr_names(ino)),
    "unit": (lambda ino, _: unit_key(ino), lambda bench, ino: bench.store.units.unit(ino)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ITEMS)
def test_an_item_of_a_wrong_length_is_eio(directory: Path, kind: str) -> None:
    bench = Bench(directory)
    ino = bench.make(b"f")
    bench.write(ino, b"x" * 100)
    run(bench.store.sync())
    (extent,) = run(bench.store.extents(ino, 0, 100))
    key, use = ITEMS[kind]
    store = bench.open_image(bench.device.image)
    store._writer.index.apply([(key(ino, extent.extent_id), b"\x7fx")])
    other = dataclasses.replace(bench)
    other.store = store
    assert failure_of(use(other, ino)) == errno.EIO  # type: ignore[arg-type]


def test_a_line_of_the_log_that_is_none_is_passed_over(directory: Path) -> None:
    bench = Bench(directory)
    good = b'{"time_ns": 1, "path": "p", "uid": 0, "why": "w", "stored": 1, "used_ns": 1}'
    lines = [b"\xff", b"[" * 100_000, b"{}", b"7", good.replace(b'"p"', b"5"), good]
    bench.store._writer.index.apply(
        [(log_key(number), line) for number, line in enumerate(lines, 1)]
    )
    assert [entry["path"] for entry in run(bench.store.reclaimer.entries())] == ["p"]


def test_data_of_nobody_in_no_place_is_mended() -> None:
    forger = Forger(Random(0))
    forger.append([(map_key(123_456, 0), b"not a slice")])
    assert check(forger.device, "ring", repair=True).findings
    assert check(forger.device, "ring").findings == []


def test_ids_that_are_never_reached_are_mended() -> None:
    forger = Forger(Random(0))
    inode = next(value for key, value in forger.items() if key == inode_key(1))
    last = (1 << 43) - 1
    forger.append([(inode_key(last), inode), (counts_key(), b"\xff" * 16)])
    assert check(forger.device, "ring", repair=True).findings
    assert check(forger.device, "ring").findings == []


def test_a_frame_that_claims_to_come_very_late_does_not_keep_a_check_busy() -> None:
    forger = Forger(Random(0))
    image, start = forger.image, forger.ring.position
    segment = next(
        n for n, live in enumerate(forger.ring.liveness.live_blocks)
        if not live and n not in (start.segment, start.next_segment)
    )  # fmt: skip
    forger.ring.position = dataclasses.replace(start, segment=segment, offset=0, sequence=2**60)
    forger.ring.flushed = 2**60 - 1
    forger.append([])
    for superblock in list(forger._slots()):  # not unmounted, or nobody looks
        torn = dataclasses.replace(superblock, flags=superblock.flags & 0)
        image[torn.address : torn.address + BLOCK] = torn.pack()
    assert any(
        image[at : at + 8] == FrameHeader.MAGIC for at in [forger.ring.geometry.address(segment)]
    )
    with time_bounded(60):
        check(forger.device, "ring", repair=True)


# -- requests and settings


def test_a_request_that_wants_no_answer_gets_none_also_when_it_is_cut(directory: Path) -> None:
    asked = Asked(directory)
    for opcode in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT):
        assert asked.ask(request(opcode, 1, b"")) is None
    answer = asked.ask(request(Opcode.GETATTR, 1, bytes(16)))
    assert answer is not None and not error_of(answer)


def test_a_number_of_thousands_of_digits_is_refused(directory: Path) -> None:
    asked = Asked(directory)
    session = run(asked.store.lookup(1, b"session")).inode.ino
    for setting in (b"device_id", b"ttl"):
        value = b"9" * 5000
        body = struct.pack("=II", len(value), 0) + b"user.kvfs." + setting + b"\0" + value
        answer = asked.ask(request(Opcode.SETXATTR, session, body))
        assert answer is not None and error_of(answer) == errno.EINVAL
    layer = run(asked.store.lookup(session, b"layer.none")).inode.ino
    body = struct.pack("=II", 4096, 0) + b"user.kvfs.extents." + b"9" * 200 + b"\0"
    answer = asked.ask(request(Opcode.GETXATTR, layer, body))
    assert answer is not None and error_of(answer) == errno.ENODATA


@pytest.mark.parametrize("size", ["9" * 400, "1e999", "9999999999P"])
def test_a_size_beyond_all_files_is_none(size: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(size)


@pytest.mark.parametrize("dtype", ["f8,f8", ",", "&8,f", "O", "\udcfe", "(9,9)f8", "V99999999"])
def test_an_element_type_of_nobodys_is_none(dtype: str) -> None:
    assert stat._stored_type(dtype) is None


def test_a_shape_does_not_ask_for_more_than_a_row(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.write_bytes(os.urandom(64))
    shape = stat._parse_shape("1000000,1000000,1000000")
    with memory_bounded():
        assert stat._first_values(layer, "float64", shape) == {}

"""Every stored structure comes back as it was, and bytes that are none are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine import ops
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    EXTENT_SIZE_MAX,
    FORMAT_VERSION,
    KVMAP_ENTRY_SIZE,
    KVMAP_LAYOUT_AT,
    KVMAP_TABLES_MAX,
    METADATA_SIZE_MAX,
    NAME_COLLISIONS_MAX,
    SEALED_KEYS_SIZE,
    SUPERBLOCK_ADDRESSES,
    Cipher,
    Dentry,
    Extent,
    Feature,
    FormatError,
    FrameFlag,
    FrameHeader,
    Inode,
    Item,
    KvmapEntry,
    KvmapHeader,
    KvmapLayout,
    OplogChunkHeader,
    Pointer,
    Position,
    RecordHeader,
    Slice,
    Superblock,
    SuperblockFlag,
    UnknownFormatError,
    Xattr,
    checksum,
    dentry_key,
    key_owner,
    key_slot,
    map_key,
    name_slot,
    pack_items,
    round_up,
    unpack_items,
)
from tests.support.images import from_a_newer_release, sealed

U8, U32, U64 = st.integers(0, 2**8 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.binary(min_size=1, max_size=255)
BYTES_16 = st.binary(min_size=16, max_size=16)

ADDRESSES = st.integers(0, 2**52 - 1).map(lambda block: block * BLOCK)
SIZES = st.integers(0, METADATA_SIZE_MAX)
POINTERS = st.builds(Pointer, ADDRESSES, SIZES, SIZES, U8, U64)
POSITIONS = st.builds(Position, U32, U64, U32, U64, U64)
SUPERBLOCKS = st.builds(
    Superblock,
    uuid=BYTES_16,
    generation=U64,
    epoch=U64,
    epoch_start=U64,
    created_ns=U64,
    device_size=U64,
    segment_size=U32,
    segment_count=U32,
    id_floor=U64,
    hash_key=BYTES_16,
    oplog_token=BYTES_16,
    oplog_home=st.binary(max_size=512).map(lambda home: home.rstrip(b"\0")),
    flags=st.sampled_from([SuperblockFlag(0), SuperblockFlag.CLEAN]),
    operation=U64,
    checkpoint=POINTERS,
    replay=POSITIONS,
    features=st.sampled_from([Feature.NONE, Feature.ENCRYPTED]),
    cipher=st.sampled_from(list(Cipher)),
    key_tables=st.tuples(POINTERS, POINTERS),
    sealed_keys=st.binary(min_size=SEALED_KEYS_SIZE, max_size=SEALED_KEYS_SIZE),
)
FRAME_HEADERS = st.builds(
    FrameHeader,
    uuid=BYTES_16,
    epoch=U64,
    sequence=U64,
    previous_checksum=U64,
    flushed=U64,
    operation=U64,
    address=U64,
    next_segment=U32,
    flags=st.sampled_from([FrameFlag(0), FrameFlag.CONTINUES]),
    record_count=U32,
    item_bytes=U32,
    head_length=U32,
    frame_length=U32,
    table_checksum=U64,
)
RECORDS = st.builds(
    RecordHeader,
    kind=U8,
    codec=U8,
    item_size=U8,
    session_id=U64,
    object_id=U64,
    extent_id=U64,
    offset=U64,
    size=U32,
    stored=U32,
    payload=U32,
    checksum=U64,
    cipher=U8,
    key_id=U64,
)
INODES = st.builds(
    Inode, U64, U32, U32, U32, U32, U64, U64, U64, I64, I64, I64, I64, U64, st.binary(max_size=255)
)
EXTENT_SIZES = st.integers(1, EXTENT_SIZE_MAX)
EXTENTS = st.builds(Extent, U64, ADDRESSES, EXTENT_SIZES, EXTENT_SIZES, U8, U8, U64, U8, U64)
SLICES = st.builds(Slice, U64, U32, U64, U32)
CHUNK_HEADERS = st.builds(OplogChunkHeader, BYTES_16, BYTES_16, U64)
ITEMS = st.lists(
    st.tuples(st.binary(min_size=18, max_size=18), st.none() | st.binary(max_size=60)), max_size=20
)
OPERATIONS = st.one_of(
    st.builds(ops.Create, U64, U64, NAMES, U64, U32, U32, U32, U64, st.binary(max_size=4096)),
    st.builds(ops.Link, U64, U64, U64, NAMES),
    st.builds(ops.Unlink, U64, U64, NAMES),
    st.builds(ops.Rmdir, U64, U64, NAMES),
    st.builds(ops.Rename, U64, U64, NAMES, U64, NAMES, st.booleans(), st.booleans()),
    st.builds(ops.SetAttributes, U64, U64, *[st.none() | U32] * 3, st.none() | U64, I64, I64),
    st.builds(ops.Write, U64, U64, U64, U32),
    st.builds(ops.SetXattr, U64, U64, NAMES, st.binary(max_size=1000)),
    st.builds(ops.RemoveXattr, U64, U64, NAMES),
    st.builds(ops.Drop, U64, st.lists(U64)),
)


@given(SUPERBLOCKS)
def test_a_superblock_comes_back(superblock: Superblock) -> None:
    packed = superblock.pack()
    assert len(packed) == BLOCK
    assert Superblock.unpack(packed) == superblock


@given(FRAME_HEADERS)
def test_a_frame_header_comes_back(header: FrameHeader) -> None:
    assert FrameHeader.unpack(header.pack() + b"what follows") == header


@given(RECORDS, st.integers(0, 9))
def test_a_record_header_comes_back(record: RecordHeader, before: int) -> None:
    assert RecordHeader.unpack_from(bytes(before) + record.pack(), before) == record


@given(POINTERS, POSITIONS, EXTENTS, SLICES, INODES, CHUNK_HEADERS)
def test_small_structures_come_back(
    pointer: Pointer,
    position: Position,
    extent: Extent,
    part: Slice,
    inode: Inode,
    header: OplogChunkHeader,
) -> None:
    assert Pointer.unpack(pointer.pack()) == pointer
    assert Position.unpack(position.pack()) == position
    assert Extent.unpack(extent.extent_id, extent.pack()) == extent
    assert Slice.unpack(part.offset, part.pack()) == part
    assert Inode.unpack(inode.ino, inode.pack()) == inode
    assert OplogChunkHeader.unpack(header.pack()) == header


@given(
    st.builds(KvmapHeader, BYTES_16, BYTES_16, U64, U64, U64),
    st.builds(KvmapLayout, U64, st.lists(U64, min_size=1, max_size=KVMAP_TABLES_MAX).map(tuple)),
    st.builds(KvmapEntry, U64, U64, U64, U64, U64, U64, U64),
)
def test_what_a_warm_file_holds_comes_back(
    header: KvmapHeader, layout: KvmapLayout, entry: KvmapEntry
) -> None:
    assert len(header.pack()) <= KVMAP_LAYOUT_AT
    assert KVMAP_LAYOUT_AT + len(layout.pack()) <= BLOCK
    assert len(entry.pack()) == KVMAP_ENTRY_SIZE
    assert KvmapHeader.unpack(header.pack() + b"what follows") == header
    assert KvmapLayout.unpack(layout.pack() + b"what follows") == layout
    assert KvmapEntry.unpack(entry.pack()) == entry


@given(U64, U32, NAMES, st.binary(max_size=300))
def test_names_of_any_bytes_come_back(ino: int, kind: int, name: bytes, value: bytes) -> None:
    assert Dentry.unpack(Dentry(ino, kind, name).pack()) == Dentry(ino, kind, name)
    assert Xattr.unpack(Xattr(name, value).pack()) == Xattr(name, value)


@given(ITEMS)
def test_items_come_back(items: list[Item]) -> None:
    assert unpack_items(pack_items(items)) == items


@given(OPERATIONS)
def test_operations_come_back(operation: ops.Operation) -> None:
    assert ops.unpack(ops.pack(operation)) == operation


def refused(unpack: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        unpack(data)
    except FormatError:
        return True
    return False


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


EXAMPLE_SUPERBLOCK = Superblock(
    uuid=b"u" * 16, generation=5, epoch=3, epoch_start=70, created_ns=1, device_size=2**24,
    segment_size=2**20, segment_count=15, id_floor=2**33, hash_key=b"h" * 16,
    oplog_token=b"t" * 16, oplog_home=b"h", flags=SuperblockFlag(0), operation=9,
    checkpoint=Pointer(2**20, 100), replay=Position(1, 4096, 2, 77, 12345),
)  # fmt: skip
EXAMPLE_FRAME = FrameHeader(
    b"u" * 16, 3, 77, 5, 76, 9, 2**20, 2, FrameFlag.CONTINUES, 1, 100, 4096, 8192, 99
)


def test_each_flipped_bit_of_a_superblock_is_refused() -> None:
    packed = EXAMPLE_SUPERBLOCK.pack()
    passed = [b for b in range(8 * BLOCK) if not refused(Superblock.unpack, flipped(packed, b))]
    assert passed == []


def test_each_flipped_bit_of_a_frame_header_is_refused() -> None:
    packed = EXAMPLE_FRAME.pack()
    bits = range(8 * FrameHeader.SIZE)
    passed = [b for b in bits if not refused(FrameHeader.unpack, flipped(packed, b))]
    assert passed == []


@pytest.mark.parametrize(
    "structure",
    [
        OplogChunkHeader(b"u" * 16, b"t" * 16, 3),
        KvmapHeader(b"u" * 16, b"t" * 16, 3, 1000, 1),
        KvmapLayout(700, (4096, 1 << 20)),
        KvmapEntry(1000, 17, 0, 65536, 131072, 5, 6),
    ],
    ids=lambda structure: type(structure).__name__,
)
def test_each_flipped_bit_of_what_lies_in_tmpfs_is_refused(structure: Any) -> None:
    packed = structure.pack()
    bits = range(0, 8 * len(packed), 1 if len(packed) < 200 else 37)
    passed = [b for b in bits if not refused(structure.unpack, flipped(packed, b))]
    assert passed == []


@settings(max_examples=300)
@given(st.binary(max_size=400), st.sampled_from([b"", Superblock.MAGIC, FrameHeader.MAGIC,
                                                OplogChunkHeader.MAGIC]))  # fmt: skip
def test_arbitrary_bytes_are_a_format_error_or_a_structure(data: bytes, magic: bytes) -> None:
    unpackers: list[Callable[[bytes], Any]] = [
        Superblock.unpack,
        FrameHeader.unpack,
        OplogChunkHeader.unpack,
        KvmapHeader.unpack,
        KvmapLayout.unpack,
        KvmapEntry.unpack,
        Pointer.unpack,
        Position.unpack,
        Dentry.unpack,
        Xattr.unpack,
        unpack_items,
        lambda value: RecordHeader.unpack_from(value, 0),
        lambda value: RecordHeader.unpack_from(value, 50),
        lambda value: Inode.unpack(1, value),
        lambda value: Extent.unpack(1, value),
        lambda value: Slice.unpack(1, value),
    ]
    for unpack in unpackers:
        refused(unpack, magic + data)


@pytest.mark.parametrize(
    "unpack",
    [
        Superblock.unpack,
        FrameHeader.unpack,
        OplogChunkHeader.unpack,
        KvmapHeader.unpack,
        KvmapLayout.unpack,
        KvmapEntry.unpack,
    ],
)
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_never_what_has_a_checksum(
    unpack: Callable[[bytes], Any], data: bytes
) -> None:
    assert refused(unpack, data)


@pytest.mark.parametrize("cut", [1, 8, 17, 18, 22])
def test_cut_items_are_refused(cut: int) -> None:
    packed = pack_items([(b"k" * 18, b"a value of some length")])
    assert refused(unpack_items, packed[:-cut])


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_no_operation_or_one(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(ops.unpack(data), ops.Operation)


@given(OPERATIONS, st.data())
def test_a_cut_operation_is_refused(operation: ops.Operation, data: st.DataObject) -> None:
    packed = ops.pack(operation)
    with pytest.raises(ValueError):  # noqa: PT011 the subclasses of msgpack say what
        ops.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@pytest.mark.parametrize(
    ("version", "advice"),
    [(FORMAT_VERSION + 1, "use a newer kvfs"), (FORMAT_VERSION - 1, "use the kvfs that made it")],
)
def test_another_version_is_refused_by_number_with_what_to_use(version: int, advice: str) -> None:
    packed = EXAMPLE_SUPERBLOCK.pack()
    another = sealed(packed[:8] + version.to_bytes(4, "little") + packed[12:])
    with pytest.raises(UnknownFormatError, match=f"format version {version} is unknown .*{advice}"):
        Superblock.unpack(another)


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ({5: "lossy", 63: "shared_prefixes"}, "lossy (bit 5), shared_prefixes (bit 63)"),
        ({5: ""}, "bit 5"),
        ({5: "", 6: "named"}, "bit 5, named (bit 6)"),
        ({5: "two,names"}, "bit 5"),
        ({5: "\x1b[2J"}, "bit 5"),
        ({40: "n" * 512}, f"{'n' * 512} (bit 40)"),
        (dict.fromkeys(range(8, 64), ""), ", ".join(f"bit {bit}" for bit in range(8, 64))),
    ],
)
def test_unknown_features_are_refused_by_the_names_that_the_ring_gives_them(
    features: dict[int, str], told: str
) -> None:
    newer = from_a_newer_release(EXAMPLE_SUPERBLOCK, features)
    with pytest.raises(UnknownFormatError) as refusal:
        Superblock.unpack(newer)
    assert f"unknown to this release: {told}; use a newer kvfs" in str(refusal.value)


def test_superblocks_take_turns_in_the_slots() -> None:
    first = EXAMPLE_SUPERBLOCK
    second = first.next(operation=10)
    assert second.generation == first.generation + 1
    assert {first.address, second.address} == set(SUPERBLOCK_ADDRESSES)
    assert second.next().address == first.address


@given(U64, st.lists(st.integers(0, 2**62), min_size=2, max_size=10))
def test_keys_sort_as_the_numbers_in_them(ino: int, offsets: list[int]) -> None:
    keys = sorted(map_key(ino, offset) for offset in offsets)
    assert [key_slot(key) for key in keys] == sorted(offsets)
    assert {key_owner(key) for key in keys} == {ino}


@given(BYTES_16, NAMES)
def test_slots_of_names_are_positive_cookies_above_dot_and_dot_dot(key: bytes, name: bytes) -> None:
    first = name_slot(key, name)
    assert 2 < first <= 2**63 - NAME_COLLISIONS_MAX
    assert first % NAME_COLLISIONS_MAX == 0
    assert key_slot(dentry_key(1, first + NAME_COLLISIONS_MAX - 1)) < 2**63


@given(st.integers(0, 2**40))
def test_rounding_up(size: int) -> None:
    rounded = round_up(size)
    assert rounded % BLOCK == 0
    assert 0 <= rounded - size < BLOCK


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_a_checksum_of_parts_is_that_of_the_whole(parts: list[bytes]) -> None:
    assert checksum(*parts) == checksum(b"".join(parts))


def test_the_superblock_lies_as_the_documentation_says() -> None:
    """Fields at the bytes that docs/format.md gives: pack and unpack may be wrong together."""
    block = Superblock(
        uuid=b"u" * 16, generation=2, epoch=3, epoch_start=4, created_ns=5, device_size=6,
        segment_size=7, segment_count=8, id_floor=9, hash_key=b"h" * 16, oplog_token=b"t" * 16,
        oplog_home=b"home", flags=SuperblockFlag.CLEAN, operation=11,
        checkpoint=Pointer(3 * BLOCK, 13, 14, 1, 15), replay=Position(16, 17, 18, 19, 20),
    ).pack()  # fmt: skip

    def number(at: int, size: int) -> int:
        return int.from_bytes(block[at : at + size], "little")

    assert block[:8] == b"KVFSRING"
    assert (number(8, 4), number(12, 4), number(16, 8)) == (FORMAT_VERSION, BLOCK, 0)
    assert block[24:40] == b"u" * 16
    assert [number(40 + 8 * n, 8) for n in range(5)] == [2, 3, 4, 5, 6]
    assert (number(80, 4), number(84, 4)) == (7, 8)
    assert (number(88, 8), number(96, 8)) == (DATA_START, 9)
    assert (block[104:120], block[120:136]) == (b"h" * 16, b"t" * 16)
    assert block[136:648].rstrip(b"\0") == b"home"
    assert (number(648, 4), number(656, 8)) == (1, 11)
    assert (number(664, 8), number(672, 4), number(676, 4), number(680, 1)) == (
        3 * BLOCK,
        13,
        14,
        1,
    )
    assert number(684, 8) == 15
    assert (number(692, 4), number(696, 4), number(700, 8)) == (16, 18, 17)
    assert (number(708, 8), number(716, 8)) == (19, 20)
    assert len(block) == BLOCK

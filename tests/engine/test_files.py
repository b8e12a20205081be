"""File data and attributes: write, read, truncate, holes, xattrs, codecs, damage."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine import buffers
from kvfs.engine.codec import Codec
from kvfs.engine.format import BLOCK, EXTENT_SIZE_MAX, EXTENT_SIZE_MIN, Extent
from kvfs.engine.io import run
from kvfs.engine.nodes import FILE_SIZE_MAX
from kvfs.engine.state import XATTR_VALUE_MAX
from kvfs.engine.store import WRITE_SIZE_MAX
from tests.engine.audit import audit
from tests.engine.kit import DIRECTORY, MIB, OPTIONS, Bench, failure_of, flip, new_device, noise
from tests.support.devices import RecordingDevice


def size_of(bench: Bench, ino: int) -> int:
    return run(bench.store.node(ino)).inode.size


def extents(bench: Bench, ino: int) -> list[Extent]:
    return run(bench.store.extents(ino, 0, size_of(bench, ino)))


# -- bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, EXTENT_SIZE_MIN + 1, 3 * MIB + 5])
def test_what_is_written_is_read(staged: Bench, size: int) -> None:
    ino = staged.make(b"file")
    staged.write(ino, noise(size))
    staged.settle()
    assert size_of(staged, ino) == size
    assert staged.read(ino) == noise(size)
    assert staged.read(ino, size - 1, 100) == noise(size)[-1:]
    assert staged.read(ino, size, 100) == b""
    assert staged.read(ino, size + 100, 100) == b""
    assert staged.read(ino, 0, 0) == b""


def test_overwrites_at_any_offset(staged: Bench) -> None:
    ino = staged.make(b"file")
    expected = bytearray(noise(400_000))
    staged.write(ino, bytes(expected))
    staged.settle()
    for number, (offset, size) in enumerate([(0, 1), (131_000, 200), (1, 399_998), (5000, 4096)]):
        expected[offset : offset + size] = noise(size, number)
        staged.write(ino, noise(size, number), offset)
        staged.settle()
        assert staged.read(ino) == expected
    run(staged.store.sync())
    audit(staged.store)


def test_bytes_between_writes_are_zeros(staged: Bench) -> None:
    ino = staged.make(b"file")
    staged.write(ino, b"end", 10 * MIB)
    staged.write(ino, b"middle", 5 * MIB)
    staged.settle()
    assert size_of(staged, ino) == 10 * MIB + 3
    expected = bytearray(10 * MIB) + b"end"
    expected[5 * MIB : 5 * MIB + 6] = b"middle"
    assert staged.read(ino) == expected
    run(staged.store.sync())
    assert run(staged.store.node(ino)).taken == 2 * BLOCK


def test_a_truncated_file_grows_with_zeros(staged: Bench) -> None:
    ino = staged.make(b"file")
    staged.write(ino, noise(300_000))
    staged.settle()
    run(staged.store.set_attributes(ino, size=1000))
    run(staged.store.set_attributes(ino, size=200_000))
    staged.settle()
    assert staged.read(ino) == noise(300_000)[:1000] + bytes(199_000)
    staged.write(ino, b"x", 250_000)
    assert staged.read(ino, 200_000) [:50_001] == bytes(50_000) + b"x"  # fmt: skip


def test_a_file_truncated_to_nothing_takes_nothing(staged: Bench) -> None:
    ino = staged.make(b"file")
    staged.write(ino, noise(300_000))
    staged.settle()
    run(staged.store.set_attributes(ino, size=0))
    staged.settle()
    assert staged.read(ino) == b""
    run(staged.store.sync())
    assert run(staged.store.node(ino)).taken == 0
    assert not audit(staged.store).extents


@pytest.mark.parametrize("offset", [0, 5, WRITE_SIZE_MAX - 1])
def test_a_write_of_several_mib_is_whole(bench: Bench, offset: int) -> None:
    ino = bench.make(b"file")
    bench.write(ino, noise(3 * MIB + 7), offset)
    assert bench.read(ino) == bytes(offset) + noise(3 * MIB + 7)


def test_an_empty_write_changes_nothing(bench: Bench) -> None:
    ino = bench.make(b"file")
    before = run(bench.store.node(ino)).inode.mtime_ns
    bench.write(ino, b"", 100)
    assert size_of(bench, ino) == 0
    assert run(bench.store.node(ino)).inode.mtime_ns == before


def test_files_that_would_be_too_large(bench: Bench) -> None:
    ino = bench.make(b"file")
    assert failure_of(bench.store.write(ino, FILE_SIZE_MAX, b"x")) == errno.EFBIG
    assert failure_of(bench.store.set_attributes(ino, size=FILE_SIZE_MAX + 1)) == errno.EFBIG
    run(bench.store.set_attributes(ino, size=FILE_SIZE_MAX))
    assert bench.read(ino, FILE_SIZE_MAX - 10, 100) == bytes(10)


def test_only_files_have_data(bench: Bench) -> None:
    directory = bench.make(b"dir", mode=DIRECTORY)
    assert failure_of(bench.store.write(directory, 0, b"x")) == errno.EISDIR
    assert failure_of(bench.store.set_attributes(directory, size=0)) == errno.EISDIR
    link = bench.make(b"link", mode=0o120777, target=b"target")
    assert failure_of(bench.store.write(link, 0, b"x")) == errno.EINVAL
    assert failure_of(bench.store.set_attributes(link, size=0)) == errno.EINVAL
    assert failure_of(bench.store.write(99_999, 0, b"x")) == errno.ENOENT


WRITES = st.lists(
    st.tuples(st.integers(0, 500_000), st.integers(1, 200_000), st.booleans()), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(writes=WRITES, reads=st.lists(st.tuples(st.integers(0, 700_000), st.integers(0, 300_000)),
                                     max_size=5))  # fmt: skip
def test_any_writes_read_back_as_from_an_array(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[int, int, bool]],
    reads: list[tuple[int, int]],
) -> None:
    bench = Bench(tmp_path_factory.mktemp("log"))
    ino = bench.make(b"file")
    expected = bytearray()
    for number, (offset, size, sync) in enumerate(writes):
        data = noise(size, number)
        expected.extend(bytes(max(0, offset + size - len(expected))))
        expected[offset : offset + size] = data
        bench.write(ino, data, offset)
        if sync:
            run(bench.store.sync())
    for offset, size in reads:
        assert bench.read(ino, offset, size) == expected[offset : offset + size]
    assert bench.read(ino) == expected


# -- attributes ------------------------------------------------------------------------


def test_attributes_are_set_and_kept(staged: Bench) -> None:
    ino = staged.make(b"file")
    run(staged.store.set_attributes(ino, mode=0o4711, uid=7, gid=8, atime_ns=-5, mtime_ns=10**18))
    staged.settle()
    inode = run(staged.store.node(ino)).inode
    assert inode.mode == 0o104711
    assert (inode.uid, inode.gid, inode.atime_ns, inode.mtime_ns) == (7, 8, -5, 10**18)


def test_what_is_not_named_is_left_as_it_is(staged: Bench) -> None:
    ino = staged.make(b"file")
    staged.write(ino, b"data")
    before = run(staged.store.node(ino)).inode
    expected = (before.mode, before.uid, before.gid, before.size, before.mtime_ns)
    run(staged.store.set_attributes(ino, atime_ns=99))
    staged.settle()
    after = run(staged.store.node(ino)).inode
    assert (after.mode, after.uid, after.gid, after.size, after.mtime_ns) == expected
    assert after.atime_ns == 99


# -- xattrs ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4000, XATTR_VALUE_MAX])
def test_xattrs_of_any_size(staged: Bench, size: int) -> None:
    ino = staged.make(b"file")
    run(staged.store.set_xattr(ino, b"user.name", noise(size)))
    run(staged.store.set_xattr(ino, b"n" * 255, b"\0"))
    staged.settle()
    assert run(staged.store.xattr(ino, b"user.name")) == noise(size)
    assert sorted(run(staged.store.xattr_names(ino))) == [b"n" * 255, b"user.name"]
    run(staged.store.set_xattr(ino, b"user.name", b"replaced"))
    run(staged.store.remove_xattr(ino, b"n" * 255))
    staged.settle()
    assert run(staged.store.xattr(ino, b"user.name")) == b"replaced"
    assert run(staged.store.xattr_names(ino)) == [b"user.name"]


def test_xattrs_that_cannot_be(bench: Bench) -> None:
    ino = bench.make(b"file")
    too_large = noise(XATTR_VALUE_MAX + 1)
    assert failure_of(bench.store.set_xattr(ino, b"user.x", too_large)) == errno.E2BIG
    assert failure_of(bench.store.set_xattr(ino, b"n" * 256, b"")) == errno.ERANGE
    assert failure_of(bench.store.remove_xattr(ino, b"user.none")) == errno.ENODATA
    assert failure_of(bench.store.set_xattr(99, b"user.x", b"")) == errno.ENOENT
    assert failure_of(bench.store.set_xattr(ino, b"user.kvfs.codec", b"gzip")) == errno.EINVAL
    assert run(bench.store.xattr(ino, b"user.x")) is None
    assert run(bench.store.xattr_names(ino)) == []


def test_xattrs_go_with_their_inode(bench: Bench) -> None:
    ino = bench.make(b"file")
    run(bench.store.set_xattr(ino, b"user.x", b"1"))
    run(bench.store.unlink(1, b"file"))
    run(bench.store.sync())
    assert not audit(bench.store).owners


# -- codecs ----------------------------------------------------------------------------


def bf16(count: int) -> bytes:
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD, Codec.PLANES])
def test_a_file_is_stored_by_the_codec_it_asks_for(staged: Bench, codec: Codec) -> None:
    ino = staged.make(b"file")
    run(staged.store.set_xattr(ino, b"user.kvfs.codec", codec.name.lower().encode()))
    run(staged.store.set_xattr(ino, b"user.kvfs.dtype", b"bfloat16"))
    data = bf16(300_000) if codec == Codec.PLANES else b"some text " * 60_000
    staged.write(ino, data)
    staged.settle()
    run(staged.store.sync())
    assert {extent.codec for extent in extents(staged, ino)} == {codec}
    assert staged.read(ino) == data
    assert (run(staged.store.node(ino)).taken < len(data)) == (codec != Codec.NONE)


def test_the_codec_is_inherited_from_the_nearest_directory(staged: Bench) -> None:
    outer = staged.make(b"outer", mode=DIRECTORY)
    inner = staged.make(b"inner", outer, DIRECTORY)
    files = [staged.make(b"file", parent) for parent in (1, outer, inner)]
    own = staged.make(b"own", inner)
    for ino, codec in [(1, b"none"), (outer, b"zstd"), (own, b"none")]:
        run(staged.store.set_xattr(ino, b"user.kvfs.codec", codec))
    staged.settle()

    def codecs() -> list[set[int]]:
        found = []
        for ino in (*files, own):
            staged.write(ino, b"some text " * 20_000)
            run(staged.store.sync())
            found.append({extent.codec for extent in extents(staged, ino)})
        return found

    assert codecs() == [{Codec.NONE}, {Codec.ZSTD}, {Codec.ZSTD}, {Codec.NONE}]
    run(staged.store.set_xattr(inner, b"user.kvfs.codec", b"none"))
    run(staged.store.remove_xattr(own, b"user.kvfs.codec"))
    run(staged.store.rename(outer, b"inner", 1, b"moved"))
    staged.settle()
    assert codecs() == [{Codec.NONE}, {Codec.ZSTD}, {Codec.NONE}, {Codec.NONE}]
    run(staged.store.remove_xattr(inner, b"user.kvfs.codec"))
    assert codecs() == [{Codec.NONE}, {Codec.ZSTD}, {Codec.NONE}, {Codec.NONE}]
    run(staged.store.rename(1, b"moved", outer, b"back"))
    assert codecs() == [{Codec.NONE}, {Codec.ZSTD}, {Codec.ZSTD}, {Codec.ZSTD}]


def test_incompressible_data_is_stored_as_it_is(bench: Bench) -> None:
    ino = bench.make(b"file")
    run(bench.store.set_xattr(ino, b"user.kvfs.codec", b"zstd"))
    bench.write(ino, noise(500_000))
    run(bench.store.sync())
    assert {extent.codec for extent in extents(bench, ino)} == {Codec.NONE}
    assert bench.read(ino) == noise(500_000)


@pytest.mark.parametrize("dtype", [b"bfloat16", b"float32", b"float64", b"\xff\xfe", b"complex"])
def test_any_dtype_can_be_read_back(staged: Bench, dtype: bytes) -> None:
    ino = staged.make(b"file")
    run(staged.store.set_xattr(ino, b"user.kvfs.dtype", dtype))
    run(staged.store.set_xattr(ino, b"user.kvfs.codec", b"planes"))
    staged.write(ino, bf16(100_001)[:-1], 3)
    staged.settle()
    assert staged.read(ino) == bytes(3) + bf16(100_001)[:-1]


# -- layout ----------------------------------------------------------------------------


def test_extents_are_joined_from_small_appends_and_aligned(bench: Bench) -> None:
    ino = bench.make(b"file")
    for number in range(100):
        bench.write(ino, noise(BLOCK, number), number * BLOCK)
    run(bench.store.sync())
    found = extents(bench, ino)
    assert [extent.size for extent in found] == [EXTENT_SIZE_MIN] * 3 + [4 * BLOCK]
    assert [extent.address for extent in found[1:]] == [extent.blocks_end for extent in found[:-1]]


@pytest.mark.plain
def test_long_files_have_long_extents(tmpfs: Path) -> None:
    bench = Bench(tmpfs, new_device(segments=12, segment_size=8 * MIB))
    ino = bench.make(b"file")
    bench.write(ino, noise(MIB) * 16)
    run(bench.store.sync())
    assert max(extent.size for extent in extents(bench, ino)) == MIB
    assert bench.read(ino) == noise(MIB) * 16


# -- damage ----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [b"none", b"zstd"])
def test_a_flipped_bit_in_an_extent_is_eio_and_the_rest_can_be_read(
    bench: Bench, codec: bytes
) -> None:
    good, bad = bench.make(b"good"), bench.make(b"bad")
    data = {good: b"good text " * 50_000, bad: b"bad text " * 50_000}
    for ino, content in data.items():
        run(bench.store.set_xattr(ino, b"user.kvfs.codec", codec))
        bench.write(ino, content)
    run(bench.store.close())
    bench.open()
    hit = extents(bench, bad)[1]
    for address in (hit.address, hit.address + hit.stored // 2, hit.address + hit.stored - 1):
        image = bytearray(bench.device.image)
        flip(image, address, 3)
        other = Bench(bench.directory / f"at {address}", RecordingDevice(image), boot="next")
        assert other.read(good) == data[good]
        assert failure_of(other.store.read(bad, 0, len(data[bad]))) == errno.EIO
        assert failure_of(other.store.read(bad, hit.size, 1)) == errno.EIO, "also a second time"
        assert other.read(bad, 0, hit.size) == data[bad][: hit.size]
        assert other.read(bad, 2 * hit.size) == data[bad][2 * hit.size :]
        assert other.store.reader.errors.checksum > 0
        other.write(bad, data[bad])
        assert other.read(bad) == data[bad], "what is written over it heals it"
        run(other.store.close())


def test_an_extent_that_was_lost_after_the_fact_is_eio(bench: Bench) -> None:
    """What lies at its place is another extent, whole in itself."""
    first, second = bench.make(b"first"), bench.make(b"second")
    bench.write(first, noise(2 * BLOCK, 1))
    bench.write(second, noise(2 * BLOCK, 2))
    run(bench.store.close())
    bench.open()
    (one,), (other,) = extents(bench, first), extents(bench, second)
    image = bench.device.image
    image[one.address : one.blocks_end] = image[other.address : other.blocks_end]
    assert failure_of(bench.store.read(first, 0, 100)) == errno.EIO
    assert bench.read(second) == noise(2 * BLOCK, 2)


def test_a_read_that_fails_harms_no_other_file(bench: Bench) -> None:
    """Buffers go back to the pool once, however the read ends."""
    inos = [bench.make(b"%d" % number) for number in range(4)]
    assert bench.store.reader.capacity >= 3 * MIB, "the good ones stay in the cache"
    for number, ino in enumerate(inos):
        bench.write(ino, noise(100_000, number))
    run(bench.store.close())
    bench.open()
    hit = extents(bench, inos[0])[0]

    def fail(kind: str, address: int, length: int) -> None:
        if kind == "read" and address <= hit.address < address + length:
            raise OSError(errno.EIO, "bad sector")

    bench.device.fail = fail
    for _ in range(3):
        assert failure_of(bench.store.read(inos[0], 0, 100)) == errno.EIO
    for _ in range(3):
        for number, ino in enumerate(inos[1:], 1):
            assert bench.read(ino) == noise(100_000, number)
    assert bench.store.reader.errors.device == 3
    bench.device.fail = lambda kind, address, length: None
    assert bench.read(inos[0]) == noise(100_000, 0), "a sector that can be read again"


# -- the cache of extents --------------------------------------------------------------


def test_what_was_read_whole_makes_room_for_what_is_read_next(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the cache has room: fresh memory would cost more than the read."""
    options = dataclasses.replace(OPTIONS, cache_size=64 * MIB)
    bench = Bench(tmpfs, new_device(segments=32), options=options)
    inos = [bench.make(b"%d" % number) for number in range(24)]
    for number, ino in enumerate(inos):
        bench.write(ino, noise(200_000, number))
    run(bench.store.close())
    bench.open()
    touched = []
    touch = buffers._touched
    monkeypatch.setattr(buffers, "_touched", lambda size: touched.append(size) or touch(size))
    for number, ino in enumerate(inos):
        assert bench.read(ino) == noise(200_000, number)
    assert 0 < sum(size == EXTENT_SIZE_MAX for size in touched) <= 6, "each is two buffers"


@pytest.mark.parametrize("codec", [b"none", b"zstd"])
def test_a_read_larger_than_the_cache_is_whole(bench: Bench, codec: bytes) -> None:
    ino = bench.make(b"file")
    run(bench.store.set_xattr(ino, b"user.kvfs.codec", codec))
    data = b"".join(noise(70_000, number) + bytes(70_000) for number in range(50))
    bench.write(ino, data)
    run(bench.store.close())
    bench.open()
    assert len(data) > bench.store.reader.capacity
    for _ in range(2):
        assert bench.read(ino) == data


def test_reads_in_any_order_through_a_small_cache(bench: Bench) -> None:
    ino = bench.make(b"file")
    for number in range(7):
        bench.write(ino, noise(MIB, number), number * MIB)
    run(bench.store.close())
    bench.open()
    for number in (0, 6, 1, 5, 0, 3, 2, 6, 4, 0):
        assert bench.read(ino, number * MIB + 100, 500_000) == noise(MIB, number)[100:500_100]


def test_neighbouring_extents_are_read_at_once(bench: Bench) -> None:
    ino = bench.make(b"file")
    bench.write(ino, noise(700_000))
    run(bench.store.close())
    bench.open()
    reads = []
    bench.device.fail = lambda kind, address, length: reads.append(kind)
    assert bench.read(ino) == noise(700_000)
    assert len(extents(bench, ino)) > 4
    assert reads.count("read") <= 2, "one for each segment it lies in"

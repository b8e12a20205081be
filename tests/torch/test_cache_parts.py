"""The adapter's parts without a filesystem of ours beneath them."""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfs.torch import mounts
from kvfs.torch.files import SessionFile
from kvfs.torch.layout import RowLayout
from kvfs.torch.offers import MAP_ATTRIBUTE, SessionOffer, covers
from kvfs.torch.ranges import Ranges, after, placed, runs, total, union, without
from kvfs.torch.slab import HostHeads, HostRows
from kvfs.torch.source import opened
from kvfs.torch.staging import staging
from kvfs.torch.transfer import HostMover

MOUNTINFO = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:33 / /mnt/kv rw,nosuid shared:5 - fuse.kvfs kvfs rw
41 22 0:34 / /mnt/k\040v rw - fuse.kvfs kvfs rw
42 22 0:35 / /mnt/over rw - ext4 /dev/vdb rw
43 22 0:36 / /mnt/over rw - fuse.kvfs kvfs rw
"""


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/", "ext4"),
        ("/mnt/kv", "fuse.kvfs"),
        ("/mnt/kv/a/b", "fuse.kvfs"),
        ("/mnt/kvx", "ext4"),
        ("/mnt/k v/a", "fuse.kvfs"),
        ("/mnt/over", "fuse.kvfs"),
    ],
)
def test_mount_of(path: str, fstype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(MOUNTINFO)
    monkeypatch.setattr(mounts, "_MOUNTINFO", table)
    assert mounts.mount_of(path).fstype == fstype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_slabs_and_files_are_token_major_and_workspaces_head_major(
    dtype: torch.dtype, batch: int
) -> None:
    layout = RowLayout(kv_heads=2, head_dim=4, dtype=dtype, batch=batch)
    kv = torch.randn(2, batch, 2, 3, 4).to(dtype)
    slab = HostRows(torch.zeros(1 << 12, dtype=torch.uint8), layout)
    slab.put(5, kv)
    assert torch.equal(slab.part(5, 8), kv)

    rows = slab.rows(5, 8)
    assert rows == HostMover().rows_of(kv)
    by_token = torch.frombuffer(rows, dtype=dtype).view(3, 2, batch, 2, 4)
    assert torch.equal(by_token.permute(1, 2, 3, 0, 4), kv)

    heads = HostHeads(torch.zeros(1 << 12, dtype=torch.uint8), layout)
    heads.put_rows(1, memoryview(bytes(rows)))
    heads.gather(4, slab, 6, 8)
    assert heads.kv.is_contiguous()
    assert torch.equal(heads.part(1, 4), kv)
    assert torch.equal(heads.part(4, 6), kv[:, :, :, 1:])
    assert not heads.part(0, 1).any() and not heads.part(6, 7).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 128), (3, 64), (1, 25), (5, 1000)])
def test_blocks_are_whole_pages_of_the_file_where_a_slab_holds_as_many(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    layout = RowLayout(*shape, dtype)
    for nbytes in (64 << 10, 256 << 10, 1 << 20):
        tokens = layout.tokens_in(nbytes)
        most = nbytes // layout.row_bytes
        assert most - most // 8 <= tokens <= most
        in_pages = [
            n for n in range(most - most // 8, most + 1) if n * layout.row_bytes % 4096 == 0
        ]
        assert tokens == max(in_pages, default=most)


@pytest.fixture
def plain_file(tmp_path: Path) -> SessionFile:
    """A file of 20 000 random bytes in an ordinary directory."""
    path = tmp_path / "layer.000"
    path.write_bytes(os.urandom(20_000))
    return SessionFile(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), path)


WIDE = RowLayout(kv_heads=1, head_dim=25, dtype=torch.float32)
"""Rows of 200 bytes: 100 of them in the file, and none but each 512th begins on a page."""


@pytest.mark.parametrize(
    ("first", "last"), [(0, 0), (0, 1), (0, 100), (3, 100), (41, 42), (63, 97), (99, 100)]
)
def test_any_rows_are_read(first: int, last: int, plain_file: SessionFile) -> None:
    with opened(plain_file, WIDE, HostMover()) as source:
        pieces = [bytes(rows) for rows in source.rows(first, last)]
        assert source.moved.mount == (last - first) * 200
        assert source.moved.warm == 0
    assert b"".join(pieces) == plain_file.path.read_bytes()[first * 200 : last * 200]
    assert all(len(piece) % 200 == 0 for piece in pieces)


def test_a_file_that_is_too_short_is_an_error(plain_file: SessionFile) -> None:
    with (
        pytest.raises(OSError, match=r"file ends at 20000, .* bytes early.*layer\.000"),
        opened(plain_file, WIDE, HostMover()) as source,
    ):
        list(source.rows(0, 101))


@given(
    cuts=st.lists(st.integers(1, 9999), unique=True, max_size=6).map(sorted),
    hole=st.integers(0, 6),
    bounds=st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted),
    slabs=st.booleans(),
    head_dim=st.sampled_from([25, 32]),
)
def test_rows_are_those_of_the_file_wherever_segments_meet(
    cuts: list[int], hole: int, bounds: list[int], slabs: bool, head_dim: int
) -> None:
    """Where a segment lacks all is read from the file."""
    layout = RowLayout(kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    width, (first, last) = layout.row_bytes, bounds
    content = os.urandom(100 * width)
    edges = [0, *cuts, len(content)]
    parts = [pair for number, pair in enumerate(pairwise(edges)) if number != hole]
    with tempfile.TemporaryDirectory() as name:
        warm, path = Path(name, "warm"), Path(name, "layer.000")
        path.write_bytes(content)
        # Each segment lies elsewhere than the one before, with other bytes between.
        warm.write_bytes(b"".join(b"-" * 77 + content[at:end] for at, end in parts))
        places = accumulate((77 + end - at for at, end in parts), initial=77)
        told = [(0, offset, end - at, at) for (at, end), offset in zip(parts, places, strict=False)]
        answer = {"files": {path.name: {"segments": told}}, "paths": [str(warm)]}
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        offer = SessionOffer(fd)
        with patch("kvfs.torch.offers._ask", lambda _: answer):
            given = offer.get()
        assert given is not None
        segments = given.segments(path.name)
        there = {at for segment in segments for at in range(segment.at, segment.end)}
        wanted = range(first * width, last * width)
        assert covers(segments, wanted.start, wanted.stop) == (set(wanted) <= there)
        with opened(SessionFile(fd, path), layout, HostMover(), offer) as source:
            if slabs and wanted:
                tokens = layout.tokens_in(4096)
                made = [HostMover().rows(page(), layout) for _ in range(0, last - first, tokens)]
                source.fill(made, tokens, first, last)
                found = b"".join(bytes(slab.rows(0, tokens)) for slab in made)[: len(wanted)]
            else:
                pieces = [bytes(piece) for piece in source.rows(first, last)]
                assert all(len(piece) % width == 0 for piece in pieces)
                found = b"".join(pieces)
            assert found == content[wanted.start : wanted.stop]
            is_warm = set(wanted) <= there
            assert source.moved.warm == (len(wanted) if is_warm else 0)
            assert source.moved.mount == (0 if is_warm else len(wanted))
        os.close(fd)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"files": {}},
        {"files": {"layer.000": {}}, "paths": []},
        {"files": {"layer.000": {"segments": [[0, 0, 20_000, 0]]}}, "paths": []},
        {"files": {"layer.000": {"segments": [[0, 0, 20_000]]}}, "paths": ["/nowhere"]},
    ],
)
def test_an_answer_that_is_none_is_as_if_none_was_given(
    answer: Any, plain_file: SessionFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then each file is asked for, and here that is refused too."""
    monkeypatch.setattr("kvfs.torch.offers._ask", lambda _: answer)
    offer = SessionOffer(plain_file.directory)
    assert offer.get() is None
    with opened(plain_file, WIDE, HostMover(), offer) as source:
        assert b"".join(map(bytes, source.rows(3, 97))) == plain_file.path.read_bytes()[600:19_400]
        assert (source.moved.warm, source.moved.mount) == (0, 18_800)


def page() -> torch.Tensor:
    """Memory as a slab has it."""
    return HostMover().memory(4096)


def test_what_the_daemon_offers_is_read_from_there(tmp_path: Path) -> None:
    """The attribute as the daemon gives it, on a filesystem that stores any attribute."""
    content = os.urandom(30_000)
    layer, warm = tmp_path / "layer.000", tmp_path / "session.kvmap"
    layer.write_bytes(content)
    warm.write_bytes(bytes(5000) + content[:12_000] + bytes(70_000) + content[12_000:])
    told = [
        {"path": str(warm), "offset": 5000, "length": 12_000, "at": 0},
        {"path": str(warm), "offset": 87_000, "length": 18_000, "at": 12_000},
    ]
    offer = json.dumps({"version": 1, "size": 30_000, "segments": told}).encode()
    try:
        os.setxattr(layer, MAP_ATTRIBUTE, offer)
    except OSError:
        pytest.skip(f"{tmp_path} has no user attributes")
    file = SessionFile(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), layer)
    with opened(file, WIDE, HostMover()) as source:
        assert b"".join(map(bytes, source.rows(7, 150))) == content[1400:30_000]
        assert (source.moved.warm, source.moved.mount) == (28_600, 0)
    warm.unlink()
    with opened(file, WIDE, HostMover()) as source:
        assert b"".join(map(bytes, source.rows(7, 150))) == content[1400:30_000]
        assert (source.moved.warm, source.moved.mount) == (0, 28_600)


def test_a_filesystem_without_direct_io_is_read_plainly(
    plain_file: SessionFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.open, []

    def open_without_direct(path: str, flags: int, mode: int, dir_fd: int) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_without_direct)
    with opened(plain_file, WIDE, HostMover()) as source:
        content = b"".join(map(bytes, source.rows(0, 100)))
    assert refused == ["layer.000"]
    assert content == plain_file.path.read_bytes()


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (8, 128), (5, 72), (1, 96)])
def test_staging_holds_whole_rows_and_whole_pages(kv_heads: int, head_dim: int) -> None:
    layout = RowLayout(kv_heads, head_dim, torch.bfloat16)
    with staging(layout) as memory:
        assert len(memory) % layout.row_bytes == 0
        assert len(memory) % mmap.PAGESIZE == 0
        assert (1 << 20) < len(memory) <= (8 << 20)


def test_errors_carry_the_full_name(plain_file: SessionFile) -> None:
    gone = SessionFile(plain_file.directory, plain_file.path.with_name("layer.001"))
    for call in (gone.size, gone.read, lambda: gone.truncate(0)):
        with pytest.raises(FileNotFoundError) as failed:
            call()
        assert failed.value.filename == str(gone.path)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


@given(spans=SPANS, count=st.integers(0, 50))
def test_ranges_are_sets_of_tokens(spans: Ranges, count: int) -> None:
    def tokens(ranges: Ranges) -> list[int]:
        return [token for first, end in ranges for token in range(first, end)]

    joined = union(spans)
    assert tokens(joined) == sorted(set(tokens(spans)))
    assert total(joined) == len(tokens(joined))
    assert tokens(after(joined, count)) == tokens(joined)[count:]
    assert tokens(without(joined, 40)) == sorted(set(range(40)) - set(tokens(joined)))
    assert list(runs(tokens(joined))) == joined
    for place, first, end in placed(joined):
        assert tokens(joined)[place : place + end - first] == list(range(first, end))

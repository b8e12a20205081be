"""The adapter's parts without a filesystem of ours beneath them."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvfs.torch import mounts
from kvfs.torch.files import SessionFile
from kvfs.torch.layout import RowLayout
from kvfs.torch.slab import Slab
from kvfs.torch.staging import SLAB_BYTES, BufferPool, staging

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


def test_pool_gives_back_what_fits() -> None:
    pool = BufferPool()
    small, large = pool.take(1), pool.take(5 * SLAB_BYTES)
    assert (len(small), len(large)) == (SLAB_BYTES, 5 * SLAB_BYTES)
    pool.give(small)
    pool.give(large)
    assert pool.take(4 * SLAB_BYTES) is large
    assert pool.take(4 * SLAB_BYTES) is not small
    assert pool.take(SLAB_BYTES) is small


def test_pool_does_not_keep_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.torch.staging._IDLE_LIMIT", 2 * SLAB_BYTES)
    pool = BufferPool()
    taken = [pool.take(1) for _ in range(3)]
    for buffer in taken:
        pool.give(buffer)
    again = [pool.take(1) for _ in range(3)]
    assert again[2] not in taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slabs_are_head_major_and_files_token_major(dtype: torch.dtype) -> None:
    layout = RowLayout(kv_heads=2, head_dim=4, dtype=dtype)
    keys = torch.arange(24, dtype=dtype).view(1, 2, 3, 4)
    values = -keys
    slab = Slab(layout, tokens=1)
    slab.put(5, keys, values)
    assert torch.equal(slab.keys(8)[:, :, 5:], keys)
    assert torch.equal(slab.values(8)[:, :, 5:], values)

    rows = slab.get_rows(5, 8, memoryview(bytearray(1000)))
    expected = torch.stack([keys[0].transpose(0, 1), values[0].transpose(0, 1)], dim=1)
    assert torch.equal(torch.frombuffer(rows, dtype=dtype).view(3, 2, 2, 4), expected)

    other = Slab(layout, tokens=1)
    assert other.put_rows(1, rows) == 3
    assert torch.equal(other.keys(4)[:, :, 1:], keys)
    assert torch.equal(other.values(4)[:, :, 1:], values)


def test_a_grown_slab_keeps_its_rows() -> None:
    layout = RowLayout(kv_heads=2, head_dim=64, dtype=torch.float32)
    slab = Slab(layout, tokens=1)
    rows = torch.randn(1, 2, slab.capacity, 64)
    slab.put(0, rows, rows)
    used = slab.capacity
    larger = slab.grown(used, used + 1)
    assert larger.capacity > used
    assert torch.equal(larger.keys(used), rows)


@pytest.fixture
def plain_file(tmp_path: Path) -> SessionFile:
    """A file of 20 000 random bytes in an ordinary directory."""
    path = tmp_path / "layer.000"
    path.write_bytes(os.urandom(20_000))
    return SessionFile(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), path)


@pytest.mark.parametrize("nbytes", [0, 1, 8192, 8193, 20_000])
def test_any_size_is_read_in_aligned_pieces(nbytes: int, plain_file: SessionFile) -> None:
    memory = memoryview(mmap.mmap(-1, 8192))
    pieces = [bytes(piece) for piece in plain_file.stream(memory, nbytes)]
    assert b"".join(pieces) == plain_file.path.read_bytes()[:nbytes]
    assert [len(piece) for piece in pieces[:-1]] == [8192] * (len(pieces) - 1)


def test_a_file_that_is_too_short_is_an_error(plain_file: SessionFile) -> None:
    memory = memoryview(mmap.mmap(-1, 8192))
    with pytest.raises(OSError, match=r"file ends at 20000, 1 bytes early.*layer\.000"):
        list(plain_file.stream(memory, 20_001))


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
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    (content,) = plain_file.stream(memory, 20_000)
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

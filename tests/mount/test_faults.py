"""Faults that other filesystems had, on a real mount: docs/faults.md says which is which."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support.command import error_line
from tests.support.mounter import Mounter


def test_an_option_that_ends_the_daemon_is_refused_before(mounter: Mounter) -> None:
    refused = error_line(mounter.mount("-o", "max_read=4096", check=False), status=2)
    assert "max_read=4096 is not known" in refused


def test_notices_to_the_kernel_meet_files_in_use_renamed_and_gone(
    mounter: Mounter, kv_mount: Path
) -> None:
    """Each fsync makes notices for the files before it: neither they nor the requests beside
    them may wait for each other, and one that comes too late is no error."""

    def work(home: Path) -> None:
        home.mkdir()
        for number in range(150):
            path = home / str(number)
            with path.open("w+b", buffering=0) as file:
                file.write(os.urandom(5000))
                os.fsync(file.fileno())
                if number % 3 == 0:
                    path.unlink()
                elif number % 3 == 1:
                    path.rename(home / "last")
                file.write(b"more")
                assert os.fstat(file.fileno()).st_size == 5004
        assert len(os.listdir(home)) == 51

    workers = [
        threading.Thread(target=work, args=(kv_mount / name,), daemon=True) for name in "abc"
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        assert not worker.is_alive(), "a request waits for ever"
    assert sorted(os.listdir(kv_mount)) == ["a", "b", "c"]
    mounter.umount()
    lines = mounter.log.read_text().splitlines()
    assert all(" INFO " in line for line in lines) and len(lines) < 10, lines


def test_block_counts_of_an_open_file_are_right_after_each_fsync(kv_mount: Path) -> None:
    with (kv_mount / "f").open("wb", buffering=0) as file:
        for size in (100_000, 200_000, 400_000):
            os.pwrite(file.fileno(), os.urandom(size), 0)
            os.fsync(file.fileno())
            assert size <= os.fstat(file.fileno()).st_blocks * 512 <= size + 3 * 4096


def test_a_directory_can_go_while_a_file_that_was_in_it_is_open(kv_mount: Path) -> None:
    (kv_mount / "d").mkdir()
    with (kv_mount / "d" / "f").open("w+b") as file:
        (kv_mount / "d" / "f").unlink()
        (kv_mount / "d").rmdir()
        file.write(b"still here")
        file.seek(0)
        assert file.read() == b"still here"
    assert list(kv_mount.iterdir()) == []


def test_files_in_use_are_counted(kv_mount: Path) -> None:
    def used() -> int:
        status = os.statvfs(kv_mount)
        return status.f_files - status.f_ffree

    before = used()
    for number in range(10):
        (kv_mount / str(number)).touch()
    os.link(kv_mount / "0", kv_mount / "another name")
    assert used() == before + 10
    for number in range(10):
        (kv_mount / str(number)).unlink()
    # The kernel forgets them a moment later.
    limit = time.monotonic() + 20
    while used() != before + 1:
        assert time.monotonic() < limit, used() - before
        time.sleep(0.02)


def test_the_number_of_a_file_is_never_that_of_a_later_one(
    mounter: Mounter, kv_mount: Path
) -> None:
    numbers = []
    for end in (mounter.umount, mounter.kill, mounter.umount):
        for name in "fg":
            (kv_mount / name).touch()
            numbers.append((kv_mount / name).stat().st_ino)
            (kv_mount / name).unlink()
        end()
        mounter.mount()
    assert numbers == sorted(set(numbers))


def test_the_length_of_the_list_of_xattrs_can_be_asked_for(kv_mount: Path) -> None:
    names = {f"user.name{number}" for number in range(100)}
    for name in names:
        os.setxattr(kv_mount, name, b"")
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.fsencode(kv_mount)
    length = libc.listxattr(path, None, 0)
    assert length == sum(len(name) + 1 for name in names)
    buffer = ctypes.create_string_buffer(length)
    assert libc.listxattr(path, buffer, length - 1) == -1
    assert ctypes.get_errno() == errno.ERANGE
    assert libc.listxattr(path, buffer, length) == length
    assert set(buffer.raw.decode().split("\0")) == names | {""}


def test_a_mount_of_others_may_have_any_bytes_as_a_name(mounter: Mounter) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount such a thing")
    point = os.fsencode(mounter.directory) + b"/\xff\x85 odd"
    os.mkdir(point)
    subprocess.run([b"mount", b"-t", b"tmpfs", b"\xfe", point], check=True)
    try:
        mounter.mount()
        mounter.umount()
    finally:
        subprocess.run([b"umount", point], check=True)

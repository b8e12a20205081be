"""The mount's contract for names, attributes and xattrs, on a real mount."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from tests.support.calls import RENAME_EXCHANGE, RENAME_NOREPLACE, errno_of, renameat2
from tests.support.mounter import Mounter


def test_a_fresh_root_is_private_and_empty(kv_mount: Path) -> None:
    status = kv_mount.stat()
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
    assert list(kv_mount.iterdir()) == []
    kv_mount.chmod(0o755)
    assert stat.S_IMODE(kv_mount.stat().st_mode) == 0o755


def test_any_bytes_are_a_name_up_to_255(mounter: Mounter, kv_mount: Path) -> None:
    root = os.fsencode(kv_mount)
    names = [b"a" * 255, b"\xff\xfe\x01", "día ☂".encode(), b"new\nline", b"-", b"..."]
    for name in names:
        os.mkdir(root + b"/" + name)
    assert sorted(os.listdir(root)) == sorted(names)
    assert errno_of(os.mkdir, root + b"/" + b"a" * 256) == errno.ENAMETOOLONG
    assert errno_of(os.stat, root + b"/" + b"a" * 256) == errno.ENAMETOOLONG
    mounter.umount()
    mounter.mount()
    assert sorted(os.listdir(root)) == sorted(names)


def test_rename_replaces_at_once_and_across_directories(kv_mount: Path) -> None:
    (kv_mount / "a").mkdir()
    (kv_mount / "b").mkdir()
    (kv_mount / "a" / "f").write_bytes(b"new")
    (kv_mount / "b" / "f").write_bytes(b"old")
    with (kv_mount / "b" / "f").open("rb") as replaced:
        (kv_mount / "a" / "f").rename(kv_mount / "b" / "f")
        assert replaced.read() == b"old"
    assert (kv_mount / "b" / "f").read_bytes() == b"new"
    assert list((kv_mount / "a").iterdir()) == []
    (kv_mount / "a").rename(kv_mount / "b" / "a")
    assert (kv_mount / "b").stat().st_nlink == 3
    assert kv_mount.stat().st_nlink == 3


def test_rename_refuses_what_posix_refuses(kv_mount: Path) -> None:
    (kv_mount / "d" / "e").mkdir(parents=True)
    (kv_mount / "f").write_bytes(b"f")
    (kv_mount / "empty").mkdir()
    assert errno_of(os.rename, kv_mount / "d", kv_mount / "d" / "e" / "x") == errno.EINVAL
    assert errno_of(os.rename, kv_mount / "empty", kv_mount / "d") == errno.ENOTEMPTY
    assert errno_of(os.rename, kv_mount / "empty", kv_mount / "f") == errno.ENOTDIR
    assert errno_of(os.rename, kv_mount / "f", kv_mount / "empty") == errno.EISDIR
    assert errno_of(os.rename, kv_mount / "missing", kv_mount / "x") == errno.ENOENT
    (kv_mount / "d").rename(kv_mount / "empty")
    assert sorted(path.name for path in kv_mount.iterdir()) == ["empty", "f"]


def test_rename_flags(kv_mount: Path) -> None:
    (kv_mount / "a").write_bytes(b"a")
    (kv_mount / "d").mkdir()
    assert errno_of(renameat2, kv_mount / "a", kv_mount / "d", RENAME_NOREPLACE) == errno.EEXIST
    renameat2(kv_mount / "a", kv_mount / "d", RENAME_EXCHANGE)
    assert (kv_mount / "a").is_dir()
    assert (kv_mount / "d").read_bytes() == b"a"
    renameat2(kv_mount / "d", kv_mount / "new", RENAME_NOREPLACE)
    assert (kv_mount / "new").read_bytes() == b"a"


def test_a_file_renamed_while_open_keeps_its_bytes(kv_mount: Path) -> None:
    with (kv_mount / "f.tmp").open("wb") as file:
        file.write(b"one")
        file.flush()
        (kv_mount / "f.tmp").rename(kv_mount / "f")
        file.write(b"two")
    assert (kv_mount / "f").read_bytes() == b"onetwo"


def test_hard_links_and_symlinks(mounter: Mounter, kv_mount: Path) -> None:
    (kv_mount / "f").write_bytes(b"shared")
    os.link(kv_mount / "f", kv_mount / "g")
    os.symlink("f", kv_mount / "s")
    os.symlink("x" * 4000, kv_mount / "long")
    assert (kv_mount / "g").stat().st_nlink == 2
    (kv_mount / "f").unlink()
    mounter.umount()
    mounter.mount()
    assert (kv_mount / "g").read_bytes() == b"shared"
    assert (kv_mount / "g").stat().st_nlink == 1
    assert os.readlink(kv_mount / "long") == "x" * 4000
    assert not (kv_mount / "s").exists()


def test_exclusive_create_and_directories_refuse(kv_mount: Path) -> None:
    (kv_mount / "d" / "e").mkdir(parents=True)
    (kv_mount / "f").touch()
    assert errno_of(os.open, kv_mount / "f", os.O_CREAT | os.O_EXCL) == errno.EEXIST
    assert errno_of(os.mkdir, kv_mount / "f") == errno.EEXIST
    assert errno_of(os.rmdir, kv_mount / "d") == errno.ENOTEMPTY
    assert errno_of(os.rmdir, kv_mount / "f") == errno.ENOTDIR
    assert errno_of(os.unlink, kv_mount / "d") in (errno.EISDIR, errno.EPERM)
    assert errno_of(os.stat, kv_mount / "f" / "x") == errno.ENOTDIR


def test_a_name_that_was_missing_is_found_once_it_is_made(kv_mount: Path) -> None:
    assert not (kv_mount / "f").exists()
    (kv_mount / "f").touch()
    assert (kv_mount / "f").exists()
    (kv_mount / "f").unlink()
    assert not (kv_mount / "f").exists()


def test_thousands_of_names_are_listed_once_each_while_some_go(kv_mount: Path) -> None:
    for number in range(3000):
        (kv_mount / f"f{number}").touch()
    seen: list[str] = []
    with os.scandir(kv_mount) as entries:
        for entry in entries:
            seen.append(entry.name)
            if len(seen) % 3 == 0:
                (kv_mount / entry.name).unlink()
    assert len(seen) == len(set(seen)) == 3000
    assert len(list(kv_mount.iterdir())) == 2000


def test_times_owner_and_mode_are_kept(mounter: Mounter, kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.touch()
    path.chmod(0o640)
    os.utime(path, ns=(1_000_000_001, 2_000_000_002))
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    before = path.stat()
    mounter.umount()
    mounter.mount()
    after = path.stat()
    assert after.st_mtime_ns == 2_000_000_002
    assert after.st_atime_ns == 1_000_000_001
    kept = ("st_mode", "st_uid", "st_gid", "st_ino", "st_ctime_ns", "st_nlink", "st_size")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]


@pytest.mark.parametrize("which", ["access", "modification"])
def test_times_beyond_what_is_kept_become_the_nearest(
    mounter: Mounter, kv_mount: Path, which: str
) -> None:
    kept = {
        0: 0,
        -1: -1,
        2**33: 2**33,
        9_223_372_037: 9_223_372_036,
        2**62: 9_223_372_036,
        -62_135_596_800: -9_223_372_037,
    }

    def seconds(name: str) -> int:
        status = (kv_mount / name).stat()
        return (status.st_atime_ns if which == "access" else status.st_mtime_ns) // 10**9

    for asked in kept:
        (kv_mount / str(asked)).touch()
        times = (asked, 0) if which == "access" else (0, asked)
        os.utime(kv_mount / str(asked), times)
    found = {asked: seconds(str(asked)) for asked in kept}
    assert found == kept
    mounter.umount()
    mounter.mount()
    assert {asked: seconds(str(asked)) for asked in kept} == kept


def test_writing_moves_the_times_forward(kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.touch()
    os.utime(path, ns=(0, 0))
    path.write_bytes(b"x")
    assert path.stat().st_mtime_ns > 10**18


def test_xattrs_of_every_size_are_kept(mounter: Mounter, kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.touch()
    values = {f"user.x{size}": bytes([size % 251]) * size for size in (0, 1, 4096, 65536)}
    for name, value in values.items():
        os.setxattr(path, name, value)
    mounter.umount()
    mounter.mount()
    assert sorted(os.listxattr(path)) == sorted(values)
    assert {name: os.getxattr(path, name) for name in values} == values
    os.removexattr(path, "user.x1")
    assert errno_of(os.getxattr, path, "user.x1") == errno.ENODATA
    assert errno_of(os.setxattr, path, "user.x0", b"", os.XATTR_CREATE) == errno.EEXIST
    assert errno_of(os.setxattr, path, "user.none", b"", os.XATTR_REPLACE) == errno.ENODATA


def test_xattrs_of_kvfs_answer_when_asked_and_are_not_listed(kv_mount: Path) -> None:
    path = kv_mount / "f"
    path.write_bytes(b"x" * 300_000)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert os.listxattr(path) == []
    extents = json.loads(os.getxattr(path, "user.kvfs.extents"))
    assert sum(extent["length"] for extent in extents) == 300_000
    assert errno_of(os.setxattr, path, "user.kvfs.unknown", b"1") == errno.EOPNOTSUPP


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("codec", b"planes", [b"", b"nonsense", b"PLANES", b"zstd "]),
        ("dtype", b"bfloat16", [b"", b"bf16", b"float8_nonsense", b"object", b"\xff"]),
        ("shape", b"2,3,64", [b"", b"two", b"0", b"2,-1", b"2,,3", b"1025,1024", b"9" * 5000]),
    ],
)
def test_settings_take_only_what_says_something(
    kv_mount: Path, name: str, value: bytes, refused: list[bytes]
) -> None:
    path = kv_mount / "f"
    path.touch()
    os.setxattr(path, f"user.kvfs.{name}", value)
    for nonsense in refused:
        assert errno_of(os.setxattr, path, f"user.kvfs.{name}", nonsense) == errno.EINVAL
    assert os.getxattr(path, f"user.kvfs.{name}") == value


def test_statvfs_is_filled_in(kv_mount: Path) -> None:
    (kv_mount / "f").touch()
    status = os.statvfs(kv_mount)
    assert status.f_bsize == status.f_frsize == 4096
    assert status.f_namemax == 255
    assert 0 < status.f_bavail <= status.f_bfree <= status.f_blocks
    assert 0 < status.f_ffree < status.f_files
    assert (kv_mount / "f").stat().st_blksize >= 128 * 1024


def test_a_directory_that_was_removed_while_held_is_empty_and_answers(kv_mount: Path) -> None:
    (kv_mount / "a" / "b").mkdir(parents=True)
    held = os.open(kv_mount / "a" / "b", os.O_RDONLY | os.O_DIRECTORY)
    (kv_mount / "a" / "b").rmdir()
    (kv_mount / "a").rmdir()
    assert os.listdir(held) == []
    assert os.fstat(held).st_nlink == 0
    assert errno_of(lambda: os.open("x", os.O_CREAT, dir_fd=held)) == errno.ENOENT
    os.close(held)

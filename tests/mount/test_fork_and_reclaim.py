"""Forks and reclaim through the mount: what programs see at once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.conftest import MounterMaker
from tests.support.mounter import Mounter, kvfs

MIB = 1024 * 1024


def session(mountpoint: Path, name: str, size: int = MIB) -> Path:
    path = mountpoint / name
    path.mkdir()
    (path / "session.json").write_text("{}")
    (path / "layer.000").write_bytes(os.urandom(size))
    return path


def test_a_fork_is_there_at_once_and_exact(kv_mount: Path) -> None:
    source = session(kv_mount, "agent")
    fork = kv_mount / "fork"
    assert not fork.exists(), "the kernel may remember that"
    os.setxattr(source, "user.kvfs.fork", b"fork")
    assert fork.is_dir()
    assert (fork / "layer.000").read_bytes() == (source / "layer.000").read_bytes()
    with (fork / "layer.000").open("ab") as file:
        file.write(b"more")
    assert (source / "layer.000").stat().st_size == MIB
    assert (fork / "layer.000").stat().st_size == MIB + 4
    assert sorted(os.listdir(kv_mount)) == ["agent", "fork"]


def test_a_fork_takes_no_space_but_counts_in_each(mounter: Mounter, kv_mount: Path) -> None:
    source = session(kv_mount, "agent", 8 * MIB)
    os.sync()
    fd = os.open(source / "layer.000", os.O_RDONLY)
    os.fsync(fd)
    free = os.statvfs(kv_mount).f_bfree
    os.setxattr(source, "user.kvfs.fork", b"fork")
    os.fsync(fd)
    os.close(fd)
    assert os.statvfs(kv_mount).f_bfree > free - 256
    assert (kv_mount / "fork" / "layer.000").stat().st_blocks * 512 >= 8 * MIB
    assert mounter.stats()["space"]["live"] < 9 * MIB


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "agent"])
def test_a_name_that_cannot_be_forked_to(kv_mount: Path, name: str) -> None:
    source = session(kv_mount, "agent", 1000)
    with pytest.raises(OSError, match=r"Invalid argument|File exists"):
        os.setxattr(source, "user.kvfs.fork", name.encode())
    assert os.listdir(kv_mount) == ["agent"]


def test_the_command_forks_and_says_what_it_made(kv_mount: Path) -> None:
    source = session(kv_mount, "agent")
    result = kvfs("fork", source, "try")
    assert (result.returncode, result.stdout.strip()) == (0, str(kv_mount / "try"))
    assert (kv_mount / "try" / "layer.000").read_bytes() == (source / "layer.000").read_bytes()
    again = kvfs("fork", source, "try", check=False)
    assert again.returncode == 1
    assert "exists" in again.stderr
    assert kvfs("fork", kv_mount, "x", check=False).returncode == 1


def test_a_session_whose_time_is_over_is_gone_for_everyone(
    mounter: Mounter, kv_mount: Path
) -> None:
    kept, gone = session(kv_mount, "kept"), session(kv_mount, "gone")
    os.setxattr(gone, "user.kvfs.ttl", b"1")
    assert (gone / "layer.000").stat().st_size == MIB
    deadline = time.monotonic() + 90
    while gone.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not gone.exists()
    assert not (gone / "layer.000").exists()
    assert os.listdir(kv_mount) == ["kept"]
    assert (kept / "layer.000").stat().st_size == MIB
    (line,) = (kv_mount / ".kvfs" / "log").read_text().splitlines()
    assert json.loads(line)["path"] == "gone"
    shown = kvfs("log", kv_mount)
    assert shown.returncode == 0
    assert "gone" in shown.stdout
    assert "ttl" in shown.stdout
    assert json.loads(kvfs("log", kv_mount, "--json").stdout)[0]["path"] == "gone"
    sessions = (kv_mount / ".kvfs" / "sessions").read_text().splitlines()
    assert [json.loads(line)["path"] for line in sessions] == ["kept"]


def test_settings_of_reclaim_answer_also_where_nothing_was_set(kv_mount: Path) -> None:
    path = session(kv_mount, "agent")
    file = path / "layer.000"
    assert os.getxattr(path, "user.kvfs.unit") == b"session"
    assert os.getxattr(kv_mount, "user.kvfs.unit") == b"pool"
    assert os.getxattr(file, "user.kvfs.pin") == b"0"
    assert os.getxattr(path, "user.kvfs.ttl") == b"0"
    os.setxattr(path, "user.kvfs.pin", b"1")
    assert os.getxattr(file, "user.kvfs.pin") == b"1"
    assert os.listxattr(file) == []
    for name, value in (("pin", b"2"), ("ttl", b"-1"), ("ttl", b"soon"), ("unit", b"x")):
        with pytest.raises(OSError, match="Invalid argument"):
            os.setxattr(path, f"user.kvfs.{name}", value)


def test_a_full_ring_makes_room_by_what_was_unused_for_longest(
    make_mounter: MounterMaker,
) -> None:
    mounter = make_mounter("64M")
    mounter.mount()
    first = [session(mounter.mountpoint, f"old-{number}", 4 * MIB) for number in range(8)]
    time.sleep(65)
    for number in range(8):
        session(mounter.mountpoint, f"new-{number}", 4 * MIB)
    left = [path for path in first if path.exists()]
    assert len(left) < 8
    assert left == first[8 - len(left) :], "the oldest go first"
    for number in range(8):
        assert (mounter.mountpoint / f"new-{number}" / "layer.000").stat().st_size == 4 * MIB

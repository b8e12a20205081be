"""Programs that know nothing of KVFS, on a real mount: what they check themselves must hold."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounter import Mounter

# Asks for a lock (of a range, if given) in another process: prints whether it got it at once.
TRY_LOCK = """
import fcntl, sys
call, path, kind, *range_ = sys.argv[1:]
with open(path, "r+b") as file:
    try:
        getattr(fcntl, call)(file, getattr(fcntl, kind) | fcntl.LOCK_NB, *map(int, range_))
        print("taken")
    except BlockingIOError:
        print("busy")
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What it prints. Raises AssertionError with its errors if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is missing")


@pytest.mark.parametrize("direct", [0, 1], ids=["buffered", "O_DIRECT"])
@needs("fio")
def test_fio_verifies_what_it_wrote(mounter: Mounter, kv_mount: Path, direct: int) -> None:
    job = [
        "fio", "--name=verify", "--filename=f", "--size=24M", "--rw=randwrite", "--bsrange=4k-256k",
        "--ioengine=psync", f"--direct={direct}", "--verify=crc32c", "--verify_fatal=1",
        "--end_fsync=1", "--randseed=1", "--thread",
    ]  # fmt: skip
    run(*job, cwd=kv_mount)
    mounter.umount()
    mounter.mount()
    run(*job, "--verify_only", cwd=kv_mount)


def test_a_source_tree_is_copied_and_compares_equal(mounter: Mounter, kv_mount: Path) -> None:
    library = Path(os.__file__).parent
    packages = ["asyncio", "ctypes", "email", "encodings", "importlib", "json", "unittest", "xml"]
    for package in packages:
        run("cp", "-a", library / package, kv_mount)
    mounter.umount()
    mounter.mount()
    for package in packages:
        run("diff", "-r", library / package, kv_mount / package)
    names = run("find", ".", "-type", "f", "-printf", "%P %s %T@ %m\\n", cwd=kv_mount / "email")
    kept = run("find", ".", "-type", "f", "-printf", "%P %s %T@ %m\\n", cwd=library / "email")
    assert sorted(names.splitlines()) == sorted(kept.splitlines())


@needs("git")
def test_a_git_repository_is_cloned_changed_packed_and_sound(
    mounter: Mounter, kv_mount: Path, tmp_path: Path
) -> None:
    origin, clone = tmp_path / "origin", kv_mount / "clone"

    def git(*arguments: str, at: Path) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
        return run("git", "-c", "safe.directory=*", *who, *arguments, cwd=at)

    origin.mkdir()
    git("init", "-q", at=origin)
    for number in range(200):
        (origin / f"file.{number}").write_text(f"{number}\n" * 500)
    git("add", ".", at=origin)
    git("commit", "-qm", "first", at=origin)
    run("git", "clone", "-q", "--no-local", origin, clone)
    for number in range(100):
        (clone / f"file.{number}").write_text("changed\n")
    git("commit", "-qam", "second", at=clone)
    git("gc", "-q", at=clone)
    mounter.umount()
    mounter.mount()
    git("fsck", "--strict", "--full", at=clone)
    assert git("status", "--porcelain", at=clone) == ""
    assert len(git("log", "--format=%H", at=clone).split()) == 2


@pytest.mark.parametrize("journal", ["wal", "delete", "truncate", "persist"])
def test_a_database_of_sqlite_is_whole(mounter: Mounter, kv_mount: Path, journal: str) -> None:
    path = kv_mount / "db"
    writer = sqlite3.connect(path)
    assert writer.execute(f"pragma journal_mode={journal}").fetchone() == (journal,)
    writer.execute("create table kv(key integer primary key, value blob)")
    writer.commit()
    reader = sqlite3.connect(path)
    for number in range(30):
        rows = [(number * 50 + row, os.urandom(300)) for row in range(50)]
        writer.executemany("insert into kv values(?, ?)", rows)
        if number % 3 == 2:
            writer.rollback()
        else:
            writer.commit()
        assert reader.execute("select count(*) % 50 from kv").fetchone() == (0,)
    writer.execute("delete from kv where key % 2")
    writer.commit()
    assert reader.execute("select count(*) from kv").fetchone() == (500,)
    # The daemon's end while the database is open: what it committed is there.
    mounter.kill()
    mounter.mount()
    again = sqlite3.connect(path)
    assert again.execute("pragma integrity_check").fetchone() == ("ok",)
    assert again.execute("select count(*) from kv").fetchone() == (500,)
    again.close()


@pytest.mark.parametrize(
    ("call", "lock"), [("flock", fcntl.flock), ("lockf", fcntl.lockf)], ids=["flock", "fcntl"]
)
def test_locks_hold_between_processes(
    kv_mount: Path, call: str, lock: Callable[[int, int], None]
) -> None:
    path = kv_mount / "lock"
    path.touch()

    def other_gets(kind: str) -> str:
        return run(sys.executable, "-c", TRY_LOCK, call, path, kind).strip()

    fd = os.open(path, os.O_RDWR)
    lock(fd, fcntl.LOCK_EX)
    assert (other_gets("LOCK_EX"), other_gets("LOCK_SH")) == ("busy", "busy")
    lock(fd, fcntl.LOCK_SH)
    assert (other_gets("LOCK_EX"), other_gets("LOCK_SH")) == ("busy", "taken")
    os.close(fd)
    assert other_gets("LOCK_EX") == "taken"


def test_locks_of_parts_of_a_file_are_apart(kv_mount: Path) -> None:
    path = kv_mount / "lock"
    path.write_bytes(bytes(100))
    fd = os.open(path, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 50, 50)
    for start, expected in (("0", "taken"), ("40", "busy"), ("100", "taken")):
        got = run(sys.executable, "-c", TRY_LOCK, "lockf", path, "LOCK_EX", "50", start)
        assert got.strip() == expected
    os.close(fd)

"""A tmpfs with large pages for the warm tier: made when it may be, kept while it is needed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.mount.large_pages import give_up, provide
from tests.support.mounter import Mounter, kvfs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a tmpfs")


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvfs-pages-", dir="/dev/shm"))
    yield made / "kvfs-0"
    if os.path.ismount(made / "kvfs-0"):
        subprocess.run(["umount", made / "kvfs-0"], check=True)
    shutil.rmtree(made)


def options(directory: Path) -> str:
    command = ["findmnt", "--noheadings", "--output", "OPTIONS", str(directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_it_is_private_and_has_large_pages(directory: Path) -> None:
    provide(directory)
    assert os.path.ismount(directory)
    assert "huge=within_size" in options(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    outer, inner = os.statvfs(directory.parent), os.statvfs(directory)
    assert inner.f_blocks * inner.f_frsize <= outer.f_blocks * outer.f_frsize


def test_a_daemon_after_a_kill_finds_it_and_what_is_in_it(directory: Path) -> None:
    provide(directory)
    (directory / "first").mkdir()
    provide(directory)
    assert (directory / "first").is_dir()
    give_up(directory)
    assert (directory / "first").is_dir(), "that is not in the ring"
    (directory / "first").rmdir()
    give_up(directory)
    assert not directory.exists()


def test_what_is_in_a_directory_is_not_hidden(directory: Path) -> None:
    """A daemon that was killed left it there."""
    (directory / "left").mkdir(parents=True)
    provide(directory)
    assert not os.path.ismount(directory)
    assert (directory / "left").is_dir()


def test_a_mount_has_it_by_default_and_leaves_nothing(mounter: Mounter) -> None:
    """Also over a kill."""

    def mount() -> Path:
        kvfs("mount", mounter.mountpoint, mounter.image, "--log", mounter.log)
        mounter.adopt()
        return Path("/dev/shm/kvfs-0", mounter.stats()["uuid"])

    directory = mount()
    assert "huge=within_size" in options(directory)
    (mounter.mountpoint / "file").write_bytes(b"x" * 5_000_000)
    mounter.kill()
    assert mount() == directory
    assert (mounter.mountpoint / "file").read_bytes() == b"x" * 5_000_000
    mounter.umount()
    assert not directory.exists()

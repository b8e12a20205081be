"""`mount.kvfs`, called by the real mount(8)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvfs.mount.mounts import find_mount
from tests.support.command import error_line
from tests.support.mounter import COMMAND_SECONDS, KVFS, Mounter
from tests.support.ports import free_port

HELPER = KVFS.with_name("mount.kvfs")
INSTALLED = Path("/sbin/mount.kvfs")


@pytest.fixture
def installed() -> Iterator[None]:
    """The helper where mount(8) looks for it."""
    if os.geteuid() != 0:
        pytest.skip("only root may install a mount helper")
    if INSTALLED.exists():
        if not INSTALLED.samefile(HELPER):
            pytest.skip(f"{INSTALLED} is another one")
        yield
        return
    INSTALLED.unlink(missing_ok=True)  # a link that leads nowhere
    INSTALLED.symlink_to(HELPER)
    yield
    INSTALLED.unlink()


def run(*command: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )


def own(mounter: Mounter) -> str:
    """Options that keep a test's mount apart from others."""
    return f"warm-dir={mounter.warm_directory},log={mounter.log}"


def flags_of(mountpoint: Path) -> set[str]:
    """Of the mount and of its superblock, as the kernel has them."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if fields[4] == str(mountpoint):
            return {*fields[5].split(","), *fields[-1].split(",")}
    raise AssertionError(f"{mountpoint} is not mounted")


def test_mount_with_a_type_mounts(mounter: Mounter, installed: None) -> None:
    result = run(
        "mount", "-v", "-t", "kvfs", mounter.image, mounter.mountpoint,
        "-o", f"{own(mounter)},noexec,warm=64M",
    )  # fmt: skip
    assert result.returncode == 0, result
    mounter.adopt()
    assert "noexec" in flags_of(mounter.mountpoint)
    assert any(mounter.warm_directory.iterdir())
    (mounter.mountpoint / "kept").write_text("kept")
    mounter.umount()
    mounter.mount()
    assert (mounter.mountpoint / "kept").read_text() == "kept"


@pytest.mark.parametrize("access", ["rw", "ro"])
def test_a_line_of_fstab_mounts(mounter: Mounter, installed: None, access: str) -> None:
    port = free_port()
    options = (
        f"defaults,noauto,nofail,_netdev,x-systemd.device-timeout=9,comment=kv,{access},"
        f"relatime,allow_other,{own(mounter)},"
        f"metrics-port={port},metrics-address=127.0.0.1,log-json"
    )
    fstab = mounter.directory / "fstab"
    fstab.write_text(f"{mounter.image} {mounter.mountpoint} kvfs {options} 0 0\n")
    result = run("mount", "--fstab", fstab, mounter.mountpoint)
    assert result.returncode == 0, result
    mounter.adopt()
    assert mounter.stats()["read_only"] == (access == "ro")
    assert access in flags_of(mounter.mountpoint)
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"kvfs_read_only %d" % (access == "ro") in answer.read()
    assert json.loads(mounter.log.read_text())["message"].startswith("mounted ")


def test_mount_passes_on_the_one_line_and_fails(mounter: Mounter, installed: None) -> None:
    missing = mounter.directory / "missing.img"
    missing.touch()
    result = run("mount", "-t", "kvfs", missing, mounter.mountpoint, "-o", own(mounter))
    assert "is too small to be a KVFS ring" in error_line(result, status=32)
    result = run("mount", "-t", "kvfs", mounter.image, mounter.mountpoint, "-o", "fast")
    assert "-o fast is not known" in error_line(result, status=1)
    assert not find_mount(mounter.mountpoint)


# -- called by itself, with the arguments that mount(8) gives


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'DEV'"),
        (("dev", "mnt", "-o", "fast"), "-o fast is not known"),
        (
            ("dev", "mnt", "-f", "-o", "remount,ro"),
            "-o remount is the kernel's alone: call mount with -i",
        ),
        (("dev", "mnt", "-o", "warm=4X"), "'4X' is not a size"),
        (("dev", "mnt", "-x"), "No such option: -x"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_line(run(HELPER, *arguments), status=1)


def test_a_fake_mount_checks_and_mounts_nothing(mounter: Mounter) -> None:
    call = (HELPER, mounter.image, mounter.mountpoint, "-nfv", "-o", "ro,user=me")
    assert run(*call).returncode == 0
    assert not find_mount(mounter.mountpoint)


def test_a_sloppy_mount_passes_over_what_is_not_known(mounter: Mounter) -> None:
    options = f"fast,{own(mounter)}"
    result = run(HELPER, mounter.image, mounter.mountpoint, "-sn", "-o", options)
    assert result.returncode == 0, result
    mounter.adopt()


def test_every_option_reaches_the_kernel_as_it_is(mounter: Mounter) -> None:
    names = {"ro", "nosuid", "nodev", "noexec", "sync", "dirsync", "noatime"}
    mounter.mount("-o", ",".join(names))
    assert names <= flags_of(mounter.mountpoint)
    mounter.umount()
    mounter.mount("-o", "rw,suid,dev,exec,async")
    assert not names & flags_of(mounter.mountpoint)


def test_of_options_that_contradict_each_other_the_last_holds(mounter: Mounter) -> None:
    mounter.mount("-o", "ro,noexec", "-o", "exec,rw")
    assert not {"ro", "noexec"} & flags_of(mounter.mountpoint)
    mounter.umount()
    mounter.mount("-o", "rw,exec,noexec,ro")
    assert {"ro", "noexec"} <= flags_of(mounter.mountpoint)

"""`kvfs fsck`: what it says, what it ends with, what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvfs.engine.device import FileDevice
from kvfs.engine.format import BLOCK, SUPERBLOCK_ADDRESSES
from kvfs.engine.superblocks import read_superblocks
from tests.support.command import error_line
from tests.support.images import digest
from tests.support.mounter import Mounter, kvfs

CLEAN, CORRECTED, UNCORRECTED, FAILED, USAGE = 0, 1, 4, 8, 16


def fsck(mounter: Mounter, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kvfs("fsck", mounter.image, *arguments, check=False)


def damage(image: Path, address: int, length: int = BLOCK) -> None:
    with image.open("r+b") as file:
        file.seek(address)
        file.write(bytes(length))


@pytest.fixture
def unmounted(mounted: Mounter) -> Mounter:
    """A ring with a directory and two files, unmounted."""
    (mounted.mountpoint / "session").mkdir()
    (mounted.mountpoint / "session" / "layer").write_bytes(b"x" * 300_000)
    mounted.umount()
    return mounted


def address_of(mounter: Mounter, name: str) -> int:
    mounter.mount()
    stat = kvfs("stat", mounter.mountpoint / name, "--extents", "--json").stdout
    address: int = json.loads(stat)["extents"][0]["address"]
    mounter.umount()
    return address


def test_a_clean_ring_is_told_in_one_line(unmounted: Mounter) -> None:
    before = digest(unmounted.image)
    result = fsck(unmounted)
    assert result.returncode == CLEAN and result.stderr == ""
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{unmounted.image}: clean; 4 inodes, ")
    assert fsck(unmounted, "--repair").returncode == CLEAN
    assert digest(unmounted.image) == before


@pytest.mark.parametrize("arguments", [(), ("--repair",), ("-o", "ro")])
def test_a_mounted_ring_is_refused(mounted: Mounter, arguments: tuple[str, ...]) -> None:
    """Also one that is mounted read-only."""
    if "ro" in arguments:
        mounted.umount()
        mounted.mount(*arguments)
        arguments = ()
    line = error_line(fsck(mounted, *arguments), status=FAILED)
    assert f"is mounted on {mounted.mountpoint}" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is too small"), (bytes(20 * 1024**2), "no KVFS superblock")],
)
def test_what_is_no_ring_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert message in error_line(kvfs("fsck", path, check=False), status=FAILED)


def test_a_missing_image_is_told(tmp_path: Path) -> None:
    line = error_line(kvfs("fsck", tmp_path / "x", check=False), status=FAILED)
    assert "does not exist" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "Missing argument 'DEV'"), (("x", "--fast"), "No such option: --fast")],
)
def test_a_wrong_command_line_is_status_16(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_line(kvfs("fsck", *arguments, check=False), status=USAGE)


def test_a_lost_superblock_is_found_and_repaired(unmounted: Mounter) -> None:
    damage(unmounted.image, SUPERBLOCK_ADDRESSES[0])
    found = fsck(unmounted)
    assert found.returncode == UNCORRECTED
    first, last = found.stdout.splitlines()
    assert first == "superblock: slot 0: no KVFS superblock (byte 0 of the device)"
    assert f"1 error; correct what can be with: kvfs fsck {unmounted.image} --repair" in last
    repaired = fsck(unmounted, "--repair")
    assert repaired.returncode == CORRECTED
    assert "1 error corrected" in repaired.stdout
    assert fsck(unmounted).returncode == CLEAN


def test_a_lost_checkpoint_is_found_and_repaired(unmounted: Mounter) -> None:
    device = FileDevice(unmounted.image, read_only=True)
    superblock = read_superblocks(device, "ring").newest
    device.close()
    damage(unmounted.image, superblock.checkpoint.address)
    assert "index cannot be read" in unmounted.mount(check=False).stderr
    assert fsck(unmounted).returncode == UNCORRECTED
    assert fsck(unmounted, "--repair").returncode == CORRECTED
    assert fsck(unmounted).returncode == CLEAN
    unmounted.mount()
    assert (unmounted.mountpoint / "kept").read_text() == "kept"
    assert (unmounted.mountpoint / "session" / "layer").read_bytes() == b"x" * 300_000


def test_data_that_is_lost_is_told_by_its_path(unmounted: Mounter) -> None:
    address = address_of(unmounted, "session/layer")
    damage(unmounted.image, address)
    for arguments in ((), ("--repair",)):
        result = fsck(unmounted, "--json", *arguments)
        assert result.returncode == UNCORRECTED
        document = json.loads(result.stdout)
        (finding,) = document["findings"]
        assert finding["path"] == "/session/layer" and finding["lost"]
        assert finding["address"] == address
        assert not document["clean"] and not document["repaired"]
    assert "/session/layer" in fsck(unmounted).stdout


def test_json_of_a_clean_ring(unmounted: Mounter) -> None:
    document = json.loads(fsck(unmounted, "--json").stdout)
    assert document["clean"] and document["findings"] == []
    assert document["inodes"] == 4 and document["operation_log"] is None


def test_the_log_of_a_killed_daemon_is_told_and_not_given_up(mounted: Mounter) -> None:
    """What it answered and did not write is in the tmpfs; a repair would forget it."""
    (mounted.mountpoint / "answered").write_text("answered")
    mounted.kill()
    kvfs("umount", "--force", mounted.mountpoint)
    damage(mounted.image, SUPERBLOCK_ADDRESSES[1])
    result = fsck(mounted)
    assert result.returncode == UNCORRECTED
    assert f"mount it first with: kvfs mount MNT {mounted.image}" in result.stderr
    assert (
        str(mounted.warm_directory) in json.loads(fsck(mounted, "--json").stdout)["operation_log"]
    )
    before = digest(mounted.image)
    line = error_line(fsck(mounted, "--repair"), status=FAILED)
    assert "--repair --force" in line
    assert digest(mounted.image) == before
    mounted.mount()
    assert (mounted.mountpoint / "answered").read_text() == "answered"
    mounted.umount()
    assert fsck(mounted).returncode == CLEAN


def test_a_repair_may_be_forced_without_that_log(mounted: Mounter) -> None:
    mounted.kill()
    kvfs("umount", "--force", mounted.mountpoint)
    damage(mounted.image, SUPERBLOCK_ADDRESSES[1])
    assert fsck(mounted, "--repair", "--force").returncode == CORRECTED
    assert (fsck(mounted).returncode) == CLEAN
    mounted.mount()
    assert (mounted.mountpoint / "kept").exists()


def test_an_image_that_may_only_be_read_can_be_checked(unmounted: Mounter) -> None:
    unmounted.image.chmod(0o400)
    assert fsck(unmounted).returncode == CLEAN

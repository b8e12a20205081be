"""Damage under a real mount: done while it is not mounted, and while it is."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from kvfs.engine.check.load import load
from kvfs.engine.check.slots import read_slots
from kvfs.engine.device import FileDevice
from kvfs.engine.vault import Vault
from tests.support.command import error_line
from tests.support.images import digest
from tests.support.mounter import Mounter, kvfs
from tests.support.users import kvfs_as_nobody

MIB = 1024 * 1024


def paint(name: str, size: int) -> bytes:
    return (name.encode() + b"\xff" * 7).ljust(61, b"\0") * (size // 61 + 1)


def make(mountpoint: Path) -> dict[str, bytes]:
    """Files that the codec leaves as they are, by their paths."""
    made = {}
    for session in ("one", "two"):
        (mountpoint / session).mkdir()
        os.setxattr(mountpoint / session, "user.kvfs.codec", b"none")
        for layer, size in enumerate((100_000, 3 * MIB, 3 * MIB, 3 * MIB)):
            path = f"{session}/layer.{layer}"
            made[path] = paint(path, size)[:size]
            (mountpoint / path).write_bytes(made[path])
    return made


def extents(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(os.getxattr(path, "user.kvfs.extents"))
    return found


def damage(image: Path, address: int) -> None:
    """By another process's means, past the daemon."""
    fd = os.open(image, os.O_RDWR)
    try:
        old = os.pread(fd, 64, address)
        os.pwrite(fd, bytes(byte ^ 0xFF for byte in old), address)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_cold(path: Path, offset: int, length: int) -> bytes | int:
    """Bytes as the daemon gives them, not the page cache; or the errno."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(fd, length, offset)
    except OSError as failure:
        return failure.errno or 0
    finally:
        os.close(fd)


def expect(mountpoint: Path, made: dict[str, bytes], lost: str, hurt: dict[str, Any]) -> None:
    """All of it is there but for the one extent."""
    start, end = hurt["offset"], hurt["offset"] + hurt["length"]
    for path, data in made.items():
        for at in range(0, len(data), 64 * 1024):
            found = read_cold(mountpoint / path, at, 64 * 1024)
            # What the kernel reads at once may have the lost part in it.
            is_near = path == lost and at + MIB > start and at < end + MIB
            is_lost = path == lost and at < end and at + 64 * 1024 > start
            if is_lost or (is_near and found == errno.EIO):
                assert found == errno.EIO, (path, at)
            else:
                assert found == data[at : at + 64 * 1024], (path, at)


def test_what_rots_while_it_is_not_mounted_is_eio_alone_and_counted_once(
    mounter: Mounter, kv_mount: Path
) -> None:
    made = make(kv_mount)
    mounter.umount()
    mounter.mount("--scrub-every", "0")
    hurt = extents(kv_mount / "one/layer.2")[1]
    mounter.umount()
    damage(mounter.image, hurt["address"] + 1000)
    mounter.mount("--scrub-every", "0")
    for _ in range(2):
        expect(kv_mount, made, "one/layer.2", hurt)
    stats = mounter.stats()
    assert stats["errors"] == {"device": 0, "checksum": 1, "index": 0}
    metrics = (kv_mount / ".kvfs" / "metrics").read_text()
    assert 'kvfs_read_errors_total{kind="checksum"} 1.0' in metrics
    assert mounter.log.read_text().count("fails its checksum") == 1
    (kv_mount / "new").write_bytes(b"writes go on")
    assert kvfs("fsck", mounter.image, check=False).returncode != 0, "it is mounted"
    mounter.umount()
    result = kvfs("fsck", mounter.image, "--repair", check=False)
    assert result.returncode == 4 and "/one/layer.2" in result.stdout
    mounter.mount()
    expect(kv_mount, made, "one/layer.2", hurt)
    assert (kv_mount / "new").read_bytes() == b"writes go on"


def test_what_rots_under_the_mount_is_eio_alone_until_a_scrub_heals_it(
    mounter: Mounter, kv_mount: Path
) -> None:
    """What is in warm memory is written anew; what is not, is told."""
    made = make(kv_mount)
    fd = os.open(kv_mount / "one/layer.0", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    (warm,) = extents(kv_mount / "one/layer.0")
    os.setxattr(kv_mount / "two", "user.kvfs.demote", b"1")
    cold = extents(kv_mount / "two/layer.3")[0]
    for hurt in (warm, cold):
        damage(mounter.image, hurt["address"] + 5)
    expect(kv_mount, made, "two/layer.3", cold)
    result = kvfs("scrub", kv_mount, check=False)
    assert result.returncode == 1
    assert "/one/layer.0 from byte" in result.stdout and ": healed" in result.stdout
    assert "/two/layer.3 from byte" in result.stdout and "2 errors, 1 healed" in result.stdout
    assert mounter.stats()["scrub"]["healed"] == 1
    os.setxattr(kv_mount / "one", "user.kvfs.demote", b"1")
    expect(kv_mount, made, "two/layer.3", cold)
    mounter.umount()
    assert kvfs("fsck", mounter.image, check=False).stdout.count("lost") == 1


def test_an_index_that_rots_makes_the_mount_read_only_and_a_repair_brings_all_back(
    mounter: Mounter, kv_mount: Path
) -> None:
    """What was answered meanwhile reaches the log, so that the repair need give up nothing."""
    made = make(kv_mount)
    mounter.umount()
    device = FileDevice(mounter.image, read_only=True)
    slots = read_slots(device, "ring")
    trees = load(device, slots, Vault.unlock(slots.newest, None, "ring")).base.trees
    (table,) = [leaf for leaf in trees.leaves if leaf.keys.is_extents]
    device.close()
    damage(mounter.image, table.pointer.address)
    mounter.mount("--scrub-every", "0")
    assert read_cold(kv_mount / "one/layer.0", 0, 4096) == errno.EIO
    (kv_mount / "new").write_bytes(b"new" * 5000)
    assert "its index is damaged" in error_line(mounter.umount(check=False))
    assert "the index is damaged" in mounter.log.read_text()
    result = kvfs("fsck", mounter.image, "--repair", check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    mounter.mount()
    assert (kv_mount / "new").read_bytes() == b"new" * 5000
    for path, data in made.items():
        assert (kv_mount / path).read_bytes() == data
    assert kvfs("scrub", kv_mount).stdout.startswith(f"{kv_mount}: clean; ")


def test_the_ring_is_scrubbed_by_itself_and_not_again_before_it_is_time(
    mounter: Mounter, kv_mount: Path
) -> None:
    """Nor where nothing may be written, but then it is on demand."""
    make(kv_mount)
    mounter.umount()
    mounter.mount("--scrub-every", "0.00001")
    limit = time.monotonic() + 60
    while not mounter.stats()["scrub"]["passes"]:
        assert time.monotonic() < limit, mounter.stats()["scrub"]
        time.sleep(0.1)
    found = mounter.stats()["scrub"]
    assert found["errors"] == 0 and found["finished"] >= found["started"]
    assert "kvfs_scrub_passes_total" in (kv_mount / ".kvfs" / "metrics").read_text()
    assert int(os.getxattr(kv_mount, "user.kvfs.scrubbed")) > time.time() - 3600
    assert os.listxattr(kv_mount) == [], "it is not among what was set"
    mounter.umount()
    before = digest(mounter.image)
    mounter.mount("-o", "ro")
    assert (mounter.stats()["scrub"]["passes"], mounter.stats()["scrub"]["running"]) == (0, False)
    document = json.loads(kvfs("scrub", kv_mount, "--json").stdout)
    assert document["errors"] == 0 and document["done"] > 15 * MIB
    mounter.umount()
    assert digest(mounter.image) == before


def test_only_its_owner_and_root_begin_a_scrub(mounter: Mounter, kv_mount: Path) -> None:
    mounter.umount()
    mounter.mount("-o", "allow_other")
    kv_mount.chmod(0o755)
    mounter.directory.chmod(0o755)
    refused = kvfs_as_nobody("scrub", kv_mount)
    assert error_line(refused) == f"{kv_mount} belongs to another user; run as its owner or as root"
    assert not mounter.stats()["scrub"]["started"]

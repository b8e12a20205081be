"""`kvfs mkfs`: what it makes, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.command import error_line
from tests.support.images import digest
from tests.support.mounter import Mounter, kvfs

MIB = 1024**2


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A name where no file is yet."""
    return tmp_path / "ring.img"


def test_an_image_is_made_with_its_space_allocated(image: Path) -> None:
    made = json.loads(kvfs("mkfs", image, "--size", "128M", "--json").stdout)
    assert made["device"] == str(image)
    assert made["segment_size"] == MIB
    assert made["segments"] == 127
    assert made["size"] == 128 * MIB
    status = image.stat()
    assert status.st_size == 128 * MIB
    assert status.st_blocks * 512 >= status.st_size


@pytest.mark.parametrize(
    ("size", "segment_size"), [("13M", 1), ("200M", 3), ("1G", 15), ("4097M", 64)]
)
def test_segments_shrink_with_the_device(image: Path, size: str, segment_size: int) -> None:
    made = json.loads(kvfs("mkfs", image, "--size", size, "--json").stdout)
    assert made["segment_size"] == segment_size * MIB


def test_what_was_made_is_told(image: Path) -> None:
    first, second = kvfs("mkfs", image, "--size", "65M", "--segment-size", "4M").stdout.splitlines()
    assert first == f"formatted {image}: 65.0 MiB, 16 segments of 4.0 MiB"
    assert second.startswith("uuid ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "12M"), "is too small: a ring takes 13.0 MiB or more"),
        (("--size", "64M", "--segment-size", "16M"), "choose a smaller --segment-size"),
        (("--size", "64M", "--segment-size", "1500K"), "the segment size must be 1 MiB to 1 GiB"),
        (("--size", "1000000G"), "an image of 976.6 TiB cannot be made"),
    ],
)
def test_a_failure_leaves_no_image(image: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in error_line(kvfs("mkfs", image, *arguments, check=False))
    assert not image.exists()


def test_a_mistyped_device_is_not_made_an_image() -> None:
    device = Path("/dev/kvfs-no-such-device")
    assert "is it the right name" in error_line(kvfs("mkfs", device, check=False))
    assert not device.exists()


def test_a_directory_is_refused(tmp_path: Path) -> None:
    line = error_line(kvfs("mkfs", tmp_path, "--force", check=False))
    assert "neither a block device nor an image file" in line


def test_another_filesystem_is_named_and_kept_unless_forced(image: Path) -> None:
    if shutil.which("mkfs.ext4") is None or shutil.which("blkid") is None:
        pytest.skip("mkfs.ext4 or blkid is missing")
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    before = digest(image)
    line = error_line(kvfs("mkfs", image, check=False))
    assert "carries a signature of ext4" in line
    assert line.endswith(f"format it with: kvfs mkfs {image} --force")
    assert digest(image) == before
    kvfs("mkfs", image, "--force")
    assert subprocess.run(["blkid", "-p", image], check=False, capture_output=True).returncode == 2


@pytest.mark.parametrize("place", [5, 4096, MIB - 1])
def test_data_in_the_first_mib_is_kept_unless_forced(image: Path, place: int) -> None:
    image.write_bytes(b"\0" * place + b"x" + b"\0" * (32 * MIB))
    before = digest(image)
    assert "is not empty" in error_line(kvfs("mkfs", image, check=False))
    assert digest(image) == before
    kvfs("mkfs", image, "--force")


def test_a_ring_is_formatted_again_only_when_forced(image: Path) -> None:
    first = json.loads(kvfs("mkfs", image, "--size", "64M", "--json").stdout)
    before = digest(image)
    assert "holds a KVFS ring already" in error_line(kvfs("mkfs", image, check=False))
    assert digest(image) == before
    second = json.loads(kvfs("mkfs", image, "--size", "64M", "--force", "--json").stdout)
    assert second["uuid"] != first["uuid"]


def test_an_existing_image_keeps_its_size(image: Path) -> None:
    kvfs("mkfs", image, "--size", "64M")
    line = error_line(kvfs("mkfs", image, "--size", "65M", "--force", check=False))
    assert "exists and keeps its size" in line
    assert image.stat().st_size == 64 * MIB


def test_a_mounted_image_is_refused_even_when_forced(mounted: Mounter) -> None:
    line = error_line(kvfs("mkfs", mounted.image, "--force", check=False))
    assert "is in use by another KVFS process" in line
    mounted.umount()
    mounted.mount()
    assert (mounted.mountpoint / "kept").read_text() == "kept"


def test_files_of_the_ring_before_do_not_come_back(mounted: Mounter) -> None:
    mounted.umount()
    kvfs("mkfs", mounted.image, "--force")
    mounted.mount()
    assert list(mounted.mountpoint.iterdir()) == []

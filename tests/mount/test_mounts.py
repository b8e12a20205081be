"""The kernel's table of mounts, whatever else is mounted on the machine."""

from __future__ import annotations

import os
from pathlib import Path

from kvfs.mount.mounts import find_mount
from tests.support.mounter import Mounter, kvfs

# No UTF-8, what the kernel writes otherwise, and what ends a line elsewhere.
NAME = b"\xff\xfe a\tb\\c\x0b\x0c\r" + "\x85\u2028".encode()


def test_a_mountpoint_of_any_bytes_is_found_and_hides_no_other(
    mounter: Mounter, kv_mount: Path
) -> None:
    place = mounter.directory / os.fsdecode(NAME)
    place.mkdir()
    image = mounter.directory / "other.img"
    kvfs("mkfs", image, "--size", "64M")
    kvfs("mount", place, image, "--warm-dir", mounter.warm_directory, "--log", mounter.log)
    try:
        assert find_mount(place) is not None
        assert find_mount(kv_mount) is not None
        assert (place / ".kvfs").is_dir()
    finally:
        kvfs("umount", place)
    assert find_mount(place) is None

"""`kvfs profile`, and mounts with one."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import error_line
from tests.support.mounter import Mounter, kvfs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def config(mounter: Mounter) -> dict[str, Any]:
    return tomllib.loads((mounter.mountpoint / ".kvfs" / "config.toml").read_text())


def test_a_profile_is_printed_as_it_is() -> None:
    shipped = resources.files("kvfs.tiers") / "profiles" / "gov.toml"
    assert kvfs("profile", "gov").stdout == shipped.read_text()


@pytest.mark.parametrize("command", [("profile",), ("mount", "no-such-place", "no-such-device")])
def test_a_wrong_profile_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("warm_group = 0\n")
    option = ("--profile", file) if command[0] == "mount" else (file,)
    said = error_line(kvfs(*command, *option, check=False))
    assert said.endswith(f"profile {file}: warm_group = 0 must be a whole number from 1 to 1000")


def test_a_mount_shows_its_profile(mounter: Mounter) -> None:
    mounter.mount("--profile", "iot")
    shown = config(mounter)
    assert shown["profile"] == tomllib.loads(kvfs("profile", "iot").stdout)
    assert shown["store"]["checkpoint_seconds"] == 1800
    assert shown["store"]["unused_seconds"] == 604800


def test_a_changed_copy_and_an_option_that_goes_before_it(mounter: Mounter) -> None:
    file = mounter.directory / "mine.toml"
    text = kvfs("profile", "gov").stdout
    file.write_text(text.replace('"gov"', '"mine"').replace("warm_group = 10", "warm_group = 3"))
    kvfs(
        "mount", "mnt", "ring.img", "--profile", "mine.toml", "--checkpoint", "7", "--log", "log",
        "--warm-dir", mounter.warm_directory, cwd=mounter.directory,
    )  # fmt: skip
    mounter.adopt()
    shown = config(mounter)
    assert (shown["profile"]["name"], shown["profile"]["warm_group"]) == ("mine", 3)
    assert shown["store"]["checkpoint_seconds"] == 7


def test_without_a_profile_the_defaults_hold(mounter: Mounter) -> None:
    mounter.mount()
    shown = config(mounter)
    assert shown["profile"]["name"] == "default"
    assert (shown["profile"]["warm_fill_pct"], shown["profile"]["warm_group"]) == (85, 10)
    assert shown["store"]["checkpoint_seconds"] == 300

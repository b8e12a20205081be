"""What a shell offers: verbs, options, profiles, and where a KVFS is mounted."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.support.mounter import KVFS, Mounter


def offered(*words: str) -> list[str]:
    """By bash, with the last word to be completed."""
    script = """
        eval "$(_KVFS_COMPLETE=source_bash kvfs)"
        COMP_WORDS=(kvfs "$@") COMP_CWORD=$#
        _kvfs_completion kvfs
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    result = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{KVFS.parent}:{os.environ['PATH']}"},
    )
    assert result.stderr == ""
    return result.stdout.split()


def test_verbs_options_and_profiles() -> None:
    assert offered("um") == ["umount"]
    assert offered("mount", "--warm-") == ["--warm-dir"]
    assert offered("profile", "") == ["gov", "ecommerce", "iot"]
    assert offered("mount", "--profile", "e") == ["ecommerce"]


def test_mountpoints(mounter: Mounter) -> None:
    mountpoint = str(mounter.mountpoint)
    assert offered("ls", mountpoint[:-1]) == []
    mounter.mount()
    for verb in ("umount", "ls", "stat", "log", "scrub", "bench"):
        assert offered(verb, mountpoint[:-1]) == [mountpoint]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_its_code_is_that_shells(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing")
    code = subprocess.run(
        [KVFS],
        check=True,
        capture_output=True,
        env=os.environ | {"_KVFS_COMPLETE": f"source_{shell}"},
    ).stdout
    assert code
    subprocess.run([shell, "-n", "/dev/stdin"], check=True, input=code)

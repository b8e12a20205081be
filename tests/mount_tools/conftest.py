"""Helpers for tests of the command."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounter import Mounter


@pytest.fixture
def mounted(mounter: Mounter) -> Mounter:
    """A KVFS of 512 MiB, mounted, with a file `kept` in it that is durable."""
    mounter.mount()
    (mounter.mountpoint / "kept").write_text("kept")
    return mounter


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Path]:
    """A block device of 256 MiB. Skips where none may be made."""
    if shutil.which("losetup") is None:
        pytest.skip("losetup is missing")
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(256 * 1024**2)
    command = ["losetup", "--find", "--show", str(backing)]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device may be made: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    yield device
    subprocess.run(["losetup", "--detach", str(device)], check=True)
    backing.unlink()

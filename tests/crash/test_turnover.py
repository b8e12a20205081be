"""A nearly full ring is turned over with kills meanwhile: every byte and all space is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "turnover.py"


def turn_over(directory: Path, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, "--dir", directory, *arguments],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every byte is right" in result.stdout


def test_a_ring_is_turned_over_twice(fuse: None, tmp_path: Path) -> None:
    small = ("--size", "96M", "--segment-size", "1M", "--turns", "2", "--kills", "2")
    turn_over(tmp_path, *small, "--seed", "3")


@pytest.mark.crash_long
@pytest.mark.timeout(1800)
def test_a_ring_is_turned_over_ten_times(fuse: None, tmp_path: Path) -> None:
    turn_over(tmp_path)

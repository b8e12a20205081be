"""The long trials, short: each runs, and finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def output_of(script: str, directory: Path, *arguments: str) -> str:
    command = [sys.executable, SCRIPTS / script, "--dir", directory, *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_writers_that_fill_a_ring_lose_nothing_and_leave_nothing(
    fuse: None, tmp_path: Path
) -> None:
    """A round that ends with a kill, without reclaim, and one with it."""
    small = ("--rounds", "2", "--writers", "4", "--full", "2")
    told = output_of("full.py", tmp_path, *small, "--seed", "3")
    assert "every byte is right" in told
    assert " 0 units reclaimed" not in told


def test_no_foreign_byte_is_seen_while_all_is_used_again(fuse: None, tmp_path: Path) -> None:
    short = ("--minutes", "0.15", "--kills", "2", "--writers", "3", "--hunters", "2")
    told = output_of("hunt.py", tmp_path, *short)
    assert "no foreign byte" in told
    assert "looked at 0 MiB" not in told


@pytest.mark.timeout(600)
def test_a_loaded_mount_fails_nobody_and_a_wedged_reader_holds_up_nobody(
    fuse: None, tmp_path: Path
) -> None:
    figures = tmp_path / "soak.json"
    short = ("--minutes", "0.2", "--processes", "8", "--size", "512M", "--warm", "128M")
    told = output_of("soak.py", tmp_path, *short, "--pause-ms", "20", "--json", str(figures))
    assert "no process was held up" in told
    document = json.loads(figures.read_text())
    assert document["faults"] == []
    assert document["latency_ms"]["read <= 64 KiB"]["wedged"]["count"] > 0

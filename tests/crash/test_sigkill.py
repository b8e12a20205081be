"""SIGKILL of the real daemon under a writing load: every promise of a manifest is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill.py"


def kill(directory: Path, kills: int, seed: int) -> None:
    command = [sys.executable, SCRIPT, "--kills", str(kills), "--seed", str(seed)]
    result = subprocess.run(
        [*command, "--dir", directory], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{kills} kills" in result.stdout
    assert "none broken" in result.stdout


def test_nothing_answered_is_lost_when_the_daemon_is_killed(fuse: None, tmp_path: Path) -> None:
    kill(tmp_path, kills=5, seed=7)


@pytest.mark.crash_long
@pytest.mark.timeout(1800)
def test_nothing_answered_is_lost_in_fifty_kills(fuse: None, tmp_path: Path) -> None:
    kill(tmp_path, kills=50, seed=50)

"""Many sessions behind a real mount: right at any scale; a million files within the goals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import scale


def test_sessions_made_by_the_library_are_served(fuse: None, tmp_path: Path) -> None:
    image = tmp_path / "ring.img"
    scale.build(image, sessions=40)
    served = scale.serve(image, sessions=40, visits=40)
    assert served.wrong == []
    assert served.listed == 40


@pytest.mark.scale
@pytest.mark.timeout(3600)
def test_a_million_files(fuse: None, tmp_path: Path) -> None:
    command = [sys.executable, scale.__file__, "--dir", tmp_path]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr

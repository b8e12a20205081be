"""What a failed command must look like."""

from __future__ import annotations

import subprocess


def error_line(result: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """The one line on stderr of a command that failed as it should."""
    assert result.returncode == status, result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvfs: "), line
    return line.removeprefix("kvfs: ")

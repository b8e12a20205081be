"""What a failed command must look like."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

from mount_tools.main import app, run


def error_line(result: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """The one line on stderr of a command that failed as it should."""
    assert result.returncode == status, result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvfs: "), line
    return line.removeprefix("kvfs: ")


def refused(*arguments: str, status: int = 1) -> str:
    """That line, of a command that ends before it does anything: run in this process."""
    output, errors = StringIO(), StringIO()
    with (
        patch.object(sys, "argv", ["kvfs", *arguments]),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        ended = run(app, "kvfs")
    result = subprocess.CompletedProcess(
        list(arguments), ended, output.getvalue(), errors.getvalue()
    )
    return error_line(result, status)

"""The command as another user runs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.mounter import COMMAND_SECONDS

# Python may lie below a directory of root's alone: a first run imports what is imported late.
_PROGRAM = """
import contextlib, os
from mount_tools.common import CommandError
from mount_tools.main import app, main
with contextlib.suppress(CommandError):
    app(["ls", "/", "--json"], standalone_mode=False)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
main()
"""


def kvfs_as_nobody(*arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """Skips where this process may not become another user."""
    if os.geteuid() != 0:
        pytest.skip("only root may run the command as another user")
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )

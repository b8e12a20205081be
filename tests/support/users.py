"""What other users do, and the command as one of them runs it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from tests.support.mounter import COMMAND_SECONDS

T = TypeVar("T")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")

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


def as_user(uid: int, work: Callable[[], T], groups: Sequence[int] = ()) -> T:
    """What `work` returns in a process of that user, whose group has the same number. Raises
    what it raises."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        answer: tuple[T | None, Exception | None]
        try:
            os.close(read_end)
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            answer = work(), None
        except Exception as failure:
            answer = None, failure
        with os.fdopen(write_end, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        value, failure = pickle.load(pipe)
    os.waitpid(child, 0)
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]

"""Run the rest of the program in the background, and wait until it is ready."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mount_tools.common import CommandError
from mount_tools.logs import LogFile, log_to, open_log

_READY = b"+"
_FAILED = b"-"


def run_in_background(
    work: Callable[[Callable[[], None]], None],
    explain: Callable[[Exception], str],
    log: Path,
    *,
    as_json: bool,
) -> None:
    """Call `work(ready)` in a daemon and return once it has called `ready`.

    The daemon's output and its log, `as_json` or as text, go to the file `log`. Raises
    CommandError with what `explain` made of the daemon's exception when it failed before it was
    ready. No thread may exist yet: the fork would lose it.
    """
    output = _open_log(log)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _become_daemon(output, write_end)
        _work_and_exit(work, explain, write_end, log, as_json=as_json)
    os.close(write_end)
    os.close(output)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    if answer.startswith(_FAILED):
        raise CommandError(os.fsdecode(answer.removeprefix(_FAILED)))
    if answer != _READY:
        raise CommandError(f"the daemon ended without a word; its log is {log}")


def _open_log(log: Path) -> int:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_log(log) as stream:
            return os.dup(stream.fileno())
    except OSError as failure:
        raise CommandError(
            f"the log {log} cannot be written ({failure.strerror}); choose one with --log FILE"
        ) from None


def _become_daemon(output: int, kept: int) -> None:
    os.setsid()
    # The second fork: a session's leader could get a terminal by opening one.
    if os.fork():
        os._exit(0)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A pipe of the caller's that stayed open would keep its reader waiting.
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _work_and_exit(
    work: Callable[[Callable[[], None]], None],
    explain: Callable[[Exception], str],
    write_end: int,
    log: Path,
    *,
    as_json: bool,
) -> NoReturn:
    """Never returns into the code of the parent, whose files and handlers are not ours."""
    log_to(LogFile(log), as_json=as_json)
    waiting = True

    def tell(message: bytes) -> None:
        nonlocal waiting
        os.write(write_end, message)
        os.close(write_end)
        waiting = False

    status = 1
    try:
        work(lambda: tell(_READY))
        status = 0
    except Exception as failure:
        reason = explain(failure)
        logging.error("%s", reason, exc_info=not waiting)
        if waiting:
            tell(_FAILED + os.fsencode(reason))
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(status)

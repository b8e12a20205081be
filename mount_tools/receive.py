"""`kvfs receive`: a session from a pipe."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mount_tools.common import CommandError, format_size, parse_path, print_json, say
from mount_tools.moving.bytes import widen_pipe
from mount_tools.moving.meter import meter
from mount_tools.moving.places import session_at, target_at
from mount_tools.moving.receiving import receive as receive_session
from mount_tools.moving.temporary import ending_in_order


def receive(
    session: Annotated[
        Path,
        typer.Argument(parser=parse_path, metavar="SESSION", help="The directory to be made."),
    ],
    base: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="BASE",
            help="For what was sent with --since: the copy of that session here, if it is not "
            "beside SESSION under the name that the sender has for it.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the session, if it exists.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a session of what `kvfs send` writes.

    \b
    It appears when all of it is there, checked and durable; else nothing does. What was received
    belongs to who runs this.

    \b
    Examples:
      kvfs send /mnt/kv/agent-7 | kvfs receive /mnt/other/agent-7
      ssh host kvfs send /mnt/kv/agent-7 | kvfs receive /mnt/kv/agent-7
      kvfs receive /mnt/kv/agent-7 --force < agent-7.kvfs
      kvfs receive /mnt/kv/agent-7 --base /mnt/kv/backup/monday < difference
    """
    fd = sys.stdin.fileno()
    if os.isatty(fd):
        raise CommandError("this would read from the terminal: pipe kvfs send to it")
    target = target_at(session, force=force)
    basis = session_at(base) if base else None
    widen_pipe(fd)
    began = time.monotonic()
    with ending_in_order(), meter(f"receive {target.name}") as begins:
        received = receive_session(fd, target, basis, begins, replace=force)
    if json_output:
        report = asdict(received) | {"session": str(target), "content": f"{received.content:032x}"}
        report["base"] = None if received.base is None else f"{received.base:032x}"
        print_json(report | {"seconds": round(time.monotonic() - began, 3)})
    else:
        say(f"{target}: {received.entries} names, {format_size(received.size)} received")

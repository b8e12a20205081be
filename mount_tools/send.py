"""`kvfs send`: a session, or what changed since another one, into a pipe."""

from __future__ import annotations

import os
import stat
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mount_tools.common import CommandError, parse_path, warn_json
from mount_tools.moving.bytes import widen_pipe
from mount_tools.moving.meter import meter
from mount_tools.moving.places import session_at
from mount_tools.moving.sending import send as send_session
from mount_tools.moving.stream import StreamWriter
from mount_tools.moving.temporary import ending_in_order


def send(
    session: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="SESSION", help="A directory of a mount.")
    ],
    since: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="BASE",
            help="Only what differs from this session, which the other end has too.",
        ),
    ] = None,
    compress: Annotated[
        bool,
        typer.Option("--compress", help="Shrink what goes out (byte planes and zstd)."),
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Say on stderr, as JSON, what was sent.")
    ] = False,
) -> None:
    """Write a session to stdout, for `kvfs receive` at the other end of a pipe.

    \b
    What is sent is the session as it is at the start (a hidden fork of it, removed at the end):
    an agent may go on meanwhile. With --since only blocks that the two sessions do not share are
    read and sent; the other end builds on its own copy of BASE, and checks that it is the same.

    \b
    Examples:
      kvfs send /mnt/kv/agent-7 | kvfs receive /mnt/other/agent-7
      kvfs send /mnt/kv/agent-7 | ssh host kvfs receive /mnt/kv/agent-7
      kvfs send --compress /mnt/kv/agent-7 > agent-7.kvfs
      kvfs fork /mnt/kv/agent-7 monday     # from here on what changed alone
      kvfs send /mnt/kv/monday | ssh host kvfs receive /mnt/kv/monday
      kvfs send /mnt/kv/agent-7 --since /mnt/kv/monday | ssh host kvfs receive /mnt/kv/agent-7
    """
    fd = sys.stdout.fileno()
    if os.isatty(fd):
        raise CommandError("this would go to the terminal: pipe it to kvfs receive, or redirect it")
    source, base = session_at(session), session_at(since) if since else None
    widen_pipe(fd)
    writer = StreamWriter(fd, compress=compress)
    began = time.monotonic()
    try:
        with ending_in_order(), meter(f"send {source.name}") as begins:
            sent = send_session(source, base, writer, begins)
            _flush(fd)
    except BrokenPipeError:
        raise CommandError(
            f"nobody reads any more: the other end has ended, after {writer.written} bytes"
        ) from None
    if json_output:
        report = asdict(sent) | {"session": str(source), "content": f"{sent.content:032x}"}
        report["base"] = None if sent.base is None else f"{sent.base:032x}"
        warn_json(report | {"seconds": round(time.monotonic() - began, 3)})


def _flush(fd: int) -> None:
    """To the device, if it is a file."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fsync(fd)

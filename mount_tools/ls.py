"""`kvfs ls`: the sessions of a mount."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvfs.mount.mounts import mounts
from mount_tools.arguments import complete_mountpoint
from mount_tools.common import CommandError, format_size, parse_path, print_json, print_table, say
from mount_tools.mountpoints import may_enter
from mount_tools.sessions import Session, find_sessions, locate, ratio

_COLUMNS = ("session", "tokens", "layers", "size", "stored", "ratio", "tier", "last use", "model")
_NUMERIC = ("tokens", "layers", "size", "stored", "ratio")


def ls(
    path: Annotated[
        Path | None,
        typer.Argument(
            parser=parse_path,
            metavar="MNT",
            autocompletion=complete_mountpoint,
            help="A mountpoint, or a directory in it. Not needed while one KVFS is mounted.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the sessions: tokens, size, what they take on the device, where they are, model.

    \b
    Examples:
      kvfs ls
      kvfs ls /mnt/kv --json
    """
    top = locate(path)[1] if path else _only_mountpoint()
    if not top.is_dir():
        raise CommandError(f"{top} is not a directory; look at a file with: kvfs stat {top}")
    sessions = sorted(find_sessions(top), key=lambda session: session.name)
    if json_output:
        print_json([_without_files(session) for session in sessions])
    elif sessions:
        print_table(_COLUMNS, map(_row, sessions), _NUMERIC)
    else:
        say(f"no sessions in {top}")


def _only_mountpoint() -> Path:
    found = [mount.mountpoint for mount in mounts() if may_enter(mount.mountpoint)]
    if not found:
        raise CommandError(
            "no KVFS is mounted that this user may enter; mount one with: kvfs mount MNT DEV"
        )
    if len(found) > 1:
        places = ", ".join(map(str, found))
        raise CommandError(f"several KVFS are mounted, name one: {places}")
    return locate(found[0])[1]


def _without_files(session: Session) -> dict[str, object]:
    document = session.as_json()
    del document["files"]
    return document


def _row(session: Session) -> list[str]:
    shrunk = ratio(session.size, session.stored)
    return [
        session.name,
        "-" if session.tokens is None else str(session.tokens),
        str(session.layers),
        format_size(session.size),
        format_size(session.stored),
        "-" if shrunk is None else f"{shrunk:.2f}",
        session.tier or "-",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.last_use)),
        session.model or "-",
    ]

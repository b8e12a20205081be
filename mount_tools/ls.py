"""`kvfs ls`: the sessions of a mount."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvfs.mount.mounts import mounts
from mount_tools.arguments import complete_mountpoint
from mount_tools.common import (
    CommandError,
    format_size,
    parse_age,
    parse_path,
    print_json,
    print_table,
    say,
)
from mount_tools.mountpoints import may_enter
from mount_tools.selection import Order, Wanted, arranged
from mount_tools.sessions import Session, find_sessions, locate, ratio

_COLUMNS = (
    "session",
    "tokens",
    "layers",
    "size",
    "stored",
    "ratio",
    "tier",
    "heat",
    "last use",
    "model",
)
_NUMERIC = ("tokens", "layers", "size", "stored", "ratio", "heat")


class Tier(str, Enum):
    """Where the bytes of a session are."""

    WARM = "warm"
    COLD = "cold"
    MIXED = "mixed"


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
    order: Annotated[
        Order,
        typer.Option("--sort", help="Figures from the largest on, uses from the last on."),
    ] = Order.NAME,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    tier: Annotated[
        Tier | None, typer.Option(help="Only those that are there.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Only those whose model has this in its name."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only those with such names, as in 'team/*'."),
    ] = None,
    older: Annotated[
        float | None,
        typer.Option(
            parser=parse_age,
            metavar="AGE",
            help="Only those that were not used for so long: 30s, 15m, 1h, 7d.",
            show_default=False,
        ),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Only those that stay.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the sessions: tokens, size, what they take on the device, where they are, model.

    \b
    Examples:
      kvfs ls
      kvfs ls /mnt/kv --json
      kvfs ls /mnt/kv --sort stored --tier cold --older 1h
      kvfs ls /mnt/kv --model llama --name 'team/*' --sort heat --reverse
    """
    top = locate(path)[1] if path else _only_mountpoint()
    if not top.is_dir():
        raise CommandError(f"{top} is not a directory; look at a file with: kvfs stat {top}")
    older_than = None if older is None else time.time() - older
    wanted = Wanted(name, model, None if tier is None else tier.value, older_than, pinned)
    found = list(find_sessions(top))
    sessions = arranged(filter(wanted.takes, found), order, reverse=reverse)
    if json_output:
        print_json([_without_files(session) for session in sessions])
    elif sessions:
        print_table(_COLUMNS, map(_row, sessions), _NUMERIC)
    else:
        say(f"none of the {len(found)} sessions in {top}" if found else f"no sessions in {top}")


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
        "-" if session.heat is None else f"{session.heat:.3g}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.last_use)),
        session.model or "-",
    ]

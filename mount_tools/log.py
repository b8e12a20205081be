"""`kvfs log`: what was reclaimed, and why."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

import typer

from mount_tools.arguments import Mountpoint
from mount_tools.common import format_size, print_json, print_table, say
from mount_tools.sessions import locate

_LOG = ".kvfs/log"
_COLUMNS = ("time", "what", "stored", "last use", "why")
_NUMERIC = ("stored",)


def log(
    mountpoint: Mountpoint,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what was reclaimed, the oldest first: when, what, how much, and why.

    \b
    Examples:
      kvfs log /mnt/kv
      kvfs log /mnt/kv --json
    """
    mount, _ = locate(mountpoint)
    lines = (mount.mountpoint / _LOG).read_text(errors="surrogateescape").splitlines()
    entries = [json.loads(line) for line in lines]
    if json_output:
        print_json(entries)
        return
    if entries:
        print_table(_COLUMNS, map(_row, entries), _NUMERIC)
    else:
        say(f"nothing was reclaimed from {mount.mountpoint}")


def _row(entry: dict[str, Any]) -> list[str]:
    return [
        _moment(entry["time_ns"]),
        entry["path"],
        format_size(entry["stored"]),
        _moment(entry["used_ns"]),
        entry["why"],
    ]


def _moment(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9).astimezone().isoformat(" ", "seconds")

"""`kvfs export`: a session as one file that others can read."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from mount_tools.common import format_size, parse_path, print_json, say, warn_json
from mount_tools.moving.archive import write_archive
from mount_tools.moving.meter import meter
from mount_tools.moving.outlet import STANDARD, outlet
from mount_tools.moving.places import laid, require_unchanged, session_at, snapshot
from mount_tools.moving.safetensors import write_tensors
from mount_tools.moving.temporary import ending_in_order


def export(
    session: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="SESSION", help="A directory of a mount.")
    ],
    file: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="FILE", help="To be made; - is stdout.")
    ],
    tar: Annotated[
        bool, typer.Option("--tar", help="As a tar archive: any files, attributes, links, holes.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file, if it exists.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON; on stderr, if FILE is -.")
    ] = False,
) -> None:
    """Write a session to a file: safetensors, or with --tar any directory as an archive.

    \b
    In safetensors each layer is a tensor of its name, of shape [tokens, 2, KV heads, head size]
    and the model's element type; session.json and what says how files are stored is metadata.
    It is the session as it is at the start: an agent may go on meanwhile.

    \b
    Examples:
      kvfs export /mnt/kv/agent-7 agent-7.safetensors
      kvfs export --tar /mnt/kv/vllm vllm.tar
      kvfs export --tar /mnt/kv/agent-7 - | ssh host 'tar x --xattrs -C /mnt/kv'
      kvfs import agent-7.safetensors /mnt/kv/agent-8
    """
    source = session_at(session)
    began = time.monotonic()
    with (
        ending_in_order(),
        outlet(file, replace=force) as fd,
        meter(f"export {source.name}") as begins,
        snapshot(source) as frozen,
    ):
        mine = laid(frozen)
        if tar:
            size = write_archive(mine, os.fsencode(source.name), fd, begins)
        else:
            size = write_tensors(mine, fd, begins)
        require_unchanged(mine)
    if json_output:
        report = {"session": str(source), "file": str(file), "entries": len(mine.entries)}
        told = report | {"size": size, "seconds": round(time.monotonic() - began, 3)}
        (warn_json if file == STANDARD else print_json)(told)
    elif file != STANDARD:
        say(f"{file}: {len(mine.entries)} names, {format_size(size)}")

"""`kvfs import`: a session from what `kvfs export` wrote, or others."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mount_tools.common import CommandError, parse_path, print_json, say
from mount_tools.moving.archive import is_archive, read_archive
from mount_tools.moving.landing import landing
from mount_tools.moving.meter import meter
from mount_tools.moving.outlet import STANDARD
from mount_tools.moving.places import target_at
from mount_tools.moving.safetensors import is_tensors, read_tensors
from mount_tools.moving.source import Source
from mount_tools.moving.temporary import ending_in_order


def import_(
    file: Annotated[Path, typer.Argument(parser=parse_path, metavar="FILE", help="- is stdin.")],
    session: Annotated[
        Path,
        typer.Argument(parser=parse_path, metavar="SESSION", help="The directory to be made."),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Replace the session, if it exists.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a session of a safetensors file or a tar archive: it tells by itself which.

    \b
    The session appears when all of it is there and durable; else nothing does. It belongs to
    who runs this. An archive holds one directory; absolute names, `..`, devices and links that
    lead out of it are refused.

    \b
    Examples:
      kvfs import agent-7.safetensors /mnt/kv/agent-7
      kvfs import vllm.tar /mnt/kv/vllm --force
      ssh host tar c --xattrs -C /mnt/kv agent-7 | kvfs import - /mnt/kv/agent-7
    """
    target = target_at(session, force=force)
    began = time.monotonic()
    with ending_in_order(), _opened(file) as fd:
        source = Source(fd)
        if is_archive(source.head):
            read = read_archive
        elif is_tensors(source.head):
            read = read_tensors
        else:
            raise CommandError(f"{file} is neither a safetensors file nor a tar archive")
        with meter(f"import {target.name}") as begins, landing(target, replace=force) as new:
            read(source, new, begins)
            new.land()
    if json_output:
        report = {"session": str(target), "file": str(file), "entries": new.entries}
        print_json(report | {"seconds": round(time.monotonic() - began, 3)})
    else:
        say(f"{target}: {new.entries} names imported")


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    if file == STANDARD:
        fd = sys.stdin.fileno()
        if os.isatty(fd):
            raise CommandError("this would read from the terminal: redirect it, or name a file")
        yield fd
        return
    with open(file, "rb", buffering=0) as opened:
        yield opened.fileno()

"""Arguments that several verbs take, and what the shell offers for them. Where that is nothing,
it offers files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvfs.mount.mounts import mounts
from kvfs.tiers import profiles
from mount_tools.common import parse_path


def complete_mountpoint(incomplete: str) -> list[str]:
    """Where a KVFS is mounted; names that would upset a terminal are left out."""
    places = (str(mount.mountpoint) for mount in mounts())
    return [place for place in places if place.startswith(incomplete) and place.isprintable()]


def complete_profile(incomplete: str) -> list[str]:
    return [name for name in profiles.NAMES if name.startswith(incomplete)]


Mountpoint = Annotated[
    Path, typer.Argument(parser=parse_path, metavar="MNT", autocompletion=complete_mountpoint)
]

"""`kvfs fork`: a copy of a session that shares its bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mount_tools.common import CommandError, parse_path, say
from mount_tools.sessions import locate


def fork(
    session: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="SESSION", help="A directory of a mount.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The copy's name, beside it.")],
) -> None:
    """Make a copy of a session, beside it, that shares its bytes: both then go on apart.

    \b
    Examples:
      kvfs fork /mnt/kv/agent-7 agent-7-try
    """
    mount, path = locate(session)
    if path == mount.mountpoint or not path.is_dir():
        raise CommandError(f"{session} is not a session: name a directory below {mount.mountpoint}")
    if name in ("", ".", "..") or "/" in name:
        raise CommandError(f"{name!r} is not a name: the copy lies beside {path.name}, without a /")
    try:
        os.setxattr(path, "user.kvfs.fork", os.fsencode(name))
    except FileExistsError:
        raise CommandError(f"{path.parent / name} exists; choose another name") from None
    except OSError as failure:
        raise CommandError(f"{session} cannot be forked to {name}: {failure.strerror}") from None
    say(str(path.parent / name))

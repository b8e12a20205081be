"""`kvfs scrub`: have a mounted ring read and compared with its checksums now."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mount_tools.arguments import Mountpoint
from mount_tools.common import CommandError, format_size, print_json, say, warn
from mount_tools.mountpoints import read_stats
from mount_tools.sessions import locate

_XATTR = "user.kvfs.scrub"
_POLL_SECONDS = 0.2


def scrub(
    mountpoint: Mountpoint,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Read all that is live in a mounted ring and compare it with its checksums.

    \b
    It is read in the background, behind what others read, at the mount's --scrub-rate. What is
    rotten and has a clean copy in memory is written anew. Ends with 1 if anything was rotten.

    \b
    Examples:
      kvfs scrub /mnt/kv
      kvfs scrub /mnt/kv --json
    """
    root = locate(mountpoint)[0].mountpoint
    try:
        found = _watched(root, _begun(root))
    except KeyboardInterrupt:
        warn(f"interrupted; the scrub goes on, kvfs stat {root} shows how far it is")
        return 1
    if json_output:
        print_json(found)
    else:
        _print_report(root, found)
    return 1 if found["errors"] else 0


def _begun(root: Path) -> int:
    """How many passes have ended before this one."""
    try:
        return int(os.getxattr(root, _XATTR))
    except OSError as failure:
        if failure.errno == errno.EPERM:
            raise CommandError(
                f"{root} belongs to another user; run as its owner or as root"
            ) from None
        raise


def _watched(root: Path, passes: int) -> dict[str, Any]:
    """What was found, once it has ended."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("scrub", total=None)
        while True:
            found: dict[str, Any] = read_stats(root).document["scrub"]
            if found["passes"] > passes:
                return found
            bar.update(task, completed=found["done"], total=found["total"])
            time.sleep(_POLL_SECONDS)


def _print_report(root: Path, found: dict[str, Any]) -> None:
    for rot in found["rotten"]:
        say(_line(rot))
    errors, healed = found["errors"], sum(rot["healed"] for rot in found["rotten"])
    what = "clean" if not errors else f"{errors} error{'s' if errors > 1 else ''}, {healed} healed"
    say(f"{root}: {what}; {format_size(found['done'])} read")
    if errors > healed:
        say("what is lost there reads as EIO; for the index: kvfs umount, then kvfs fsck --repair")


def _line(rot: dict[str, Any]) -> str:
    places = [_place(file) for file in rot["files"]] + [f"byte {rot['address']} of the device"]
    return f"{rot['what']} ({', '.join(places)}){': healed' if rot['healed'] else ''}"


def _place(file: dict[str, Any]) -> str:
    whose = f"inode {file['inode']}" if file["path"] is None else f"/{file['path']}"
    return f"{whose} from byte {file['offset']} to {file['offset'] + file['length']}"

"""`mount.kvfs`: what mount(8) calls for `mount -t kvfs` and for lines of /etc/fstab."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mount_tools import main as kvfs
from mount_tools.options import is_known, parse_options, split_options

# mount(8)'s exit statuses.
_USAGE, _FAILURE = 1, 32

# Options of `kvfs mount` that a line of fstab may set as NAME=VALUE.
_SETTINGS = (
    "warm-dir", "warm", "log", "deadline", "checkpoint", "profile", "scrub-rate", "scrub-every",
    "key-file", "keyring", "shadow", "metrics-port", "metrics-address",
)  # fmt: skip
_SWITCHES = {"reclaim": "--reclaim", "noreclaim": "--no-reclaim", "log-json": "--log-json"}

# What mount(8), systemd and the kernel keep for themselves, or what holds anyway.
_FOR_OTHERS = {
    "auto", "noauto", "defaults", "nofail", "_netdev", "silent", "loud",
    "user", "nouser", "users", "owner", "group",
    "atime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime",
    "lazytime", "nolazytime",
}  # fmt: skip
_FOR_OTHERS_PREFIXES = ("x-", "X-", "comment=", "user=")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def mount_kvfs(
    device: Annotated[str, typer.Argument(metavar="DEV", help="Block device or image file.")],
    mountpoint: Annotated[str, typer.Argument(metavar="MNT", help="An empty directory.")],
    options: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            metavar="OPTION,...",
            help=f"As of `kvfs mount`, {', '.join(_SWITCHES)}, and "
            f"{', '.join(f'{name}=VALUE' for name in _SETTINGS)}.",
        ),
    ] = None,
    fake: Annotated[bool, typer.Option("-f", help="Check the options, mount nothing.")] = False,
    sloppy: Annotated[bool, typer.Option("-s", help="Pass over options not known.")] = False,
    _no_mtab: Annotated[bool, typer.Option("-n", help="Nothing: there is no mtab.")] = False,
    _verbose: Annotated[bool, typer.Option("-v", help="Nothing: it always tells.")] = False,
    _type: Annotated[str, typer.Option("-t", metavar="TYPE", help="Nothing: kvfs.")] = "kvfs",
) -> None:
    """Mount a ring for mount(8), which finds this program in /sbin alone.

    \b
    Examples:
      ln -s "$(command -v mount.kvfs)" /sbin/
      mount -t kvfs /dev/nvme1n1 /mnt/kv -o noexec,warm=8G
    """
    settings: list[str] = []
    words: list[str] = []
    for word in split_options(options or []):
        name, assigned, _ = word.partition("=")
        if assigned and name in _SETTINGS:
            settings.append(f"--{word}")
        elif word in _SWITCHES:
            settings.append(_SWITCHES[word])
        elif word == "remount":
            raise typer.BadParameter("-o remount is the kernel's alone: call mount with -i")
        elif not _is_for_others(word) and (is_known(word) or not sloppy):
            words.append(word)
    parse_options(words)
    if not fake:
        chosen = [f"-o{','.join(words)}"] if words else []
        command = ["mount", *settings, *chosen, "--", mountpoint, device]
        kvfs.app(command, standalone_mode=False)


def _is_for_others(word: str) -> bool:
    return word in _FOR_OTHERS or word.startswith(_FOR_OTHERS_PREFIXES)


def main() -> None:
    status = kvfs.run(app, "mount.kvfs")
    sys.exit({0: 0, 1: _FAILURE, 2: _USAGE}[status])

"""The `kvfs` command."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

import kvfs
from kvfs.engine.device import DeviceError
from mount_tools import (
    bench,
    export,
    fork,
    fsck,
    import_,
    log,
    ls,
    mkfs,
    monitoring,
    mount,
    profile,
    receive,
    replay,
    scrub,
    send,
    stat,
    umount,
)
from mount_tools.common import CommandError, describe_os_error, say, warn

app = typer.Typer(
    name="kvfs",
    help="The KV cache of language-model agents as files: format, mount, look, check.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(mkfs.mkfs)
app.command()(mount.mount)
app.command()(umount.umount)
app.command()(fsck.fsck)
app.command()(scrub.scrub)
app.command()(ls.ls)
app.command()(stat.stat)
app.command()(fork.fork)
app.command()(export.export)
app.command("import")(import_.import_)
app.command()(send.send)
app.command()(receive.receive)
app.command()(log.log)
app.command()(replay.replay)
app.command()(bench.bench)
app.command()(profile.profile)
app.command()(monitoring.monitoring)

# What typer raises for a wrong command line; which module it lives in depends on its version.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        say(f"kvfs {kvfs.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    # Names of files may hold bytes that no encoding has a character for.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(app, "kvfs"))


def run(command: typer.Typer, name: str) -> int:
    """The exit status: 0, 1 for what cannot be done, 2 for a wrong command line; a verb with
    other ones returns its own."""
    try:
        return int(command(standalone_mode=False) or 0)
    except _UsageError as failure:
        context: typer.Context | None = failure.ctx
        command_line = context.command_path if context else name
        warn(f"{failure.format_message()} (see {command_line} --help)")
        is_fsck = context is not None and context.info_name == "fsck"
        return fsck.Status.USAGE if is_fsck else 2
    except (CommandError, DeviceError) as failure:
        warn(str(failure))
    except OSError as failure:
        warn(describe_os_error(failure))
    except (KeyboardInterrupt, typer.Abort):
        warn("interrupted")
    return 1

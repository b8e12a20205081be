"""`kvfs doctor`: what of a machine, a device, a mount or a process is as it should be."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvfs.mount.mounts import containing_mount, mounts
from mount_tools.arguments import complete_mountpoint
from mount_tools.common import (
    CommandError,
    format_size,
    parse_path,
    print_json,
    print_table,
    say,
)
from mount_tools.doctor import (
    agents,
    block,
    fuse,
    gpu,
    is_it_kv,
    kernel,
    memory,
    mount,
    pci,
    software,
    sysctls,
    wear,
)
from mount_tools.doctor.check import NOTHING, Check, Status
from mount_tools.doctor.system import System
from mount_tools.mountpoints import answered, may_enter

_WARM_DIRECTORY = Path("/dev/shm")
_SESSIONS_SHOWN = 10
_SESSION_COLUMNS = ("session", "tokens", "size", "tier", "open here")


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            parser=parse_path,
            metavar="MNT|DEV",
            autocompletion=complete_mountpoint,
            help="A mountpoint, or a block device or image file. [default: every KVFS that is "
            "mounted]",
            show_default=False,
        ),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            metavar="PID",
            min=1,
            help="Look at a process instead: is its memory KV?",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            help="Where that process tells its metrics. [default: its usual ports, if it listens]",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at the machine and say for each thing what was found, what is wanted, why, and the
    command that changes it. Changes nothing. Ends with 1 if there is a warning or an error.

    \b
    Examples:
      kvfs doctor
      kvfs doctor /mnt/kv
      kvfs doctor /dev/nvme1n1 --json
      kvfs doctor --pid 4711
      kvfs doctor --pid 4711 --metrics-port 9101
    """
    if pid is None and metrics_port is not None:
        raise typer.BadParameter("--metrics-port goes with --pid")
    if pid is not None and path is not None:
        raise typer.BadParameter("name either a mount or device, or --pid")
    if pid is not None:
        found = _report_process(pid, metrics_port, json_output=json_output)
    else:
        found = _report_machine(path, json_output=json_output)
    if any(check.status.is_trouble for check in found):
        raise typer.Exit(1)


def _report_machine(path: Path | None, *, json_output: bool) -> list[Check]:
    system = System()
    found = list(_shown(_all_checks(system, path)))
    if json_output:
        print_json({"checks": [asdict(check) for check in found]})
    else:
        _print(found)
    return found


def _report_process(pid: int, metrics_port: int | None, *, json_output: bool) -> list[Check]:
    seen = is_it_kv.look_at(System(), pid, metrics_port)
    found = list(is_it_kv.checks(seen))
    if json_output:
        print_json(
            {
                "pid": pid,
                "command": seen.command,
                "verdict": is_it_kv.verdict(seen),
                "checks": [asdict(check) for check in found],
                "sessions": [
                    {
                        "path": str(session.path),
                        "tokens": session.tokens,
                        "size": session.size,
                        "tier": session.tier,
                        "open": is_it_kv.is_open(seen, session.path),
                    }
                    for session in seen.sessions
                ],
            }
        )
        return found
    say(f"process {pid}: {seen.command[:200]}")
    say(f"is it KV? {is_it_kv.verdict(seen)}")
    _print(found)
    if seen.sessions:
        typer.echo()
        rows = [
            [
                session.name,
                "-" if session.tokens is None else str(session.tokens),
                format_size(session.size),
                session.tier or "-",
                "yes" if is_it_kv.is_open(seen, session.path) else "",
            ]
            for session in seen.sessions[:_SESSIONS_SHOWN]
        ]
        print_table(_SESSION_COLUMNS, rows, ("tokens", "size"))
    return found


# -- what is looked at


def _all_checks(system: System, path: Path | None) -> Iterable[Check]:
    mountpoints, sources = _targets(path)
    told = [mount.warm_directory(mountpoint) for mountpoint in mountpoints]
    warm = dict.fromkeys([each for each in told if each is not None] or [_WARM_DIRECTORY])
    return chain(
        kernel.checks(system),
        sysctls.checks(system),
        fuse.checks(system),
        memory.checks(system),
        *(memory.tmpfs_checks(system, directory) for directory in warm),
        pci.checks(system),
        gpu.checks(system),
        wear.checks(system),
        software.checks(system),
        *(block.checks(system, source) for source in sources),
        *(mount.checks(mountpoint) for mountpoint in mountpoints),
        *(agents.checks(system, mountpoint) for mountpoint in mountpoints),
    )


def _targets(path: Path | None) -> tuple[list[Path], list[Path]]:
    """Mountpoints, and the devices or images behind them or alone."""
    if path is None:
        found = [each for each in mounts() if may_enter(each.mountpoint)]
    else:
        # The table of mounts alone is asked: a mount that hangs is one of the things to find.
        mounted = containing_mount(path)
        if mounted is None:
            return [], [_checked_source(path)]
        found = [mounted]
    sources = dict.fromkeys(Path(each.source) for each in found)
    return [each.mountpoint for each in found], list(sources)


def _checked_source(path: Path) -> Path:
    def kind() -> int:
        return path.stat().st_mode

    try:
        mode = answered(path, kind)
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
        raise CommandError(
            f"{path} is neither a mounted KVFS nor a block device or image; mount one with: "
            f"kvfs mount MNT DEV"
        )
    return path.absolute()


def _shown(checks: Iterable[Check]) -> Iterator[Check]:
    """With the group that is looked at, on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from checks
        return
    with console.status("looking") as status:
        for check in checks:
            status.update(f"looking at {check.group}")
            yield check


# -- what is told


def _print(checks: list[Check]) -> None:
    group = None
    for check in checks:
        if check.group != group:
            group = check.group
            typer.echo()
            say(group)
        is_only_told = check.wanted == NOTHING
        if check.status is Status.OK:
            wanted = "" if is_only_told else f" (wanted: {check.wanted})"
            say(f"  ok       {check.name}: {check.found}{wanted}")
            continue
        say(f"  {check.status.value:<8} {check.name}: {check.found}")
        if not is_only_told:
            say(f"             wanted: {check.wanted}")
        say(f"             why:    {check.why}")
        if check.command:
            say(f"             {_verb(check)} {check.command}")
    typer.echo()
    say(_summary(checks))


def _verb(check: Check) -> str:
    return "ask:   " if check.status is Status.UNKNOWN else "change:"


def _summary(checks: list[Check]) -> str:
    counts = {
        status: sum(check.status is status for check in checks) for status in reversed(Status)
    }
    told = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return f"{told}; nothing was changed"

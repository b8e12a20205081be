"""`kvfs fsck`: check a ring that is not mounted, and repair it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvfs.engine import check
from kvfs.engine.check import CheckError, Finding, Report
from kvfs.engine.device import Device, DeviceError
from kvfs.engine.format import SuperblockFlag
from kvfs.engine.superblocks import read_superblocks
from kvfs.mount.backing import claimed
from kvfs.mount.mounts import containing_mount, mounts
from kvfs.tiers.oplog import current_boot, log_at
from mount_tools.common import (
    CommandError,
    describe_os_error,
    format_size,
    parse_path,
    print_json,
    say,
    warn,
)
from mount_tools.keys import KeyCommand, KeyFile, Keyring, read_key
from mount_tools.mountpoints import canonical, require_answer


class Status(IntEnum):
    """What the command ends with, as fsck(8) has it."""

    CLEAN = 0
    CORRECTED = 1
    UNCORRECTED = 4
    FAILED = 8
    USAGE = 16
    CANCELED = 32


def fsck(
    device: Annotated[
        Path,
        typer.Argument(parser=parse_path, metavar="DEV", help="Block device or image file."),
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended; nothing readable is lost.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Repair although that gives up what a killed daemon had answered."
        ),
    ] = False,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    keyring: Keyring = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check every structure and checksum of a ring that is not mounted.

    \b
    Ends with 0: clean, 1: errors corrected, 4: errors left, 8: it cannot be checked,
    16: wrong command line, 32: interrupted.

    \b
    Examples:
      kvfs fsck /dev/nvme1n1
      kvfs fsck ring.img --repair
      kvfs fsck ring.img --json
    """
    try:
        key = read_key(key_file, key_command, keyring)
        return _fsck(device, key, repair=repair, force=force, json_output=json_output)
    except (CommandError, DeviceError, CheckError) as failure:
        warn(str(failure))
    except OSError as failure:
        warn(describe_os_error(failure))
    except KeyboardInterrupt:
        warn("interrupted; the ring is as it was, or as it was meant to become")
        return Status.CANCELED
    return Status.FAILED


def _fsck(path: Path, key: bytes | None, *, repair: bool, force: bool, json_output: bool) -> Status:
    require_answer(containing_mount(path))
    _refuse_mounted(path)
    with claimed(path, read_only=not repair) as device:
        log = _log_left_behind(device, path)
        if log is not None:
            _tell_of_log(path, log, refuse=repair and not force)
        with _progress_bar() as progress:
            report = check.check(device, str(path), key=key, repair=repair, progress=progress)
    if json_output:
        print_json(_document(path, report, log))
    else:
        _print_report(path, report)
    return _status(report)


def _refuse_mounted(path: Path) -> None:
    """Also one that is mounted read-only, which others may read."""
    device = canonical(path)
    for mount in mounts():
        if mount.source == str(device):
            raise CommandError(
                f"{path} is mounted on {mount.mountpoint}; unmount it first with: "
                f"kvfs umount {mount.mountpoint}"
            )


# -- what a killed daemon left behind


def _log_left_behind(device: Device, path: Path) -> Path | None:
    """The log of operations that were answered and may not be in the ring."""
    superblock = read_superblocks(device, str(path)).newest
    if superblock.flags & SuperblockFlag.CLEAN:
        return None
    return log_at(superblock.oplog_home, current_boot())


def _tell_of_log(path: Path, log: Path, *, refuse: bool) -> None:
    what = (
        f"{path} was not unmounted, and what was answered last lies in {log}: mount it first "
        f"with: kvfs mount MNT {path} --warm-dir {log.parent.parent}"
    )
    if refuse:
        raise CommandError(f"{what} (or give that up with: kvfs fsck {path} --repair --force)")
    warn(what)


# -- what is told


@contextmanager
def _progress_bar() -> Iterator[check.Progress]:
    """On a terminal, for the data: that is what takes time."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("data", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_report(path: Path, report: Report) -> None:
    for finding in report.findings:
        say(str(finding))
    checked = (
        f"{report.inodes} inodes, {report.extents} extents, "
        f"{format_size(report.data_bytes)} of data"
    )
    say(f"{path}: {_outcome(path, report)}; {checked}")


def _outcome(path: Path, report: Report) -> str:
    if report.is_clean:
        return "clean"
    count, lost = len(report.findings), len(report.lost)
    what = f"{count} error{'s' if count > 1 else ''}"
    if report.is_repaired:
        return f"{what} corrected" if not lost else f"{what}, {count - lost} of them corrected"
    if lost == count:
        return f"{what}, and no repair brings that back"
    return f"{what}; correct what can be with: kvfs fsck {path} --repair"


def _status(report: Report) -> Status:
    if report.is_clean:
        return Status.CLEAN
    return Status.CORRECTED if report.is_repaired and not report.lost else Status.UNCORRECTED


def _document(path: Path, report: Report, log: Path | None) -> dict[str, Any]:
    return {
        "device": os.fspath(path),
        "uuid": str(UUID(bytes=report.uuid)),
        "clean": report.is_clean,
        "repaired": report.is_repaired,
        "inodes": report.inodes,
        "extents": report.extents,
        "data_bytes": report.data_bytes,
        "operation_log": None if log is None else str(log),
        "findings": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "structure": finding.structure,
        "message": finding.message,
        "path": finding.path,
        "inode": finding.ino,
        "address": finding.address,
        "lost": finding.is_lost,
    }

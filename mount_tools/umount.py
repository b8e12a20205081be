"""`kvfs umount`: take a ring out of the tree and wait until all of it is on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from kvfs.engine.device import DeviceError, FileDevice
from kvfs.engine.format import SuperblockFlag
from kvfs.engine.superblocks import read_superblocks
from kvfs.mount.mounts import Mount, find_mount
from kvfs.tiers.oplog import current_boot, log_at
from mount_tools.arguments import Mountpoint
from mount_tools.common import CommandError, say
from mount_tools.mountpoints import State, canonical, detach, read_stats, state_of
from mount_tools.processes import holders_of, is_held_up, process_of, wait_for_end

_QUICK_SECONDS = 1.0
_END_SECONDS = 180.0


def umount(
    mountpoint: Mountpoint,
    lazy: Annotated[
        bool,
        typer.Option("--lazy", "--force", help="Detach it also when it is in use, dead or hung."),
    ] = False,
) -> None:
    """Unmount, and return when everything is on the device.

    \b
    Examples:
      kvfs umount /mnt/kv
      kvfs umount --force /mnt/kv     (its daemon hangs, or files are open)
    """
    mountpoint = canonical(mountpoint)
    mount = find_mount(mountpoint)
    if mount is None:
        raise CommandError(f"no KVFS is mounted on {mountpoint}")
    if lazy:
        _detach_lazily(mountpoint)
        return
    match state_of(mountpoint):
        case State.ALIVE:
            _unmount(mount)
        case State.DEAD:
            _clear_dead(mount)
        case State.HUNG:
            raise CommandError(
                f"{mountpoint} does not answer; detach it with: kvfs umount --force {mountpoint}"
            )


def _detach_lazily(mountpoint: Path) -> None:
    failure = detach(mountpoint, lazy=True)
    if failure:
        raise CommandError(f"{mountpoint}: {failure}")
    say(f"detached {mountpoint}; a daemon that lives ends with the last open file")


def _clear_dead(mount: Mount) -> None:
    failure = detach(mount.mountpoint, lazy=True)
    if failure:
        raise CommandError(f"{mount.mountpoint}: {failure}")
    say(
        f"cleared {mount.mountpoint}: its daemon had ended; the next kvfs mount of "
        f"{mount.source} recovers what it had answered"
    )


def _unmount(mount: Mount) -> None:
    stats = read_stats(mount.mountpoint)
    daemon = process_of(stats.pid)
    failure = detach(mount.mountpoint, lazy=False)
    if failure:
        raise CommandError(_why_not(mount.mountpoint, failure))
    if daemon is not None:
        _wait_for_daemon(daemon)
    if not stats.read_only:
        _check_clean_end(stats.source)
    say(f"unmounted {mount.mountpoint}")


def _why_not(mountpoint: Path, failure: str) -> str:
    holders = holders_of(mountpoint)
    if not holders:
        return f"{mountpoint}: {failure}"
    names = ", ".join(f"{h.command} (pid {h.pid}) has {h.path}" for h in holders)
    return f"{mountpoint} is in use: {names}"


def _wait_for_daemon(daemon: psutil.Process) -> None:
    if wait_for_end(daemon, _QUICK_SECONDS):
        return
    with Console(stderr=True).status("writing what the device lacks yet"):
        if not wait_for_end(daemon, _END_SECONDS):
            raise CommandError(
                f"unmounted, but the daemon (pid {daemon.pid}) has not ended after "
                f"{_END_SECONDS:.0f} s: is the device hung?"
            )
    if is_held_up(daemon, _QUICK_SECONDS):
        raise CommandError(
            f"unmounted, but the device does not answer: the daemon (pid {daemon.pid}) ends when "
            f"it does; what it had answered is kept in memory and recovered by the next kvfs mount"
        )


def _check_clean_end(source: Path) -> None:
    try:
        device = FileDevice(source, read_only=True)
        try:
            superblock = read_superblocks(device, str(source)).newest
        finally:
            device.close()
    except DeviceError as failure:
        raise CommandError(f"unmounted, but its end cannot be checked: {failure}") from None
    if superblock.flags & SuperblockFlag.CLEAN:
        return
    if log_at(superblock.oplog_home, current_boot()) is None:
        raise CommandError(
            f"unmounted, and all of it is in the ring, but its index is damaged (the daemon's log "
            f"says where); repair it with: kvfs fsck {source} --repair"
        )
    raise CommandError(
        f"unmounted, but the daemon did not end well (its log says why); what it had "
        f"answered is kept in memory and recovered by the next kvfs mount of {source}"
    )

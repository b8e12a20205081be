"""`kvfs mount`: put a ring in the tree, in the background or for a supervisor."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfs.engine.device import DeviceError, FileDevice
from kvfs.mount.attach import MountError
from kvfs.mount.mounts import find_mount
from kvfs.tiers import profiles
from kvfs.tiers.profiles import Profile
from mount_tools.arguments import complete_profile
from mount_tools.common import (
    CommandError,
    describe_os_error,
    format_size,
    parse_path,
    parse_size,
    say,
    warn,
)
from mount_tools.daemonize import run_in_background
from mount_tools.keys import KeyCommand, KeyFile, Keyring, read_key
from mount_tools.logs import log_to
from mount_tools.mountpoints import (
    State,
    Stats,
    answered,
    canonical,
    detach,
    read_stats,
    state_of,
)
from mount_tools.options import parse_options
from mount_tools.profile import load_profile

if TYPE_CHECKING:
    from kvfs.mount.config import MountConfig

log = logging.getLogger(__name__)

_FUSE_CONFIG = Path("/etc/fuse.conf")
_SYSTEM_LOGS = Path("/var/log/kvfs")

_DAY_SECONDS = 24 * 3600
_SCRUB_RATE_MIN = 64 * 1024


def _parse_rate(text: str) -> int:
    rate = parse_size(text)
    if rate < _SCRUB_RATE_MIN:
        raise typer.BadParameter(
            f"{text!r} is less than 64K a second; to scrub only by kvfs scrub, use --scrub-every 0"
        )
    return rate


def _parse_address(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not an IP address: give 127.0.0.1, ::1 or 0.0.0.0"
        ) from None


def mount(
    mountpoint: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="MNT", help="An empty directory.")
    ],
    device: Annotated[
        Path,
        typer.Argument(parser=parse_path, metavar="DEV", help="Block device or image file."),
    ],
    warm_dir: Annotated[
        Path,
        typer.Option(
            parser=parse_path,
            metavar="DIR",
            help="A tmpfs for the warm tier; keeps what the ring lacks yet.",
        ),
    ] = Path("/dev/shm"),
    warm: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory for the warm tier, at most. [default: a quarter of the machine's, "
            "16 GiB, or what the tmpfs has free, whichever is least]",
            show_default=False,
        ),
    ] = None,
    log_file: Annotated[
        Path | None,
        typer.Option(
            "--log",
            parser=parse_path,
            metavar="FILE",
            help="The daemon's log. [default: under /var/log/kvfs, or ~/.local/state/kvfs]",
            show_default=False,
        ),
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="A JSON object a line in the log.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            help="Serve Prometheus' metrics at http://ADDR:PORT/metrics. [default: only in "
            "MNT/.kvfs/metrics]",
            show_default=False,
        ),
    ] = None,
    metrics_address: Annotated[
        str,
        typer.Option(
            parser=_parse_address,
            metavar="ADDR",
            help="Where the metrics are served; 0.0.0.0 lets other machines read them.",
        ),
    ] = "127.0.0.1",
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, and log to stderr (for systemd).")
    ] = False,
    options: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="OPTION,...", help="ro, allow_other, noexec, sync, ..."),
    ] = None,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="A request is answered within this.")
    ] = 30,
    shadow: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="When the device fails, writes of so much are kept in memory (of --warm) until "
            "it is back. [default: none, they fail until the next mount]",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            autocompletion=complete_profile,
            help=f"How tiers behave: {', '.join(profiles.NAMES)}, or a file (see kvfs profile).",
        ),
    ] = None,
    checkpoint: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Time between checkpoints. [default: the profile's, or 300]",
            show_default=False,
        ),
    ] = None,
    scrub_rate: Annotated[
        int,
        typer.Option(
            parser=_parse_rate, metavar="SIZE", help="What a scrub reads a second, at most."
        ),
    ] = "64M",  # type: ignore[assignment]  # parsed like what is given
    scrub_every: Annotated[
        float,
        typer.Option(
            metavar="DAYS", min=0, help="Between scrubs of the ring; 0: only by kvfs scrub."
        ),
    ] = 7,
    reclaim: Annotated[
        bool,
        typer.Option(
            "--reclaim/--no-reclaim",
            help="When it is full, what was unused for the longest time goes (by the profile's "
            "policy); or writes fail with ENOSPC.",
        ),
    ] = True,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    keyring: Keyring = None,
) -> None:
    """Mount a formatted device or image file. Returns when the mount answers.

    \b
    Examples:
      kvfs mount /mnt/kv /dev/nvme1n1
      kvfs mount /mnt/kv ring.img --warm 8G --log kvfs.log
      kvfs mount /mnt/kv /dev/nvme1n1 --profile gov
      kvfs mount /mnt/kv ring.img -o ro --foreground
      kvfs mount /mnt/kv /dev/nvme1n1 --metrics-port 9464 --log-json
      kvfs mount /mnt/kv ring.img --key-file ring.key
    """
    key = read_key(key_file, key_command, keyring)
    chosen = parse_options(options or [])
    tiers = Profile() if profile is None else load_profile(profile)
    # The daemon's directory is another one: relative paths end here.
    mountpoint, device, warm_dir = map(canonical, (mountpoint, device, warm_dir))
    _check_system(allow_other="allow_other" in chosen)
    answered(warm_dir, lambda: _check_warm_directory(warm_dir))
    _clear_if_dead(mountpoint)
    answered(mountpoint, lambda: _check_mountpoint(mountpoint))
    answered(device, lambda: _check_device(device, read_only="ro" in chosen))

    def make_config() -> MountConfig:
        from kvfs.engine.store import StoreOptions
        from kvfs.mount.config import MetricsAddress, MountConfig
        from kvfs.mount.scrubbing import ScrubOptions

        return MountConfig(
            mountpoint=mountpoint,
            source=device,
            warm_directory=warm_dir,
            warm_size=warm,
            options=chosen,
            deadline_seconds=deadline,
            profile=tiers,
            metrics=None if metrics_port is None else MetricsAddress(metrics_address, metrics_port),
            scrub=ScrubOptions(scrub_rate, scrub_every * _DAY_SECONDS),
            store=StoreOptions(
                checkpoint_seconds=checkpoint or tiers.checkpoint_seconds,
                reclaim=reclaim,
                unused_seconds=tiers.ttl_seconds,
                shadow=shadow or 0,
                deadline_seconds=deadline,
            ),
        )

    if foreground:
        _serve_in_foreground(make_config, key, log_json=log_json)
        return
    log_path = canonical(log_file or _default_log(mountpoint))
    run_in_background(
        lambda ready: _serve(make_config, key, ready),
        lambda failure: _explain(failure, log_path),
        log_path,
        as_json=log_json,
    )
    _report(mountpoint, read_stats(mountpoint), log_path)


_RECLAIM = (
    "when it is full, sessions go as the policy {policy} names them, never pinned ones "
    "(see kvfs log; --no-reclaim for ENOSPC instead)"
)
_NO_RECLAIM = "when it is full, writes fail with ENOSPC: nothing is reclaimed"


# -- checks


def _check_system(*, allow_other: bool) -> None:
    if not os.path.exists("/dev/fuse"):
        raise CommandError(
            "/dev/fuse is missing: load the kernel's module (modprobe fuse), or give the "
            "container the device and CAP_SYS_ADMIN"
        )
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CommandError(
            "/dev/fuse: permission denied; run as root, or have root allow it: chmod 666 /dev/fuse"
        )
    if shutil.which("fusermount3") is None:
        raise CommandError("fusermount3 is missing; install the package fuse3")
    if allow_other and os.geteuid() != 0 and not _others_may_be_allowed():
        raise CommandError(
            f"-o allow_other needs root, or a line user_allow_other in {_FUSE_CONFIG}"
        )


def _others_may_be_allowed() -> bool:
    try:
        lines = _FUSE_CONFIG.read_text().splitlines()
    except OSError:
        return False
    return "user_allow_other" in map(str.strip, lines)


def _check_warm_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise CommandError(f"--warm-dir {directory} is not a directory")


def _clear_if_dead(mountpoint: Path) -> None:
    mounted = find_mount(mountpoint)
    if mounted is None:
        return
    match state_of(mountpoint):
        case State.ALIVE:
            raise CommandError(
                f"{mountpoint} has {mounted.source} mounted already; "
                f"unmount it first with: kvfs umount {mountpoint}"
            )
        case State.HUNG:
            raise CommandError(
                f"{mountpoint} has {mounted.source} mounted, which does not answer; "
                f"detach it with: kvfs umount --force {mountpoint}"
            )
        case State.DEAD:
            failure = detach(mountpoint, lazy=True)
            if failure:
                raise CommandError(f"the dead mount on {mountpoint} cannot be cleared: {failure}")
            say(f"cleared {mountpoint}: the daemon of its last mount had ended")


def _check_mountpoint(mountpoint: Path) -> None:
    try:
        mode = mountpoint.stat().st_mode
        if not stat.S_ISDIR(mode):
            raise CommandError(
                f"{mountpoint} is not a directory; the mountpoint comes first: kvfs mount MNT DEV"
            )
        entries = os.listdir(mountpoint)
    except FileNotFoundError:
        raise CommandError(
            f"{mountpoint} does not exist; make it with: mkdir -p {mountpoint}"
        ) from None
    except OSError as failure:
        raise CommandError(describe_os_error(failure)) from None
    if entries:
        raise CommandError(f"{mountpoint} is not empty; choose an empty directory")


def _check_device(device: Path, *, read_only: bool) -> None:
    """What can be said early is said here; the daemon opens it again and keeps it."""
    FileDevice(device, read_only=True).close()
    if not read_only and not os.access(device, os.W_OK):
        raise CommandError(f"{device} may only be read: mount it with -o ro, or as its owner")


# -- the daemon


def _serve(
    make_config: Callable[[], MountConfig], key: bytes | None, ready: Callable[[], None]
) -> None:
    # Imported in the daemon alone: libraries behind it start threads, which no fork survives.
    from kvfs.mount.daemon import serve

    config = make_config()
    about = {"source": str(config.source), "mountpoint": str(config.mountpoint)}

    def mounted() -> None:
        log.info("mounted %s on %s", config.source, config.mountpoint, extra=about)
        ready()

    serve(config, key, mounted)
    log.info("unmounted %s", config.mountpoint, extra=about)


def _serve_in_foreground(
    make_config: Callable[[], MountConfig], key: bytes | None, *, log_json: bool
) -> None:
    log_to(logging.StreamHandler(), as_json=log_json)
    try:
        _serve(make_config, key, _notify_supervisor)
    except Exception as failure:
        raise CommandError(_explain(failure, None)) from failure


def _notify_supervisor() -> None:
    """systemd's READY=1, where it asked for it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", address.replace("@", "\0", 1))


def _explain(failure: BaseException, log_file: Path | None) -> str:
    """The one line that a user sees."""
    where = f"; see {log_file}" if log_file else ""
    match failure:
        case DeviceError() | CommandError():
            return str(failure)
        case ModuleNotFoundError(name=name):
            return f"{name} is not installed; install it with: pip install 'kvfs[mount]'"
        case OSError():
            return describe_os_error(failure) + where
        case MountError():
            return f"{failure}{where}"
    log.error("unexpected", exc_info=failure)
    return f"{failure or type(failure).__name__}{where}"


# -- what the user is told


def _default_log(mountpoint: Path) -> Path:
    name = "-".join(mountpoint.parts[1:]) or "root"
    if os.geteuid() == 0:
        return _SYSTEM_LOGS / f"{name}.log"
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):
        raise CommandError("this user has no home for the log; choose one with --log FILE")
    return Path(state) / "kvfs" / f"{name}.log"


def _report(mountpoint: Path, stats: Stats, log_file: Path) -> None:
    if stats.recovered_operations:
        say(
            f"recovered {stats.recovered_operations} operations that the last daemon had "
            "answered and not written"
        )
    if stats.superblock_lost:
        warn("one of the two superblocks could not be read: if that recurs, replace the device")
    if stats.damage:
        warn(stats.damage)
    elif stats.unrecovered:
        warn(
            "what the last daemon had answered and not written is not shown: mount without "
            "-o ro to recover it"
        )
    mode = " read-only" if stats.read_only else ""
    say(
        f"mounted {stats.source} on {mountpoint}{mode}: {format_size(stats.total)}, "
        f"{format_size(stats.free)} free; log {log_file}"
    )
    if not stats.read_only:
        told = _RECLAIM if stats.document["reclaim"] else _NO_RECLAIM
        say(told.format(policy=stats.document["policy"]))

"""Puts the parts together: device, store, loop and FUSE, from mount to unmount."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import UUID

from kvfs.engine.device import DeviceError, FileDevice
from kvfs.engine.format import Superblock
from kvfs.engine.io import Urgency
from kvfs.engine.store import Store
from kvfs.engine.superblocks import Superblocks, read_superblocks
from kvfs.mount import large_pages
from kvfs.mount.attach import Connection, attach
from kvfs.mount.backing import claimed
from kvfs.mount.config import WARM_DIRECTORY, MountConfig
from kvfs.mount.control import Mounted, metrics_of_now
from kvfs.mount.executor import LoopExecutor, drive
from kvfs.mount.exporter import exporting, listen
from kvfs.mount.fuse import Filesystem
from kvfs.mount.loop import Loop
from kvfs.mount.memory import warm_limit
from kvfs.mount.mounts import find_mount
from kvfs.mount.scrubbing import SLICE_SECONDS, Scrubbing
from kvfs.mount.session import Session
from kvfs.tiers.budget import Budget
from kvfs.tiers.migrate import Migration
from kvfs.tiers.oplog import CHUNK_SIZE, log_at
from kvfs.tiers.planner import Planner
from kvfs.tiers.policies import POLICIES
from kvfs.tiers.predict import PredictOptions, Predictor
from kvfs.tiers.prefetch import LookAhead
from kvfs.tiers.profiles import Profile
from kvfs.tiers.sessions import WarmSessions
from kvfs.tiers.shards import Shards
from kvfs.tiers.uses import Uses
from kvfs.tiers.warm import WarmTier

log = logging.getLogger(__name__)

_THREADS = 10
_TICK_SECONDS = 1.0
_READ_AHEAD_KIB = 4096
# The collector takes what is young in small steps, since requests wait for each (150 ms for
# 200 000 objects, of which it found none to free), and what is old rarely.
_GARBAGE_THRESHOLDS = (5_000, 5, 100)
# Each request gives the interpreter's lock away three times; a thread that prepares a batch
# meanwhile would keep it for the usual 5 ms each time.
_SWITCH_SECONDS = 100e-6
_WARM_SIZE_MIN = 4 * CHUNK_SIZE


def serve(config: MountConfig, key: bytes | None, ready: Callable[[], None]) -> None:
    """Mount, call `ready`, serve until unmounted or told to stop by SIGTERM or SIGINT. `key` is
    that of an encrypted ring.

    Raises DeviceError when the device cannot be used, OSError or MountError when
    it cannot be mounted or not be closed well.
    """
    # What lives as long as the daemon is not looked at by the collector again and again.
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with (
        claimed(config.source, read_only=config.read_only) as device,
        nullcontext() if config.metrics is None else listen(config.metrics) as listener,
    ):
        superblocks = read_superblocks(device, str(config.source))
        directory = _log_directory(config, superblocks.newest)
        loop = Loop()
        with _warm_directory(config, directory):
            try:
                loop.run_until_complete(
                    _serve(loop, directory, superblocks, config, key, device, listener, ready)
                )
            finally:
                loop.close()


async def _serve(
    loop: Loop,
    directory: Path,
    superblocks: Superblocks,
    config: MountConfig,
    key: bytes | None,
    device: FileDevice,
    listener: socket.socket | None,
    ready: Callable[[], None],
) -> None:
    executor = LoopExecutor(loop, _THREADS)
    warm_size = _warm_limit(config, directory)
    config = replace(config, warm_size=warm_size)
    profile = config.profile
    buffer = WarmTier(
        directory, warm_size, executor, shards=Shards(profile),
        policy=POLICIES[profile.policy](),
    )  # fmt: skip
    options = replace(config.store, policy=POLICIES[profile.policy]())
    store = Store.open(device, str(config.source), executor, buffer, options, key)
    if store.damage:
        log.error("%s", store.damage)
    unrecovered = store.read_only and log_at(buffer.home, buffer.boot) is not None
    window_size = min(config.window_size, store.reader.capacity // 2)
    executor.submit(partial(store.reader.make_ready, 2 * window_size), Urgency.BACKGROUND)
    look_ahead = LookAhead(store, window_size)
    migration = Migration(store, buffer, executor, profile.warm_fill_pct, profile.warm_group)
    planner = _planner(migration, executor, profile)
    uses = Uses(buffer.policy, buffer.clock)
    lost = superblocks.one_is_lost
    mounted = Mounted(store, migration, planner, uses, config, unrecovered, lost)
    scrubbing = Scrubbing(store, config.scrub, lambda: executor.demand_waits)
    filesystem = Filesystem(
        store, look_ahead, migration, planner, uses, scrubbing, mounted, executor.aside
    )
    session = Session(_mount(config), filesystem, loop, config.deadline_seconds)
    filesystem.mounted(session.notify)
    beside = [
        _look(store, migration),
        _tick(store, filesystem, uses),
        _relieve(migration),
        _scrub(scrubbing),
        _announce(config.mountpoint, ready),
    ]
    if not store.read_only:
        beside.append(_plan(planner))
        executor.spawn(migration.drop_dead())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, session.stop)
    tasks = [_begin(coroutine, session) for coroutine in beside]
    take_figures = partial(metrics_of_now, mounted)
    try:
        with exporting(listener, loop.call_from_thread, take_figures):
            await session.serve()
    finally:
        session.close()
        await drive(store.close(), config.deadline_seconds)
        for task in tasks:
            task.cancel()


def _begin(coroutine: Coroutine[None, None, None], session: Session) -> asyncio.Task[None]:
    """Beside the requests; they end with it where it fails."""
    task = asyncio.get_running_loop().create_task(coroutine)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            session.stop(failure)

    task.add_done_callback(ended)
    return task


def _planner(migration: Migration, executor: LoopExecutor, profile: Profile) -> Planner:
    store = migration.store
    return Planner(
        WarmSessions(migration),
        Predictor(PredictOptions(idle_seconds=profile.warm_idle_seconds)),
        Budget(),
        profile.warm_group,
        executor.spawn,
        lambda: executor.demand_waits,
        lambda: store.reader.asked_for,
    )


def _log_directory(config: MountConfig, superblock: Superblock) -> Path:
    return config.warm_directory / f"kvfs-{os.geteuid()}" / str(UUID(bytes=superblock.uuid))


@contextmanager
def _warm_directory(config: MountConfig, directory: Path) -> Iterator[None]:
    """It is this daemon's alone, and has large pages where it may. Who names a directory for
    warm memory has it as it is."""
    if config.read_only:
        yield
        return
    _make_private(directory.parent)
    has_own_tmpfs = config.warm_directory == WARM_DIRECTORY and os.geteuid() == 0
    if has_own_tmpfs:
        large_pages.provide(directory)
    _make_private(directory)
    _claim(directory)
    try:
        yield
    finally:
        if has_own_tmpfs:
            large_pages.give_up(directory)


def _claim(directory: Path) -> None:
    """A copy of a mounted image has the same uuid, and so the same directory: it must not
    take the operations of the other. Held until the process ends."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise DeviceError(
            f"{directory} is in use by the mount of a ring with the same uuid; is this image a "
            f"copy of that one? mount it with another --warm-dir"
        ) from None


def _make_private(directory: Path) -> None:
    """The tmpfs is open to all, and the name can be guessed. Raises DeviceError."""
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DeviceError(
            f"{directory} is not a directory of this user alone: remove it, or use another "
            f"--warm-dir"
        )


def _mount(config: MountConfig) -> Connection:
    """Two commands for one mountpoint at the same time must not stack their mounts."""
    fd = os.open(config.mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if find_mount(config.mountpoint) is not None:
            raise DeviceError(f"{config.mountpoint} is a mountpoint of KVFS already")
        return attach(config.mountpoint, _options(config))
    finally:
        os.close(fd)


def _warm_limit(config: MountConfig, directory: Path) -> int:
    tmpfs = directory if directory.is_dir() else config.warm_directory
    limit = warm_limit(directory, tmpfs, config.warm_size)
    if limit < _WARM_SIZE_MIN:
        raise DeviceError(
            f"the warm tier needs {_WARM_SIZE_MIN // 2**20} MiB, and gets {limit // 2**20} MiB: "
            f"raise --warm, or use a --warm-dir with {_WARM_SIZE_MIN // 2**20} MiB free"
        )
    if config.store.shadow + _WARM_SIZE_MIN > limit:
        raise DeviceError(
            f"--shadow {config.store.shadow // 2**20}M is memory of the warm tier, which has "
            f"{limit // 2**20} MiB and needs {_WARM_SIZE_MIN // 2**20} of them: lower it, or raise "
            f"--warm"
        )
    return limit


def _options(config: MountConfig) -> set[str]:
    # A comma is the end of an option.
    source = str(config.source).replace("\\", "\\\\").replace(",", "\\,")
    own = {"default_permissions", "subtype=kvfs", f"fsname={source}"}
    return own | config.options


async def _announce(mountpoint: Path, ready: Callable[[], None]) -> None:
    """Once the mount answers. The kernel sets its read-ahead when it first talks to us."""
    await asyncio.to_thread(os.statvfs, mountpoint)
    _set_read_ahead(mountpoint)
    ready()


def _set_read_ahead(mountpoint: Path) -> None:
    """Buffered readers get requests of 1 MiB instead of 128 KiB; needs root."""
    mount = find_mount(mountpoint)
    if mount is None:
        return
    try:
        Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb").write_text(str(_READ_AHEAD_KIB))
    except OSError as failure:
        log.info("read-ahead stays at the kernel's default: %s", failure)


async def _look(store: Store, migration: Migration) -> None:
    """Not in the tick: that may wait for the device itself."""
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        store.look()
        migration.look(time.monotonic())


async def _tick(store: Store, filesystem: Filesystem, uses: Uses) -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        uses.settle()
        filesystem.tell_changed_blocks()
        try:
            await drive(store.tick(), None)
        except OSError as failure:
            log.error("periodic write-back: %s", failure)
        except Exception:
            # A fault of ours in one tick: the requests of others go on, and so does the next.
            log.exception("periodic write-back")


async def _relieve(migration: Migration) -> None:
    """Beside the tick: what goes down may have to wait for the device."""
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        try:
            await drive(migration.relieve(), None)
        except OSError as failure:
            log.error("warm memory cannot be given up: %s", failure)
        except Exception:
            log.exception("warm memory cannot be given up")


async def _scrub(scrubbing: Scrubbing) -> None:
    while True:
        await asyncio.sleep(SLICE_SECONDS if scrubbing.scrub.is_running else _TICK_SECONDS)
        try:
            await drive(scrubbing.slice(), None)
        except OSError as failure:
            log.error("scrub: %s", failure)
        except Exception:
            log.exception("scrub")


async def _plan(planner: Planner) -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        try:
            planner.tick(time.monotonic())
        except Exception:
            # A fault of ours in a guess: requests go on.
            log.exception("bringing in and sending down")

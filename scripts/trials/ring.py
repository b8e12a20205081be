"""An image, and where it is mounted by the real command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvfs.engine.device import FileDevice
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store
from kvfs.mount.mounts import find_mount
from kvfs.tiers.oplog import OperationLog
from mount_tools.mountpoints import State, read_stats, state_of
from mount_tools.processes import process_of, wait_for_end
from tests.engine.audit import audit

KVFS = str(Path(sys.executable).with_name("kvfs"))
MIB = 1024 * 1024
# Metadata of a ring without files: a root, two bitmaps, the index's last nodes.
EMPTY_MAX = 256 * 1024
_END_SECONDS = 60
_LOG_LINES = 30


class Broken(Exception):
    """A promise that was not kept."""


@dataclass(frozen=True, slots=True)
class Ring:
    """An image in `directory`, and warm files in `warm`."""

    directory: Path
    warm: Path

    @property
    def image(self) -> Path:
        return self.directory / "ring.img"

    @property
    def mountpoint(self) -> Path:
        return self.directory / "mnt"

    @property
    def log(self) -> Path:
        return self.directory / "kvfs.log"

    def format(self, *arguments: str) -> None:
        kvfs("mkfs", self.image, *arguments)
        self.mountpoint.mkdir(exist_ok=True)

    def mount(self, *arguments: str, clock: FastClock | None = None) -> None:
        """A mount whose daemon was killed is cleared by it."""
        places = (self.mountpoint, self.image, "--warm-dir", self.warm, "--log", self.log)
        kvfs("mount", *places, *arguments, clock=clock)

    def umount(self) -> None:
        kvfs("umount", self.mountpoint)

    def kill(self) -> None:
        """SIGKILL, and until the daemon is gone. The dead mount stays."""
        daemon = psutil.Process(self.stats()["pid"])
        daemon.send_signal(signal.SIGKILL)
        if not wait_for_end(daemon, _END_SECONDS):
            raise Broken("the daemon survives SIGKILL")

    def stats(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.mountpoint / ".kvfs/stats.json").read_text())
        return document

    @property
    def operations(self) -> int:
        """That were answered since the mount."""
        return int(self.stats()["counters"]["operations"])

    def fsck(self) -> None:
        """Of an unmounted image: clean."""
        kvfs("fsck", self.image)

    def audit(self) -> None:
        """Of an unmounted image. Raises AssertionError."""
        device = FileDevice(self.image)
        try:
            log = OperationLog(self.warm / "audit", 16 * MIB)
            store = Store.open(device, str(self.image), InlineExecutor(), log)
            run(store.sync())
            audit(store)
            run(store.close())
        finally:
            device.close()

    def log_tail(self) -> list[str]:
        """The last lines of the daemons' log."""
        return self.log.read_text().splitlines()[-_LOG_LINES:] if self.log.exists() else []

    def errors(self) -> list[str]:
        """What the daemons have logged as such."""
        levels = (" ERROR ", " CRITICAL ", "Traceback")
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if any(level in line for level in levels)]


@dataclass(frozen=True, slots=True)
class FastClock:
    """What a daemon takes for the time of day: it runs `factor` times as fast from `since_ns` on,
    so that sessions grow old in seconds. It goes on over several mounts."""

    factor: int
    since_ns: int

    @classmethod
    def from_now(cls, factor: int) -> FastClock:
        return cls(factor, time.time_ns())


def kvfs(*arguments: str | Path, clock: FastClock | None = None) -> None:
    """Raises Broken with what the command says when it fails."""
    command = [KVFS]
    if clock is not None:
        fast = Path(__file__).with_name("fast_clock.py")
        command = [sys.executable, str(fast), str(clock.factor), str(clock.since_ns)]
    command += map(str, arguments)
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise Broken(f"kvfs {arguments[0]}: {result.stderr.strip()} {result.stdout.strip()}")


def _end(ring: Ring) -> None:
    """In whatever state it is."""
    daemon = None
    if state_of(ring.mountpoint) is State.ALIVE:
        daemon = process_of(read_stats(ring.mountpoint).pid)
    subprocess.run([KVFS, "umount", "--force", ring.mountpoint], capture_output=True)
    if daemon is not None:
        wait_for_end(daemon, _END_SECONDS)  # it has the directories until then


@contextmanager
def new_ring(name: str, directory: Path | None, *mkfs: str) -> Iterator[Ring]:
    """A formatted one that is not mounted, in directories of its own that are removed."""
    prefix = f"kvfs-{name}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as disk,
        tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as warm,
    ):
        ring = Ring(Path(disk), Path(warm))
        try:
            ring.format(*mkfs)
            yield ring
        finally:
            if find_mount(ring.mountpoint):
                _end(ring)

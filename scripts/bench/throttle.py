"""The bandwidth of a disk, held back: by the controller blkio (cgroup v1, as root)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLKIO = Path("/sys/fs/cgroup/blkio")
_WHAT = ("read", "write")


@dataclass(frozen=True, slots=True)
class Throttle:
    """For this process and all that it starts from now on. Where there is no such controller
    the disk is as fast as it is, and `works` is False."""

    device: str
    cgroup: Path | None

    @property
    def works(self) -> bool:
        return self.cgroup is not None

    def limit(self, what: str, mb_s: float) -> None:
        """`read` or `write`; 0 is no limit."""
        if self.cgroup is not None:
            rule = self.cgroup / f"blkio.throttle.{what}_bps_device"
            rule.write_text(f"{self.device} {mb_s * 1e6:.0f}")

    def limit_both(self, mb_s: float) -> None:
        for what in _WHAT:
            self.limit(what, mb_s)


@contextlib.contextmanager
def throttle(directory: Path) -> Iterator[Throttle]:
    """Of the disk under a directory; what was started meanwhile must have ended at the end."""
    status = directory.stat()
    found = Path(f"/sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}")
    whole = found.resolve().parent if (found / "partition").exists() else found
    cgroup = _BLKIO / f"kvfs-bench-{os.getpid()}"
    try:
        device = (whole / "dev").read_text().strip()
        cgroup.mkdir()
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield Throttle("", None)
        return
    try:
        yield Throttle(device, cgroup)
    finally:
        (_BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        cgroup.rmdir()

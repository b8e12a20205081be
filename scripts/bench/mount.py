"""A ring in a directory, formatted and mounted with the real command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.disk import drop_caches

KVFS = str(Path(sys.executable).with_name("kvfs"))
_WAIT_SECONDS = 60


def kvfs(*arguments: str | Path) -> None:
    subprocess.run([KVFS, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class Mount:
    """`point` is where `image` is mounted."""

    image: Path
    point: Path
    options: tuple[str | Path, ...] = ()

    def mount(self) -> None:
        kvfs(
            "mount", self.point, self.image, "--log", self.image.with_suffix(".log"), *self.options
        )

    def umount(self) -> None:
        kvfs("umount", self.point)

    def end(self) -> None:
        """Unmount, also when it is in use or its daemon has ended."""
        try:
            self.umount()
        except subprocess.CalledProcessError:
            subprocess.run([KVFS, "umount", "--force", self.point], check=False)

    def stats(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.point / ".kvfs/stats.json").read_text())
        return document

    def device_written(self) -> int:
        """Bytes that were written to the device since it was mounted."""
        return int(self.stats()["counters"]["device_written"])

    def make_cold(self, *sessions: Path) -> None:
        """Neither the warm tier nor the kernel has any of them."""
        for session in sessions:
            os.setxattr(session, "user.kvfs.demote", b"1")
        drop_caches()

    def make_warm(self, session: Path) -> None:
        """All of it is in the warm tier when this returns."""
        os.setxattr(session, "user.kvfs.prefetch", b"1")
        deadline = time.monotonic() + _WAIT_SECONDS
        while os.getxattr(session, "user.kvfs.tier") != b"warm":
            if time.monotonic() > deadline:
                raise SystemExit(f"{session} is not warm after {_WAIT_SECONDS} s")
            time.sleep(0.02)


@contextlib.contextmanager
def fresh_mount(
    directory: Path, size: str, *options: str | Path, mkfs: tuple[str, ...] = ()
) -> Iterator[Mount]:
    """A new ring in `directory`; unmounted and removed at the end, whatever happens."""
    mount = Mount(directory / "ring.img", directory / "mnt", options)
    mount.point.mkdir(exist_ok=True)
    mount.image.unlink(missing_ok=True)
    kvfs("mkfs", mount.image, "--size", size, *mkfs)
    mount.mount()
    try:
        yield mount
    finally:
        mount.end()
        mount.image.unlink()

"""A KVFS on an image of its own, driven through the real command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kvfs.mount.mounts import find_mount
from mount_tools.processes import has_ended, wait_for_end

KVFS = Path(sys.executable).with_name("kvfs")
COMMAND_SECONDS = 120


def kvfs(
    *arguments: str | os.PathLike[str],
    check: bool = True,
    cwd: Path | None = None,
    program: Sequence[str] = (str(KVFS),),
) -> subprocess.CompletedProcess[str]:
    """Run the command. With `check`, a failure raises AssertionError with its output."""
    command = [*program, *map(os.fspath, arguments)]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=cwd, timeout=COMMAND_SECONDS
    )
    if check and result.returncode:
        raise AssertionError(f"{' '.join(command)}: {result.stderr}{result.stdout}")
    return result


class Mounter:
    """An image file, formatted and not mounted yet, and a directory to mount it on.

    Everything lies in two directories of its own, one on disk and one in the tmpfs;
    `close` ends the daemon and removes both. `program` is what mounts it.
    """

    def __init__(
        self, size: str = "512M", *mkfs_arguments: str, program: Sequence[str] = (str(KVFS),)
    ) -> None:
        self.program = program
        self.directory = Path(tempfile.mkdtemp(prefix="kvfs-test-"))
        self.warm_directory = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir="/dev/shm"))
        self.image = self.directory / "ring.img"
        self.mountpoint = self.directory / "mnt"
        self.log = self.directory / "kvfs.log"
        self._daemon: psutil.Process | None = None
        self.mountpoint.mkdir()
        try:
            kvfs("mkfs", self.image, "--size", size, *mkfs_arguments)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the daemon of the last mount."""
        return self.daemon.pid

    @property
    def has_ended(self) -> bool:
        """Whether that daemon has."""
        return has_ended(self.daemon)

    def mount(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`kvfs mount`; a mount whose daemon was killed is cleared by it."""
        result = kvfs(
            "mount", self.mountpoint, self.image, "--warm-dir", self.warm_directory,
            "--log", self.log, *arguments, check=check, program=self.program,
        )  # fmt: skip
        if result.returncode == 0:
            self.adopt()
        return result

    @property
    def daemon(self) -> psutil.Process:
        """Of the last mount."""
        assert self._daemon is not None, "mount it first"
        return self._daemon

    def adopt(self) -> None:
        """Know the daemon that serves the mountpoint."""
        self._daemon = psutil.Process(self.stats()["pid"])

    def umount(self, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        return kvfs("umount", self.mountpoint, check=check)

    def kill(self) -> None:
        """SIGKILL the daemon and wait until it is gone. The dead mount stays."""
        os.kill(self.pid, signal.SIGKILL)
        assert wait_for_end(self.daemon, 30), "the daemon survives SIGKILL"

    def stats(self) -> dict[str, Any]:
        """`/.kvfs/stats.json`."""
        document: dict[str, Any] = json.loads(
            (self.mountpoint / ".kvfs" / "stats.json").read_text()
        )
        return document

    def end(self) -> None:
        """Whatever state it is in."""
        if find_mount(self.mountpoint):
            self.umount(check=False)
        if self._daemon is not None and not wait_for_end(self._daemon, 5):
            self.kill()
        if find_mount(self.mountpoint):
            kvfs("umount", "--force", self.mountpoint)

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.directory)
        shutil.rmtree(self.warm_directory)


@contextmanager
def mounted() -> Iterator[Path]:
    """The mountpoint of a fresh KVFS of 512 MiB."""
    mounter = Mounter()
    try:
        mounter.mount()
        yield mounter.mountpoint
    finally:
        mounter.close()

"""Large pages for the warm tier: a tmpfs of its own, where root mounts.

Fresh memory in 4 KiB pages costs more than all else that a write needs (some 900 µs a MiB
against 60 in pages of 2 MiB), and the usual /dev/shm has no large ones.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_MNT_DETACH = 2  # the claim on it lasts until the process ends

_libc = ctypes.CDLL(None, use_errno=True)


def provide(directory: Path) -> None:
    """Mount a tmpfs with large pages on a directory of another tmpfs, as large as that, unless
    it is one already, something was left there, or we may not."""
    status = os.statvfs(directory.parent)
    size = status.f_blocks * status.f_frsize
    options = f"huge=within_size,mode=0700,size={size}".encode()
    with _locked(directory):
        if os.path.ismount(directory) or any(directory.iterdir()):
            return
        target = os.fsencode(directory)
        if _libc.mount(b"kvfs-warm", target, b"tmpfs", _MS_NOSUID_NODEV_NOEXEC, options):
            reason = os.strerror(ctypes.get_errno())
            log.info("the warm tier has no large pages: no tmpfs on %s: %s", directory, reason)


def give_up(directory: Path) -> None:
    """Unmount and remove it, if nothing was left in it."""
    with _locked(directory):
        if not os.path.ismount(directory) or any(directory.iterdir()):
            return
        if _libc.umount2(os.fsencode(directory), _MNT_DETACH):
            log.info("%s stays: %s", directory, os.strerror(ctypes.get_errno()))
            return
        directory.rmdir()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Daemons that begin and end at the same time come one after the other."""
    directory.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

"""Mounting and unmounting, by fusermount3: it may, where a user may not."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = "fusermount3"


class MountError(RuntimeError):
    """It could not be mounted; says why."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The kernel's end of a mount."""

    fd: int
    mountpoint: Path


def attach(mountpoint: Path, options: Iterable[str]) -> Connection:
    """Raises MountError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [_PROGRAM, "-o", ",".join(sorted(options)), "--", os.fspath(mountpoint)]
        environment = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}
        try:
            done = subprocess.run(
                command, env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE,
                check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise MountError(f"{_PROGRAM} is missing: install the package fuse3") from None
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().removeprefix(f"{_PROGRAM}: ")
            raise MountError(
                f"{reason or _PROGRAM + ' failed'}: may this user mount? "
                "(in a container: --cap-add SYS_ADMIN)"
            )
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    os.set_blocking(fd, False)
    os.set_inheritable(fd, False)
    return Connection(fd, mountpoint)


def detach(connection: Connection, *, is_mounted: bool) -> None:
    """End the connection; what waits for an answer gets ECONNABORTED. The descriptor stays
    taken, so that a late notice from another thread cannot reach a file of its number."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, connection.fd, inheritable=False)
    os.close(nowhere)
    if is_mounted:
        command = [_PROGRAM, "-u", "-z", "-q", "--", os.fspath(connection.mountpoint)]
        subprocess.run(command, check=False)

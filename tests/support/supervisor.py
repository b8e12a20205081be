"""What a service manager does with a program that says when it is ready."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_READY_SECONDS = 60


@contextmanager
def supervised(
    command: Sequence[str | os.PathLike[str]],
    directory: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command that has said READY=1; kill it at the end if it still runs."""
    address = directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(address))
        notify.settimeout(_READY_SECONDS)
        variables = os.environ | dict(environment or {}) | {"NOTIFY_SOCKET": str(address)}
        with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert notify.recv(100) == b"READY=1"
                yield process
            finally:
                process.kill()

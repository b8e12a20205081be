"""TCP ports of this machine."""

from __future__ import annotations

import socket

LOCALHOST = "127.0.0.1"


def free_port() -> int:
    """One that nobody listened at a moment ago."""
    with socket.create_server((LOCALHOST, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port

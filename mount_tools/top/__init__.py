"""`kvfs top`: a live view of a mount."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from mount_tools.arguments import Mountpoint
from mount_tools.common import CommandError
from mount_tools.selection import Order
from mount_tools.sessions import locate
from mount_tools.top.frame import print_frame
from mount_tools.top.history import History
from mount_tools.top.source import Seen, Source, Trouble
from mount_tools.top.table import View

_ONCE_BUDGET_SECONDS = 10.0


def top(
    mountpoint: Mountpoint,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, as is done where it is no terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.1, max=3600)
    ] = 1.0,
    order: Annotated[
        Order, typer.Option("--sort", help="What the sessions are sorted by at first.")
    ] = Order.LAST_USE,
) -> None:
    """Watch a mount: sessions, tiers, rates, latencies, how the ring is filled.

    Keys: p pins the chosen session or lets it go, d brings it down to the ring, f brings it in; s
    sorts, r turns the order round, / filters, ? helps, q quits. It goes on when the mount goes away
    and comes back.

    \b
    Examples:
      kvfs top /mnt/kv
      kvfs top /mnt/kv --once
      kvfs top /mnt/kv --interval 5 --sort stored
    """
    mount, _ = locate(mountpoint)
    source = Source(mount.mountpoint, mount.source)
    view = View(order)
    if once or not sys.stdout.isatty() or not sys.stdin.isatty():
        _once(source, view, min(interval, 1.0))
        return
    try:
        from mount_tools.top.app import TopApp
    except ImportError:
        raise CommandError(
            "kvfs top needs textual; install it with: pip install 'kvfs[top]' (or use --once)"
        ) from None
    TopApp(source, view, interval).run()


def _once(source: Source, view: View, interval: float) -> None:
    """Of two looks, since a rate is what lies between."""
    history = History()
    _add(history, source.look(_ONCE_BUDGET_SECONDS))
    time.sleep(interval)
    seen = _add(history, source.look(_ONCE_BUDGET_SECONDS))
    print_frame(seen, history, view)


def _add(history: History, seen: Seen | Trouble) -> Seen:
    if isinstance(seen, Trouble):
        raise CommandError(seen.message)
    history.add(seen)
    return seen

"""One frame as plain text, for paper and pipes."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mount_tools.top import panels
from mount_tools.top.history import History
from mount_tools.top.source import Seen
from mount_tools.top.table import COLUMNS, View, cells

_PANELS = {"tiers": panels.tiers, "rates": panels.rates, "latency": panels.latencies}
_SHARES = (13, 14, 11)


def frame(seen: Seen, history: History, view: View, width: int) -> Group:
    return Group(
        panels.headline(seen),
        _side_by_side(seen, history, width),
        _panel("ring", panels.joined(panels.ring(seen.segments, width - 4)), width),
        _sessions(seen, view),
    )


def _side_by_side(seen: Seen, history: History, width: int) -> Table:
    grid = Table.grid()
    widths = [width * share // sum(_SHARES) for share in _SHARES]
    grid.add_row(
        *(
            _panel(title, panels.joined(lines(seen, history, wide - 4)), wide)
            for (title, lines), wide in zip(_PANELS.items(), widths, strict=True)
        )
    )
    return grid


def _panel(title: str, text: Text, width: int) -> Panel:
    return Panel(text, title=title, title_align="left", box=box.ROUNDED, width=width)


def _sessions(seen: Seen, view: View) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(
            column.title, justify="right" if column.is_numeric else "left", no_wrap=True
        )
    rows = view.rows(seen.rows)
    hottest = max((row.heat for row in rows), default=0.0)
    for row in rows:
        table.add_row(*cells(row, hottest))
    return table


def print_frame(seen: Seen, history: History, view: View) -> None:
    console = Console()
    width = console.width if console.is_terminal else max(console.width, 120)
    console.width = width
    console.print(frame(seen, history, view, width))

"""How far a move is, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int], None]
Begins = Callable[[int | None], Advance]
"""Told how many bytes there will be (None: nobody knows); what it returns is told how many went."""


@contextmanager
def meter(what: str) -> Iterator[Begins]:
    """A bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip

        def begins(size: int | None) -> Advance:
            task = bar.add_task(what, total=size)
            return lambda count: bar.advance(task, count)

        yield begins

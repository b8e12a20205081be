"""What the verbs share: errors, sizes, tables, JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNITS = ("", "K", "M", "G", "T", "P")
_SIZE_MAX = 2**62  # as of a file
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", re.IGNORECASE)


class CommandError(Exception):
    """The command cannot do it; the message says in one line why and what to do."""


def parse_size(text: str) -> int:
    """`64M`, `1.5GiB` or `4096` as bytes; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * 1024 ** _UNITS.index(match[2].upper()) if match else inf
    if size > _SIZE_MAX:
        raise typer.BadParameter(f"{text!r} is not a size: give it as 4096, 64M or 1.5G")
    return int(size)


def parse_path(text: str) -> Path:
    """For paths that may lie on a mount: what typer does with a Path by itself asks for
    its attributes, and a daemon that hangs would not answer."""
    return Path(text)


def format_size(size: float) -> str:
    """Bytes for people: `64.0 MiB`."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.1f} {unit}iB" if unit else f"{int(size)} B"


def describe_os_error(failure: OSError) -> str:
    """An OSError as one line, without Python's brackets."""
    reason = failure.strerror or str(failure)
    return reason if failure.filename is None else f"{os.fsdecode(failure.filename)}: {reason}"


def say(message: str) -> None:
    """One line for people."""
    print(printable(message))


def warn(message: str) -> None:
    """One line for people that scripts can tell from the output."""
    print(f"kvfs: {printable(message)}", file=sys.stderr)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def warn_json(value: object) -> None:
    """For scripts, where the output is something else: one line on stderr."""
    print(json.dumps(value), file=sys.stderr)


def printable(text: str) -> str:
    """A file's name may hold any bytes: those that would upset a terminal, begin a line, or
    turn the direction of writing are escaped, and what escapes them."""
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text
    )


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[str]
) -> None:
    """On a terminal fitted to its width, else as plain columns. `numeric` columns are set
    to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    console = Console()
    if not console.is_terminal:
        _print_plain(columns, rows, numeric)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    facts = list(facts)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {printable(value)}")


def _print_plain(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str]
) -> None:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in [columns, *rows]:
        cells = [
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())

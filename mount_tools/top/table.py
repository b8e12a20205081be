"""The sessions: columns, which rows, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from rich.text import Text

from mount_tools.common import printable
from mount_tools.selection import Order, arranged
from mount_tools.sessions import ratio
from mount_tools.top.panels import age, heat_bar, short_size, tier_style
from mount_tools.top.source import Row

HEAT_WIDTH = 8
_NAME_MAX = 48
_MARKS = {True: Text("●", "bold yellow"), False: Text(" ")}


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    order: Order | None
    is_numeric: bool = False


COLUMNS = (
    Column("", None),
    Column("session", Order.NAME),
    Column("tokens", Order.TOKENS, is_numeric=True),
    Column("size", Order.SIZE, is_numeric=True),
    Column("stored", Order.STORED, is_numeric=True),
    Column("ratio", Order.RATIO, is_numeric=True),
    Column("tier", Order.TIER),
    Column("warm", None, is_numeric=True),
    Column("heat", Order.HEAT),
    Column("used", Order.LAST_USE, is_numeric=True),
    Column("model", Order.MODEL),
)


@dataclass(slots=True)
class View:
    """`words`: each must be a part of a session's name or model, a pattern of its name, its
    tier, or `pinned`."""

    order: Order = Order.LAST_USE
    reverse: bool = False
    words: tuple[str, ...] = ()

    def rows(self, rows: list[Row]) -> list[Row]:
        wanted = [row for row in rows if all(_matches(row, word) for word in self.words)]
        return arranged(wanted, self.order, reverse=self.reverse)


def _matches(row: Row, word: str) -> bool:
    if word in ("warm", "cold", "mixed"):
        return row.tier == word
    if word == "pinned":
        return row.pinned
    is_pattern = any(c in word for c in "*?[")
    if is_pattern:
        return fnmatchcase(row.name.lower(), word)
    return word in row.name.lower() or word in (row.model or "").lower()


def cells(row: Row, hottest: float) -> list[Text]:
    """One for each of COLUMNS."""
    shrunk = None if row.size is None else ratio(row.size, row.stored)
    name = printable(row.name)
    if len(name) > _NAME_MAX:
        name = f"…{name[1 - _NAME_MAX :]}"
    texts = [
        Text("-" if row.tokens is None else str(row.tokens)),
        Text("-" if row.size is None else short_size(row.size)),
        Text(short_size(row.stored)),
        Text("-" if shrunk is None else f"{shrunk:.2f}"),
    ]
    for text in texts:
        text.justify = "right"
    return [
        _MARKS[row.pinned],
        Text(name, "bold"),
        *texts,
        Text(row.tier or "-", tier_style(row.tier)),
        Text(short_size(row.warm) if row.warm else "-", justify="right"),
        heat_bar(row.heat, hottest, HEAT_WIDTH),
        Text(age(row.last_use), justify="right"),
        Text(printable(row.model or "-"), "grey62"),
    ]

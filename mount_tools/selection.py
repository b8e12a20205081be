"""Which sessions are shown, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

from mount_tools.sessions import ratio


class Listed(Protocol):
    """A session. `size` and `stored` in bytes, `last_use` in seconds since 1970; None where
    nothing is known."""

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def size(self) -> int | None: ...
    @property
    def stored(self) -> int: ...
    @property
    def tier(self) -> str | None: ...
    @property
    def heat(self) -> float | None: ...
    @property
    def last_use(self) -> float: ...
    @property
    def model(self) -> str | None: ...
    @property
    def pinned(self) -> bool: ...


T = TypeVar("T", bound=Listed)


class Order(str, Enum):
    """What sessions are sorted by: words from a to z, figures from the largest on, uses from the
    last on."""

    NAME = "name"
    TOKENS = "tokens"
    SIZE = "size"
    STORED = "stored"
    RATIO = "ratio"
    TIER = "tier"
    HEAT = "heat"
    LAST_USE = "last-use"
    MODEL = "model"


_VALUES: dict[Order, Callable[[Listed], Any]] = {
    Order.NAME: lambda one: one.name,
    Order.TOKENS: lambda one: one.tokens,
    Order.SIZE: lambda one: one.size,
    Order.STORED: lambda one: one.stored,
    Order.RATIO: lambda one: None if one.size is None else ratio(one.size, one.stored),
    Order.TIER: lambda one: one.tier,
    Order.HEAT: lambda one: one.heat,
    Order.LAST_USE: lambda one: one.last_use,
    Order.MODEL: lambda one: one.model,
}
_WORDS = (Order.NAME, Order.TIER, Order.MODEL)


def arranged(listed: Iterable[T], order: Order, *, reverse: bool = False) -> list[T]:
    """Equals by name; what is not known comes last, reversed or not."""
    value = _VALUES[order]
    by_name = sorted(listed, key=lambda one: one.name)
    known = [one for one in by_name if value(one) is not None]
    known.sort(key=value, reverse=(order not in _WORDS) != reverse)
    return known + [one for one in by_name if value(one) is None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """`name` is a pattern as of the shell's, `model` a part of its name in any case; `older_than`
    the seconds since 1970 before which it was used last."""

    name: str | None = None
    model: str | None = None
    tier: str | None = None
    older_than: float | None = None
    pinned: bool = False

    def takes(self, one: Listed) -> bool:
        return (
            (self.name is None or fnmatchcase(one.name, self.name))
            and (self.model is None or self.model.lower() in (one.model or "").lower())
            and (self.tier is None or one.tier == self.tier)
            and (self.older_than is None or one.last_use < self.older_than)
            and (not self.pinned or one.pinned)
        )

"""A row of the table: what was measured, beside its limit, and whether the goal is met."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """`measured` and `limit` are medians of the rounds, in `unit`; `ratio` is the median of the
    rounds' ratios, and what is held against the goal. `met` is None where there is no goal.
    `p99` is the 99th percentile on the bad side: of the slow ones for a speed as for a time.
    """

    id: str
    what: str
    goal: str
    measured: float
    limit: float | None
    unit: str
    met: bool | None
    ratio: float | None = None
    p99: float | None = None
    rounds: int = 1
    limit_is: str = ""
    peers: dict[str, float] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """What one round after the other gave."""

    name: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def fastest(peers: Iterable[Series]) -> Series:
    """The one with the highest median, as what others are held against."""
    best = max(peers, key=lambda peer: peer.median)
    return Series(f"the fastest peer ({best.name})", best.values)


def speed_row(
    id: str,
    what: str,
    share: float | None,
    ours: Series,
    limit: Series,
    *,
    unit: str = "MB/s",
    peers: Sequence[Series] = (),
    remark: str = "",
) -> Row:
    """A speed that has to reach at least that share of its limit."""
    return _ratio_row(id, what, (">=", share), ours, limit, unit, peers, remark)


def cost_row(
    id: str,
    what: str,
    factor: float | None,
    ours: Series,
    limit: Series,
    *,
    unit: str,
    peers: Sequence[Series] = (),
    remark: str = "",
) -> Row:
    """A time, or bytes, that may be at most so many times its limit."""
    return _ratio_row(id, what, ("<=", factor), ours, limit, unit, peers, remark)


def _ratio_row(
    id: str,
    what: str,
    goal: tuple[str, float | None],
    ours: Series,
    limit: Series,
    unit: str,
    peers: Sequence[Series],
    remark: str,
) -> Row:
    sign, bound = goal
    ratio = statistics.median(a / b for a, b in zip(ours.values, limit.values, strict=True))
    return Row(
        id, what,
        goal="" if bound is None else f"{sign} {bound:g} x {limit.name}",
        measured=ours.median,
        limit=limit.median,
        unit=unit,
        met=None if bound is None else ratio >= bound if sign == ">=" else ratio <= bound,
        ratio=ratio,
        p99=float(np.percentile(ours.values, 1 if sign == ">=" else 99)),
        rounds=len(ours.values),
        limit_is=limit.name,
        peers={peer.name: peer.median for peer in peers},
        remark=remark,
    )  # fmt: skip


def bound_row(
    id: str,
    what: str,
    values: Sequence[float],
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    remark: str = "",
) -> Row:
    """A figure that is held against a number of the goal itself."""
    median = statistics.median(values)
    goal, met, limit = "", None, None
    if at_most is not None:
        goal, met, limit = f"<= {at_most:g} {unit}", median <= at_most, at_most
    if at_least is not None:
        goal, met, limit = f">= {at_least:g} {unit}", median >= at_least, at_least
    return Row(
        id, what, goal.strip(), median, limit, unit, met,
        p99=float(np.percentile(values, 1 if at_least is not None else 99)),
        rounds=len(values),
        remark=remark,
    )  # fmt: skip

"""The parts of the view, as text of a given width: the same on a terminal and on paper."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from mount_tools.bars import Spread, bar, column, columns, heat_share
from mount_tools.common import format_age, format_size, printable
from mount_tools.segments import FREE, Segments
from mount_tools.top.history import History, Rates, amplification
from mount_tools.top.source import Seen

PANEL_LINES = 7
_LABEL = 9
_DIM = "grey62"
_GOOD, _BUSY, _BAD = "green", "yellow", "red"
_COLD, _HEAD, _TAIL = "cyan", "bold black on green", "bold black on yellow"


def headline(seen: Seen) -> Text:
    """Which mount it is, and what is wrong with it if anything is."""
    stats = seen.stats
    text = Text.assemble(
        ("kvfs top ", "bold"),
        (printable(stats["mountpoint"]), "bold cyan"),
        (f"  {printable(stats['source'])}", ""),
        (f"  {len(seen.rows)} sessions, policy {stats['policy']}", _DIM),
    )
    for problem in problems(stats):
        text.append(f"  {printable(problem)}", "bold red")
    return text


def problems(stats: dict[str, Any]) -> list[str]:
    found = []
    if stats["damage"] is not None:
        found.append(f"DAMAGED: {stats['damage']}")
    elif stats["read_only"]:
        found.append("read-only")
    if stats["failure"] is not None:
        found.append(f"THE DEVICE FAILS: {stats['failure']}")
    return found


def tiers(seen: Seen, history: History, width: int) -> list[Text]:
    """Hot, warm and cold: how full each is."""
    stats, warm, space = seen.stats, seen.stats["warm"], seen.stats["space"]
    hit_rate = stats["hot_hit_rate"]
    hot = "agents tell nothing" if hit_rate is None else f"{hit_rate:.1%} of blocks found there"
    used = space["total"] - space["free"]
    return [
        _fact("hot", hot, "" if hit_rate is not None else _DIM),
        _gauge("warm", warm["taken"], warm["limit"], width),
        _gauge("leased", warm["leased"], warm["limit"] // 2, width),
        _fact("unsaved", f"{short_size(stats['unsaved'])} not in the ring yet"),
        _gauge("cold", used, space["total"], width, _COLD),
        _fact("live", f"{short_size(space['live'])} in {space['inodes']} inodes"),
        _fact(
            "free", f"{short_size(space['free'])}, {short_size(space['available'])} with reclaim"
        ),
    ]


def rates(seen: Seen, history: History, width: int) -> list[Text]:
    """A second, the newest to the right."""
    counters = seen.stats["counters"]
    since = amplification(counters["device_written"], counters["payload_written"])
    return [
        _rate("operations", history, "operations", width, is_size=False),
        _rate("read", history, "payload_read", width),
        _rate("  of device", history, "device_read", width, _COLD),
        _rate("written", history, "payload_written", width),
        _rate("  to device", history, "device_written", width, _COLD),
        _amplification(history.amplification, since),
        _moved(history.rates[-1] if history.rates else None, counters["reclaimed_units"]),
    ]


def latencies(seen: Seen, history: History, width: int) -> list[Text]:
    """Since the mount; and what deserves a look."""
    stats = seen.stats
    errors = stats["errors"]
    wrong = sum(errors.values())
    right = sum(stats["prefetch"]["right"].values())
    guesses = right + sum(stats["prefetch"]["wrong"].values())
    warm = stats["warm"]
    return [
        Text(f"{'':10}{'p50':>9}{'p99':>10}", _DIM),
        _latency("cold read", stats["latency"]["cold_read"]),
        _latency("warm evict", stats["latency"]["warm_evict"]),
        _fact("guesses", f"{right} of {guesses} right" if guesses else "none yet"),
        _fact("warm hits", f"{warm['hits']} ({short_size(warm['hit_bytes'])})"),
        _fact(
            "errors",
            ", ".join(f"{count} {kind}" for kind, count in errors.items() if count) or "none",
            "bold red" if wrong else "",
        ),
        _fact("scrub", _scrub(stats["scrub"])),
    ]


def ring(segments: Segments, width: int, lines_max: int = 3) -> list[Text]:
    """Each character some segments, or a part of one: the more of it is live the higher."""
    count = segments.count
    lines = min(lines_max, max(1, -(-count // width)))
    spread = Spread(count, width * lines)
    live = np.maximum(segments.live_pct, 0).astype(np.float64)
    is_free = (segments.live_pct == FREE).astype(np.float64)
    cells = [
        _cell(live_pct, free_share)
        for live_pct, free_share in zip(spread.means(live), spread.means(is_free), strict=True)
    ]
    if segments.next is not None:
        cells[spread.cell_of(segments.next)] = ("▹", _GOOD)
    cells[spread.cell_of(segments.tail)] = ("◀", _TAIL)
    cells[spread.cell_of(segments.head)] = ("▶", _HEAD)
    rows = [
        Text.assemble(*cells[line * width : (line + 1) * width], no_wrap=True)
        for line in range(lines)
    ]
    return [*rows, _ring_facts(segments)]


def short_size(size: float) -> str:
    """Bytes where there is little room: `64.0M`."""
    return format_size(size).replace(" ", "").removesuffix("iB")


def age(seconds_since_1970: float) -> str:
    return format_age(max(0.0, time.time() - seconds_since_1970))


def tier_style(tier: str | None) -> str:
    return {"warm": _BUSY, "cold": _COLD, "mixed": "magenta"}.get(tier or "", _DIM)


def heat_bar(heat: float, hottest: float, width: int) -> Text:
    share = heat_share(heat, hottest)
    style = "bright_red" if share > 0.85 else "red" if share > 0.6 else "yellow"
    return Text(bar(share, width), style)


# -- details


def _fact(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_LABEL}} ", _DIM), (value, style), no_wrap=True)


def _gauge(label: str, used: int, limit: int, width: int, style: str | None = None) -> Text:
    share = used / limit if limit else 0.0
    if style is None or share > 0.95:
        style = _BAD if share > 0.95 else _BUSY if share > 0.85 else _GOOD
    figures = f" {share:4.0%} {short_size(used)} of {short_size(limit)}"
    room = max(4, min(24, width - _LABEL - 1 - len(figures)))
    filled = bar(share, room).rstrip()
    return Text.assemble(
        (f"{label:<{_LABEL}} ", _DIM), (filled, style), ("░" * (room - len(filled)), _DIM), figures,
        no_wrap=True,
    )  # fmt: skip


def _rate(
    label: str,
    history: History,
    name: str,
    width: int,
    style: str = _GOOD,
    *,
    is_size: bool = True,
) -> Text:
    values: Sequence[float] = [getattr(one, name) for one in history.rates]
    figure = "-"
    if values:
        figure = f"{short_size(values[-1])}/s" if is_size else f"{values[-1]:.0f}/s"
    room = max(0, width - 21)
    shown = columns(values[-room:]) if room else ""
    return Text.assemble(
        (f"{label:<11}", _DIM), f"{figure:>9} ", (shown.rjust(room), style), no_wrap=True
    )


def _amplification(now: float | None, since: float | None) -> Text:
    figure = "-" if now is None else f"{now:.2f}"
    more = "" if since is None else f"{since:.2f} since mount"
    return Text.assemble(
        (f"{'write ampl.':<11}", _DIM), f"{figure:>9} ", (more, _DIM), no_wrap=True
    )


def _moved(newest: Rates | None, reclaimed: int) -> Text:
    up, down = (newest.promoted, newest.evicted) if newest else (0.0, 0.0)
    gone = f"  {reclaimed} reclaimed"
    if newest is not None and newest.reclaimed_units:
        gone += f", {newest.reclaimed_units:.1f}/s"
    return Text.assemble(
        ("warm ", _DIM), f"▲ {short_size(up)}/s ", f"▼ {short_size(down)}/s", (gone, _DIM),
        no_wrap=True,
    )  # fmt: skip


def _latency(label: str, latency: dict[str, Any]) -> Text:
    if not latency["count"]:
        return Text.assemble((f"{label:<10}", _DIM), (f"{'none yet':>9}", _DIM))
    p50, p99 = (f"{latency[name]:.3g} ms" for name in ("p50_ms", "p99_ms"))
    return Text.assemble((f"{label:<10}", _DIM), f"{p50:>9}{p99:>10}", no_wrap=True)


def _scrub(scrub: dict[str, Any]) -> str:
    if scrub["running"]:
        return f"running, {scrub['share']:.0%}"
    return f"ended {age(scrub['finished'])} ago" if scrub["finished"] else "never yet"


def _cell(live_pct: float, free_share: float) -> tuple[str, str]:
    if free_share == 1:
        return "·", _DIM
    if live_pct <= 0:
        return "_", _DIM
    style = "bright_cyan" if live_pct > 85 else "cyan" if live_pct > 50 else "blue"
    return column(live_pct / 100), style


def _ring_facts(segments: Segments) -> Text:
    parts: list[tuple[str, str]] = [
        ("▶", _HEAD), (f" head {segments.head}", ""),
        ("  ", ""), ("◀", _TAIL), (f" tail {segments.tail}", ""),
        (f"  {segments.live_share:.0%} live", ""),
        (f"  · {segments.free} of {segments.count} free", ""),
        (f"  {short_size(segments.size)} each", _DIM),
    ]  # fmt: skip
    if segments.victim is not None:
        share = segments.live_pct[segments.victim]
        parts.append((f"  cleaned next: {segments.victim} ({share} % live)", _DIM))
    return Text.assemble(*parts, no_wrap=True)


def joined(lines: Iterable[Text]) -> Text:
    """As many lines, however narrow it is."""
    text = Text("\n").join(lines)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text

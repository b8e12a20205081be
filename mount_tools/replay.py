"""`kvfs replay`: a trace against policies, without bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kvfs.engine.policy import Hint, Policy
from kvfs.tiers.gittins import GittinsPolicy
from kvfs.tiers.policy import LRU, S3FIFO, HeatPolicy
from kvfs.tiers.replay import Foreknowledge, Replay, Trace
from mount_tools.common import parse_path, print_json, print_table, say
from mount_tools.plots import figure_for
from mount_tools.traces import read_trace

_SIZES_PCT = (1.0, 5.0, 10.0)
_TURN_HINTS = frozenset({Hint.TOOL_RUNNING, Hint.WAITING})


class Name(str, Enum):
    """Policies as the command names them."""

    LRU = "lru"
    S3FIFO = "s3fifo"
    HEAT = "heat"
    GITTINS = "gittins"
    GITTINS_NO_HINTS = "gittins-no-hints"
    GITTINS_ALL_HINTS = "gittins-all-hints"
    MIN = "min"


DEFAULT = Name.GITTINS
_WITH_HINTS = (Name.GITTINS_NO_HINTS, Name.GITTINS_ALL_HINTS)


@dataclass(frozen=True, slots=True)
class _Contestant:
    make: Callable[[], Policy]
    hints: frozenset[Hint] = frozenset()


_CONTESTANTS = {
    Name.LRU: _Contestant(LRU),
    Name.S3FIFO: _Contestant(S3FIFO),
    Name.HEAT: _Contestant(HeatPolicy),
    Name.GITTINS: _Contestant(GittinsPolicy, _TURN_HINTS),
    Name.GITTINS_NO_HINTS: _Contestant(GittinsPolicy),
    Name.GITTINS_ALL_HINTS: _Contestant(GittinsPolicy, frozenset(Hint)),
}


@dataclass(frozen=True, slots=True)
class Result:
    """`cache_pct` of the trace's unique blocks."""

    policy: str
    cache_pct: float
    hit_ratio: float
    default: bool


def replay(
    path: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="TRACE",
            help="Lines of JSON with hash_ids, or CSV with the turns of sessions.",
            show_default=False,
        ),
    ],
    policies: Annotated[
        list[Name] | None,
        typer.Option(
            "--policy", help="Only this one; may be given several times.", show_default=False
        ),
    ] = None,
    sizes_pct: Annotated[
        list[float] | None,
        typer.Option(
            "--size",
            metavar="PERCENT",
            help="Of the trace's unique blocks; may be given several times.  [default: 1, 5, 10]",
            show_default=False,
        ),
    ] = None,
    window_hours: Annotated[
        float,
        typer.Option(help="Sessions of a CSV trace start at random within so many hours."),
    ] = 4.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE.png",
            help="Draw hit ratio against size.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a trace against eviction policies and print how many blocks each would have had.

    The policy in use is marked with *. MIN knows the future: no policy has more hits.

    \b
    Examples:
      kvfs replay conversation.jsonl
      kvfs replay turns.csv --window-hours 24 --size 1 --policy lru --policy gittins
      kvfs replay turns.csv --plot hits.png --json
    """
    sizes = sorted(set(sizes_pct or _SIZES_PCT))
    if not all(0 < size <= 100 for size in sizes):
        raise typer.BadParameter("--size is a percentage: more than 0, at most 100")
    if not 0 < window_hours < float("inf"):
        raise typer.BadParameter("--window-hours must be more than 0")
    draw = _plotter(plot) if plot else None
    trace = read_trace(path, window_hours)
    results = list(_run(trace, list(dict.fromkeys(policies or _all_for(trace))), sizes))
    if draw:
        draw(results)
    if json_output:
        print_json({"results": [asdict(result) for result in results]})
    else:
        _print(trace, results, sizes)


def _all_for(trace: Trace) -> list[Name]:
    return [name for name in Name if trace.hints or name not in _WITH_HINTS]


def _run(trace: Trace, names: Sequence[Name], sizes: Sequence[float]) -> Iterator[Result]:
    foreknowledge = Foreknowledge(trace) if Name.MIN in names else None
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        total = len(names) * len(sizes) * len(trace.requests)
        task = progress.add_task("replaying", total=total)
        for name in names:
            for size in sizes:
                progress.update(task, description=f"{name.value} at {size:g} %")
                capacity = max(1, int(trace.blocks * size / 100))
                if foreknowledge and name is Name.MIN:
                    ratio = foreknowledge.hit_ratio(capacity)
                    progress.advance(task, len(trace.requests))
                else:
                    contestant = _CONTESTANTS[name]
                    hints = [given for given in trace.hints if given.hint in contestant.hints]
                    run = Replay(replace(trace, hints=hints), contestant.make(), capacity)
                    ratio = run.hit_ratio(lambda: progress.advance(task))
                yield Result(name.value, size, ratio, name is DEFAULT)


def _print(trace: Trace, results: Sequence[Result], sizes: Sequence[float]) -> None:
    say(
        f"{len(trace.requests)} requests, {trace.accesses} blocks asked for, "
        f"{trace.blocks} of them unique; hit ratios by size of the cache in % of these:"
    )
    typer.echo()
    ratios = {(result.policy, result.cache_pct): result.hit_ratio for result in results}
    policies = list(dict.fromkeys(result.policy for result in results))
    columns = ["policy", *(f"{size:g} %" for size in sizes)]
    rows = [
        [f"{policy} *" if policy == DEFAULT.value else policy]
        + [f"{ratios[policy, size]:.4f}" for size in sizes]
        for policy in policies
    ]
    if {Name.LRU.value, DEFAULT.value, Name.MIN.value} <= set(policies):
        rows.append(["* from lru to min", *(_share(ratios, size) for size in sizes)])
    print_table(columns, rows, columns[1:])


def _share(ratios: Mapping[tuple[str, float], float], size: float) -> str:
    """How far the default comes on the way from LRU to MIN."""
    lru, default, best = (ratios[n.value, size] for n in (Name.LRU, DEFAULT, Name.MIN))
    return f"{(default - lru) / (best - lru):.0%}" if best > lru else "-"


def _plotter(path: Path) -> Callable[[Sequence[Result]], None]:
    figure_class = figure_for(path)

    def draw(results: Sequence[Result]) -> None:
        axes = (figure := figure_class(figsize=(8, 5), layout="constrained")).subplots()
        for policy in dict.fromkeys(result.policy for result in results):
            points = [(r.cache_pct, r.hit_ratio) for r in results if r.policy == policy]
            axes.plot(*zip(*points, strict=True), marker="o", label=policy)
        axes.set(xscale="log", xlabel="cache, % of the unique blocks", ylabel="block hit ratio")
        sizes = sorted({result.cache_pct for result in results})
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)

    return draw

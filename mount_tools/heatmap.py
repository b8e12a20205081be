"""`kvfs heatmap`: what of the sessions is used, layer by layer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from mount_tools.arguments import complete_mountpoint
from mount_tools.bars import Spread, bar, column, heat_share
from mount_tools.common import (
    CommandError,
    format_age,
    parse_path,
    print_json,
    print_table,
    printable,
    say,
)
from mount_tools.paths import opened
from mount_tools.plots import figure_for
from mount_tools.sessions import LAYER_PREFIX, Session, find_sessions, locate, read_xattr

_BAR_WIDTH = 12
_LAYERS_WIDTH = 40
_SHOWN = 40
_DRAWN_MAX = 200
_COLUMNS = ("session", "heat", "", "layers", "tier", "unused")


@dataclass(frozen=True, slots=True)
class HeatRow:
    """The heat of a session, and of each of its layer files by their names."""

    name: str
    path: str
    heat: float
    tier: str | None
    last_use: float
    layers: dict[str, float]


def heatmap(
    path: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="MNT",
            help="A mountpoint or a directory in it.",
            autocompletion=complete_mountpoint,
        ),
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE.png",
            help="Draw it, the hottest 200 sessions.",
            show_default=False,
        ),
    ] = None,
    shown: Annotated[
        int, typer.Option("--top", metavar="N", help="Print so many sessions.", min=1)
    ] = _SHOWN,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON, all of it.")] = False,
) -> None:
    """Show which sessions are used, and which layers of them: the hottest first.

    Heat is the sum of 1 / age over the last uses, an age counted in uses of anything on the mount:
    what is used all the time has the most. Bars are by its logarithm, over three decades.

    \b
    Examples:
      kvfs heatmap /mnt/kv
      kvfs heatmap /mnt/kv --plot heat.png
      kvfs heatmap /mnt/kv/team --json
    """
    draw = _plotter(plot) if plot else None
    top = locate(path)[1]
    if not top.is_dir():
        raise CommandError(f"{top} is not a directory; look at a file with: kvfs stat {top}")
    rows = sorted(_rows(top), key=lambda row: (-row.heat, row.name))
    if draw:
        draw(rows[:_DRAWN_MAX])
    if json_output:
        print_json([asdict(row) for row in rows])
    elif rows:
        _print(rows, shown)
    else:
        say(f"no sessions in {top}")


def _rows(top: Path) -> Iterator[HeatRow]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for session in progress.track(find_sessions(top), description="sessions"):
            with suppress(FileNotFoundError, PermissionError):
                yield _row(session)


def _row(session: Session) -> HeatRow:
    layers = [file.name for file in session.files if file.name.startswith(LAYER_PREFIX)]
    with opened(session.path) as fd:
        # To open the file itself would be a use of it.
        heats = {name: _heat(Path(f"/proc/self/fd/{fd}") / name) for name in layers}
    return HeatRow(
        name=session.name,
        path=str(session.path),
        heat=session.heat or 0.0,
        tier=session.tier,
        last_use=session.last_use,
        layers=heats,
    )


def _heat(path: Path) -> float:
    try:
        return float(read_xattr(path, "heat") or 0)
    except FileNotFoundError:  # removed meanwhile
        return 0.0


def _print(rows: Sequence[HeatRow], shown: int) -> None:
    hottest = rows[0].heat
    hottest_layer = max((heat for row in rows for heat in row.layers.values()), default=0.0)
    now = time.time()
    print_table(
        _COLUMNS,
        (
            [
                row.name,
                f"{row.heat:.3g}",
                bar(heat_share(row.heat, hottest), _BAR_WIDTH),
                _strip(row, hottest_layer),
                row.tier or "-",
                format_age(max(0.0, now - row.last_use)),
            ]
            for row in rows[:shown]
        ),
        ("heat", "unused"),
    )
    if len(rows) > shown:
        say(f"and {len(rows) - shown} colder ones (--top {len(rows)} for all)")


def _strip(row: HeatRow, hottest: float) -> str:
    """A character a layer, or for some of them if there are many."""
    shares = np.array([heat_share(heat, hottest) for heat in row.layers.values()])
    if shares.size > _LAYERS_WIDTH:
        shares = Spread(shares.size, _LAYERS_WIDTH).means(shares)
    return "".join(column(share) if share > 0 else "·" for share in shares.tolist())


def _plotter(path: Path) -> Callable[[Sequence[HeatRow]], None]:
    figure_class = figure_for(path)

    def draw(rows: Sequence[HeatRow]) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm

        layers = max((len(row.layers) for row in rows), default=0)
        if not layers:
            raise CommandError("there is nothing to draw: no session has layers")
        heats = np.full((len(rows), layers), np.nan)
        for at, row in enumerate(rows):
            heats[at, : len(row.layers)] = list(row.layers.values())
        most = max((heat for row in rows for heat in row.layers.values()), default=0) or 1.0
        heats[heats == 0] = most / 1e9
        figure = figure_class(
            figsize=(6 + layers / 10, 2 + len(rows) / 5), layout="constrained", dpi=120
        )
        axes = figure.subplots()
        image = axes.imshow(
            heats, aspect="auto", interpolation="nearest",
            cmap=colormaps["inferno"].with_extremes(under="0.85", bad="white"),
            norm=LogNorm(most / 1000, most),
        )  # fmt: skip
        axes.set_yticks(range(len(rows)), [_label(row.name) for row in rows], fontsize=8)
        axes.set(xlabel="layer", title=f"heat of {len(rows)} sessions, the hottest first")
        figure.colorbar(image, label="heat: sum of 1 / age of uses (grey: not used lately)")
        with warnings.catch_warnings():
            # Names may have characters that the font lacks.
            warnings.filterwarnings("ignore", message="Glyph")
            figure.savefig(path)

    return draw


def _label(name: str) -> str:
    """As matplotlib shows it: a dollar begins a formula there."""
    return printable(name).replace("$", r"\$")

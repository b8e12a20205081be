"""The rows as pictures: all of them beside their goals, and those that say more in a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ModuleNotFoundError:
    raise SystemExit(
        "matplotlib is not installed, which draws the plots; install it with: "
        "pip install 'kvfs[plot]'"
    ) from None

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

Rows = list[dict[str, Any]]

_MET, _MISSED, _OURS, _OTHER, _LIMIT = "#2a7f62", "#c8553d", "#2b5c8a", "#b8bfc7", "#333333"
_RAW = "raw, "
_WIDTH_INCHES = 8.0
_WHAT_MAX = 76
_SAVED: dict[str, Any] = {"dpi": 80, "pil_kwargs": {"optimize": True}}


def draw(rows: Rows, directory: Path) -> None:
    """PNGs in `directory`; a picture of rows that were not measured is left as it was."""
    pictures: dict[str, tuple[Callable[[Rows, Path], None], Rows]] = {
        "overview": (_overview, _in_order(row for row in rows if row["met"] is not None)),
        "restore_peers": (_peers, [row for row in _of(rows, 1, 3) if row["peers"]]),
        "scaling": (_scaling, [row for row in _of(rows, 14) if row["peers"]]),
        "write_amplification": (_amplification, [r for r in _of(rows, 9) if r["unit"] == "x"]),
        "metadata": (_metadata, _of(rows, 11)),
    }
    for name, (picture, shown) in pictures.items():
        if shown:
            picture(shown, directory / f"{name}.png")


def _overview(rows: Rows, path: Path) -> None:
    """How much of its goal each row reaches: 1 and above is met."""
    reached = [share_of_goal(row) for row in rows]
    axes = _axes(len(rows), "share of the goal that is reached")
    _bars(axes, [_label(row) for row in rows], reached,
          [_MET if row["met"] else _MISSED for row in rows])  # fmt: skip
    axes.axvline(1, color=_LIMIT, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.2, *reached) * 0.9, max(3.0, *reached) * 1.3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    for place, value in enumerate(reached):
        axes.text(value * 1.02, place, f"{value:.2f}", va="center", fontsize=7)
    _legend(axes, {"met": _MET, "missed": _MISSED})
    _save(axes, path)


def share_of_goal(row: dict[str, Any]) -> float:
    """Above 1 where the goal is met: of a speed measured / goal, of a cost goal / measured."""
    match = re.match(r"(<=|>=) ([0-9.e+-]+)", row["goal"])
    if match is None:
        raise SystemExit(f"row {row['id']} has a goal that is no bound: {row['goal']}")
    goal = float(match[2])
    value = row["measured"] if row["ratio"] is None else row["ratio"]
    return _quotient(value, goal) if match[1] == ">=" else _quotient(goal, value)


def _quotient(a: float, b: float) -> float:
    """What is nothing is as good, or as bad, as can be shown."""
    return min(max(a / b if b else 100.0, 0.01), 100.0)


def _peers(rows: Rows, path: Path) -> None:
    names, values, colours = [], [], []
    for row in rows:
        names += [_label(row), *row["peers"]]
        values += [row["measured"], *row["peers"].values()]
        colours += [_OURS, *[_OTHER] * len(row["peers"])]
        if row["limit"] is not None:
            names.append(f"limit: {row['limit_is']}")
            values.append(row["limit"])
            colours.append(_LIMIT)
    axes = _axes(len(names), "MB/s")
    _bars(axes, names, values, colours)
    _legend(axes, {"KVFS": _OURS, "peers": _OTHER, "limit": _LIMIT})
    _save(axes, path)


def _scaling(rows: Rows, path: Path) -> None:
    """Each row's points are named by a number and what is counted, as `4 readers`; those of the
    raw disk as `raw, 4 readers`."""
    figure, all_axes = pyplot.subplots(1, len(rows), figsize=(_WIDTH_INCHES, 3.2), squeeze=False)
    for axes, row in zip(all_axes[0], rows, strict=True):
        named = row["peers"].items()
        raw = {name.removeprefix(_RAW): value for name, value in named if name.startswith(_RAW)}
        ours = {name: value for name, value in named if not name.startswith(_RAW)}
        both = ((raw, _LIMIT, "raw disk"), (ours, _OURS, "KVFS"))
        for series, color, label in (one for one in both if one[0]):
            points = sorted((_leading_number(name), value) for name, value in series.items())
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=label)
        counts = sorted(map(_leading_number, ours))
        axes.set_xscale("log")
        axes.set_xticks(counts, [f"{count}" for count in counts])
        axes.minorticks_off()
        axes.set_ylim(0, max(row["peers"].values()) * 1.15)
        if raw:
            axes.legend(fontsize=7)
        axes.set_title(
            f"{row['id']}  {_cut(row['what'].rpartition(':')[2].strip(), 26)}", fontsize=8
        )
        axes.set_ylabel(row["unit"], fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, **_SAVED)
    pyplot.close(figure)


def _leading_number(name: str) -> int:
    match = re.match(r"[0-9][0-9 ,]*", name)
    if match is None:
        raise SystemExit(f"{name!r}, a point of a series, does not begin with its number")
    return int(re.sub(r"\D", "", match[0]))


def _amplification(rows: Rows, path: Path) -> None:
    axes = _axes(len(rows), "bytes on the device for one that a program wrote")
    names = [f"{row['id']}  {_cut(row['what'].partition(':')[0])}" for row in rows]
    _bars(axes, names, [row["measured"] for row in rows],
          [_MET if row["met"] else _MISSED for row in rows])  # fmt: skip
    for place, row in enumerate(rows):
        axes.plot([row["limit"]] * 2, [place - 0.4, place + 0.4], color=_LIMIT, linewidth=2)
        axes.text(0.05, place, f"{row['measured']:.2f}", va="center", color="white", fontsize=7)
    _legend(axes, {"met": _MET, "missed": _MISSED, "goal, at most": _LIMIT})
    _save(axes, path)


def _metadata(rows: Rows, path: Path) -> None:
    names, values, colours = [], [], []
    for row in rows:
        names += [_label(row), ""]
        values += [row["measured"], row["limit"]]
        colours += [_OURS, _OTHER]
    axes = _axes(len(names), "operations a second")
    _bars(axes, names, values, colours)
    axes.set_xscale("log")
    for place, row in enumerate(rows):
        axes.text(row["measured"] * 1.05, 2 * place, f"{row['ratio']:.2f}", va="center", fontsize=7)
    _legend(axes, {"KVFS, with its ratio": _OURS, "a filesystem that does nothing": _OTHER})
    _save(axes, path)


# -- what they have in common


def _axes(bars: int, label: str) -> Axes:
    axes = pyplot.subplots(figsize=(_WIDTH_INCHES, 1.2 + 0.2 * bars))[1]
    axes.set_xlabel(label, fontsize=8)
    return axes


def _bars(axes: Axes, names: list[str], values: list[float], colours: list[str]) -> None:
    axes.barh(range(len(names)), values, color=colours, height=0.75)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(axes: Axes, colours: dict[str, str]) -> None:
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes.legend(handles, list(colours), fontsize=7, loc="lower center",
                bbox_to_anchor=(0.5, 1.0), ncols=len(colours), frameon=False)  # fmt: skip


def _save(axes: Axes, path: Path) -> None:
    figure = axes.get_figure()
    assert figure is not None
    figure.savefig(path, bbox_inches="tight", **_SAVED)
    pyplot.close("all")


def _of(rows: Rows, *numbers: int) -> Rows:
    return _in_order(row for row in rows if _order(row["id"])[0] in numbers)


def _in_order(rows: Iterable[dict[str, Any]]) -> Rows:
    return sorted(rows, key=lambda row: _order(row["id"]))


def _order(id: str) -> tuple[int, str]:
    match = re.match(r"(\d+)(.*)", id)
    if match is None:
        raise SystemExit(f"{id!r} is not the id of a row")
    return int(match[1]), match[2]


def _label(row: dict[str, Any]) -> str:
    return f"{row['id']}  {_cut(row['what'])}"


def _cut(text: str, length: int = _WHAT_MAX) -> str:
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"

"""All rows that were measured: as JSON, as a table, as plots."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.rows import Row


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "processor": model[1] if model else platform.processor(),
        "cpus": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
    }


@dataclass(slots=True)
class Report:
    """`rows` by the number in the table."""

    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Report:
        report = cls()
        if path.exists():
            for row in json.loads(path.read_text())["rows"]:
                report.rows.setdefault(_number(row["id"]), []).append(row)
        return report

    def add(self, number: int, rows: list[Row], command: str) -> None:
        told = {"date": date.today().isoformat(), "command": command}
        self.rows[number] = [asdict(row) | told for row in rows]
        Console(width=160).print(_table(self.rows[number]))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"rows": self._in_order(), "machine": machine()}
        path.write_text(json.dumps(document, indent=1) + "\n")

    def publish(self, directory: Path) -> None:
        """A page with the table, and plots."""
        from scripts.bench.plots import draw

        directory.mkdir(parents=True, exist_ok=True)
        draw(self._in_order(), directory)
        (directory / "results.md").write_text("\n".join(_page(self._in_order())) + "\n")

    def _in_order(self) -> list[dict[str, Any]]:
        return [row for number in sorted(self.rows) for row in self.rows[number]]


def _number(id: str) -> int:
    match = re.match(r"\d+", id)
    if match is None:
        raise SystemExit(f"{id!r} is not the id of a row")
    return int(match[0])


_MET = {True: "met", False: "MISSED", None: ""}


def _page(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown. What a row says of its peers and of itself stands below it."""
    told = machine()
    yield from (
        "# Results",
        "",
        "Written by `python -m scripts.bench --docs`; what the rows mean, and what was tried where",
        "one is missed, is in [benchmarks.md](../benchmarks.md). Medians; the ratio is the median",
        f"of the rounds' ratios. {told['processor']}, {told['cpus']} CPUs,",
        f"{told['memory_gib']} GiB of memory, Linux {told['kernel']}, Python {told['python']}.",
        "",
    )
    yield "| row | work | measured | limit | ratio | goal | | p99 | rounds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [*_cells(row), "" if row["p99"] is None else f"{row['p99']:.4g}", row["rounds"]]
        yield "| " + " | ".join(str(cell).replace("|", "\\|").strip() for cell in cells) + " |"
        for name, value in row["peers"].items():
            yield f"| | {name} | {value:.4g} {row['unit']} | | | | | | |"
        if row["remark"]:
            yield f"| | *{row['remark']}* | | | | | | | |"
    yield ""
    yield "Measured by:"
    yield ""
    for day, command in dict.fromkeys((row["date"], row["command"]) for row in rows):
        yield f"    {command}    # {day}"


def _cells(row: dict[str, Any]) -> list[str]:
    limit = "" if row["limit"] is None else f"{row['limit']:.4g} {row['unit']}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    measured = f"{row['measured']:.4g} {row['unit']}"
    return [row["id"], row["what"], measured, limit, ratio, row["goal"], _MET[row["met"]]]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("row", "work", "measured", "limit", "ratio", "goal", "")
    for row in rows:
        table.add_row(*_cells(row))
        for name, value in row["peers"].items():
            table.add_row("", f"  {name}", f"{value:.4g} {row['unit']}")
        if row["remark"]:
            table.add_row("", f"  {row['remark']}")
    return table

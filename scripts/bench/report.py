"""All rows that were measured: as JSON, as a table, as plots."""

from __future__ import annotations

import json
import os
import platform
import re
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
        "kernel": platform.release(),
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

    def add(self, number: int, rows: list[Row]) -> None:
        today = date.today().isoformat()
        self.rows[number] = [asdict(row) | {"date": today} for row in rows]
        Console(width=160).print(_table(self.rows[number]))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for number in sorted(self.rows) for row in self.rows[number]]
        path.write_text(json.dumps({"rows": rows, "machine": machine()}, indent=1) + "\n")

    def plot(self, directory: Path) -> None:
        from scripts.bench.plots import draw

        directory.mkdir(parents=True, exist_ok=True)
        draw([row for number in sorted(self.rows) for row in self.rows[number]], directory)


def _number(id: str) -> int:
    match = re.match(r"\d+", id)
    if match is None:
        raise SystemExit(f"{id!r} is not the id of a row")
    return int(match[0])


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("row", "work", "measured", "limit", "ratio", "goal", "")
    for row in rows:
        met = {True: "met", False: "MISSED", None: ""}[row["met"]]
        limit = "" if row["limit"] is None else f"{row['limit']:.4g} {row['unit']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        measured = f"{row['measured']:.4g} {row['unit']}"
        table.add_row(row["id"], row["what"], measured, limit, ratio, row["goal"], met)
        for name, value in row["peers"].items():
            table.add_row("", f"  {name}", f"{value:.4g} {row['unit']}")
        if row["remark"]:
            table.add_row("", f"  {row['remark']}")
    return table

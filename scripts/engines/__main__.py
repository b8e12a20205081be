"""Run real engines, unchanged, on a directory of KVFS, and beside one on the same disk.

    python -m scripts.engines [--engine NAME ...] [--rounds 5] [--dir DIR] [--beside DIR] [--json]

First what each is promised: what it stored is found after a restart of it and of KVFS, also when
the daemon was killed, and it goes on when its files are reclaimed; all that comes back is compared
with what was stored. Then the seconds that it takes to store and to load, KVFS and the directory's
own filesystem in turns, the kernel's caches dropped before each (as root). Prints a table in
Markdown. Exits 1 if a promise is broken, or an engine is slower than it may be.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scripts.engines.catalog import ENGINES, named
from scripts.engines.promises import promises
from scripts.engines.speed import Comparison, compare
from scripts.trials.ring import MIB, Broken

_HEAD = "| engine | MiB | store, s: ext4 | KVFS | speed | load, s: ext4 | KVFS | speed | goal |"


def main(
    engine: Annotated[list[str] | None, typer.Option(help="One of them; all without it.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="That count; 0: promises alone.")] = 5,
    with_promises: Annotated[
        bool, typer.Option("--promises/--no-promises", help="Or speed alone.")
    ] = True,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="On the disk that is measured.")
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="A directory of another filesystem, in place of the disk's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Instead of the table.")] = False,
) -> None:
    console = Console(stderr=True)
    try:
        chosen = [named(name) for name in engine] if engine else ENGINES
    except KeyError as unknown:
        raise typer.BadParameter(unknown.args[0]) from None
    failed, table = False, []
    for one in chosen:
        try:
            with console.status(f"{one.name}: its environment") as status:
                one.environment.make()
                for name, promise in promises(one).items() if with_promises else ():
                    status.update(f"{one.name}: {name}")
                    promise(one, directory)
                found = None
                for found in compare(one, directory, rounds, beside or directory):
                    done = len(found.load_kvfs)
                    status.update(f"{one.name}: speed, {done} of {rounds} rounds")
        except (Broken, subprocess.CalledProcessError) as failure:
            # The others are run all the same.
            print(f"{one.name}: {failure}", file=sys.stderr)
            failed = True
            continue
        if found is not None:
            table.append(found)
            failed = failed or not found.is_met
    if as_json:
        print(json.dumps([_document(row) for row in table], indent=2))
    elif table:
        print("\n".join([_HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *map(_row, table)]))
    sys.exit(1 if failed else 0)


def _row(row: Comparison) -> str:
    median = statistics.median
    cells = [
        f"{row.engine.name} (beside {row.engine.rival.name} on KVFS)"
        if row.engine.rival
        else row.engine.name,
        f"{row.bytes / MIB:.0f}",
        *(f"{median(row.store_plain):.2f}", f"{median(row.store_kvfs):.2f}"),
        f"{row.store_ratio:.2f}",
        *(f"{median(row.load_plain):.2f}", f"{median(row.load_kvfs):.2f}"),
        f"{row.load_ratio:.2f}",
        f"{row.goal:g}" if row.is_met else f"{row.goal:g}, missed",
    ]
    return f"| {' | '.join(cells)} |"


def _document(row: Comparison) -> dict[str, object]:
    ratios = {"store_ratio": row.store_ratio, "load_ratio": row.load_ratio, "goal": row.goal}
    return asdict(row) | {"engine": row.engine.name} | ratios


if __name__ == "__main__":
    typer.run(main)

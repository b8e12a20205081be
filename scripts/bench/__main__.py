"""Measure KVFS beside its limits and what else one would use.

    python -m scripts.bench [--short] [--rows 1,4,6] [--dir DIR] [--rounds 5]

Rows by number, as in docs/benchmarks.md; without --rows all. The results are kept in
build/bench.json, a row that is measured again in place of the earlier one; --docs writes all
that is there as a table and plots. As root: caches are dropped.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from subprocess import SubprocessError
from types import ModuleType

from scripts.bench.plan import Plan
from scripts.bench.report import Report

# The modules that measure a number of the table; a module is loaded when it is asked for, as
# some need torch.
MODULES = {
    1: "restore",
    2: "adapter",
    3: "small",
    4: "random_layer",
    5: "warm",
    6: "save",
    7: "appends",
    8: "turns",
    9: "steady",
    10: "remount",
    11: "metadata",
    12: "compression",
    13: "agent",
    14: "scaling",
    15: "group",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=(__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="minutes instead of an hour")
    parser.add_argument("--rows", default="", help="numbers, as 1,4,6; all without it")
    parser.add_argument("--rounds", type=int, default=5, help="that count, each (default 5)")
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--docs", type=Path, default=None, help="a folder for table and plots")
    parser.add_argument("--only-docs", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.rows.split(",") if number] or list(MODULES)
    unknown = sorted(set(numbers) - set(MODULES))
    if unknown:
        parser.error(f"there is no row {unknown[0]}; there are 1 to {max(MODULES)}")
    report = Report.load(arguments.json)
    failed = []
    for number in [] if arguments.only_docs else numbers:
        with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=arguments.dir) as directory:
            plan = Plan(Path(directory), arguments.rounds, arguments.short)
            try:
                rows = _module(number).measure(plan)
            except (OSError, SubprocessError, SystemExit) as failure:
                # The others are measured all the same.
                print(f"row {number}: {failure}", file=sys.stderr)
                failed.append(number)
                continue
        report.add(number, rows, plan.command(number))
        report.save(arguments.json)
    if arguments.docs is not None:
        report.publish(arguments.docs)
    sys.exit(1 if failed else 0)


def _module(number: int) -> ModuleType:
    return importlib.import_module(f"scripts.bench.{MODULES[number]}")


if __name__ == "__main__":
    main()

"""Wrong bytes for every parser of bytes from outside.

    python scripts/fuzz.py [--runs 1000000] [--target NAME]... [--seed N] [--jobs 2] [--keep DIR]
    python scripts/fuzz.py --target NAME --input FILE

Takes what is right (tests/fuzz/targets.py says of what), makes it wrong by a few edits, mostly
puts the checksums right again, and has it parsed. A parser gives a value or raises the error
that it says, within 1 GiB of memory and a time; whatever else happens is told, and the bytes
are kept in a file to see it again. Exits 1 then.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.guard import memory_bounded, time_bounded
from tests.fuzz.targets import TARGETS, Target

_MILLION = 1_000_000
_PORTION = 500


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` is the same for what goes wrong at the same place."""

    target: str
    kind: str
    trace: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Portion:
    target: str
    seed: str
    runs: int


@dataclass(frozen=True, slots=True)
class Done:
    target: str
    runs: int
    seconds: float
    faults: list[Fault]


def find(name: str) -> Target:
    for target in TARGETS:
        if target.name == name:
            return target
    raise typer.BadParameter(
        f"no target {name!r}; known are {', '.join(target.name for target in TARGETS)}"
    )


def attempt(target: Target, random: Random) -> Fault | None:
    data = b""
    try:
        data = target.make(random)
        with time_bounded(target.seconds_max):
            target.run(data)
    except Exception as failure:
        frames = traceback.extract_tb(failure.__traceback__)
        last = next((f for f in reversed(frames) if "kvfs" in f.filename), frames[-1])
        place = f"{Path(last.filename).name}:{last.lineno}"
        kind = f"{type(failure).__name__} at {place}"
        return Fault(target.name, kind, traceback.format_exc(limit=-8), data)
    return None


def work(portion: Portion) -> Done:
    logging.disable(logging.CRITICAL)
    target, random = find(portion.target), Random(portion.seed)
    started, faults = time.monotonic(), []
    with memory_bounded():
        for _ in range(portion.runs):
            fault = attempt(target, random)
            if fault is not None:
                faults.append(fault)
    return Done(target.name, portion.runs, time.monotonic() - started, faults)


def portions(targets: list[Target], runs: int, seed: int) -> Iterator[Portion]:
    """The long ones first, so that the processes end together."""
    shares = sum(target.share for target in targets)
    for target in reversed(targets):
        left = -(-runs * target.share // shares)
        size = _PORTION if target.share > 5_000 else 20
        number = 0
        while left > 0:
            yield Portion(target.name, f"{seed} {target.name} {number}", min(size, left))
            left -= size
            number += 1


def fuzz(
    runs: Annotated[int, typer.Option(min=1, help="Executions in all.")] = _MILLION,
    target: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the run; else one by chance.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    keep: Annotated[Path, typer.Option(help="Where faulty bytes go.")] = Path("build/fuzz"),
    input_file: Annotated[
        Path | None, typer.Option("--input", help="Bytes of a file, once, for the one target.")
    ] = None,
) -> None:
    """Wrong bytes for every parser of bytes from outside."""
    logging.disable(logging.CRITICAL)
    chosen = [find(name) for name in target] if target else list(TARGETS)
    if input_file is not None:
        if len(chosen) != 1:
            raise typer.BadParameter("--input wants one --target")
        chosen[0].run(input_file.read_bytes())
        print("nothing wrong")
        return
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    print(f"seed {seed}")
    done, faults = run_all(chosen, runs, seed, jobs)
    report(chosen, done, faults, keep)


def run_all(
    chosen: list[Target], runs: int, seed: int, jobs: int
) -> tuple[dict[str, tuple[int, float]], list[Fault]]:
    """Executions and seconds by target, and what went wrong."""
    done: dict[str, tuple[int, float]] = {}
    faults: list[Fault] = []
    work_list = list(portions(chosen, runs, seed))
    # Each starts anew: what a target keeps open is of one process.
    context = multiprocessing.get_context("spawn")
    with Progress(console=Console(stderr=True)) as bar, context.Pool(jobs) as pool:
        task = bar.add_task("executions", total=sum(portion.runs for portion in work_list))
        for part in pool.imap_unordered(work, work_list):
            count, seconds = done.get(part.target, (0, 0.0))
            done[part.target] = (count + part.runs, seconds + part.seconds)
            faults += part.faults
            bar.advance(task, part.runs)
    return done, faults


def report(
    chosen: list[Target], done: dict[str, tuple[int, float]], faults: list[Fault], keep: Path
) -> None:
    found = Counter((fault.target, fault.kind) for fault in faults)
    for target in chosen:
        count, seconds = done[target.name]
        wrong = sum(n for (name, _), n in found.items() if name == target.name)
        told = f"  {wrong} WRONG" if wrong else ""
        each = 1e6 * seconds / count
        print(f"{target.name:<18} {count:>8} executions {each:10.0f} us each{told}")
    print(f"{sum(count for count, _ in done.values())} executions, {len(found)} kinds of faults")
    shown: set[tuple[str, str]] = set()
    for fault in sorted(faults, key=lambda fault: len(fault.data)):
        if (fault.target, fault.kind) in shown:
            continue
        shown.add((fault.target, fault.kind))
        path = kept(fault, keep)
        print(f"\n{fault.target}: {fault.kind}, {found[fault.target, fault.kind]} times")
        print(fault.trace.rstrip())
        print(f"again: python scripts/fuzz.py --target '{fault.target}' --input {path}")
    if faults:
        sys.exit(1)


def kept(fault: Fault, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha1(fault.data).hexdigest()[:12]
    path = directory / f"{re.sub('[^a-z]+', '-', fault.target)}-{digest}"
    path.write_bytes(fault.data)
    return path


if __name__ == "__main__":
    typer.run(fuzz)

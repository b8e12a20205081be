"""Cut what a device was written, everywhere, and see that each rest is a state that may be.

    python scripts/crash.py [--cuts 10000] [--mounts 100] [--seed 1] [--jobs N]
    python scripts/crash.py --seed SEED --cut NUMBER

Sessions are at work on small rings (tests/crash/history.py): each history follows from its
seed. Its writes to the device are cut at both borders of each frame and inside it, with
what no flush had covered lost, reordered or torn, or with the daemon alone killed
(tests/crash/cuts.py). What is left must open, be the state after a prefix of the operations
that contains all that was confirmed, carry on, and have fsck find nothing; some of it through
a real mount too. Prints seed and number of each cut that fails, and then exits 1; with these
two that cut is done again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.cuts import A_WRITE, check_cut, cuts
from tests.crash.history import History
from tests.crash.mounted import check_mounted
from tests.support.mounter import Mounter

HISTORY_CUTS = 2500
PART_CUTS = 250  # done in one go: the history until there is recorded for it


@dataclass(frozen=True, slots=True)
class Part:
    """Some cuts of one history, and those of them that are looked at through a mount."""

    seed: int
    numbers: range
    mounted: frozenset[int]


@dataclass(slots=True)
class Outcome:
    """What came of a part. `turns`: how many times its history had written the ring over."""

    part: Part
    fates: Counter[str] = field(default_factory=Counter)
    mounted: int = 0
    faults: list[str] = field(default_factory=list)
    operations: int = 0
    turns: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)


def parts(cut_count: int, mount_count: int, every: int, seed: int) -> Iterator[Part]:
    numbers = range(0, cut_count * every, every)
    mounted = set(Random(seed).sample(numbers, min(mount_count, cut_count)))
    for start in range(0, cut_count, PART_CUTS):
        chosen = numbers[start : start + PART_CUTS]
        yield from _by_history(chosen, mounted, seed)


def _by_history(chosen: range, mounted: set[int], seed: int) -> Iterator[Part]:
    """The numbers go on over all histories; each history begins with 0."""
    histories = dict.fromkeys(number // HISTORY_CUTS for number in chosen)
    for history in histories:
        first = history * HISTORY_CUTS
        own = [number - first for number in chosen if number // HISTORY_CUTS == history]
        seen = frozenset(number for number in own if number + first in mounted)
        yield Part(seed + history, range(own[0], own[-1] + 1, chosen.step), seen)


def check_part(part: Part) -> Outcome:
    """Runs in a process of its own."""
    # That one superblock of two is torn is what is tried.
    logging.getLogger("kvfs").setLevel(logging.CRITICAL)
    outcome = Outcome(part)
    try:
        with ExitStack() as stack:
            history = stack.enter_context(recorded(part.seed, part.numbers))
            mounter = stack.enter_context(a_mounter()) if part.mounted else None
            _check_cuts(history, mounter, outcome)
            outcome.operations = sum(len(life.states) - 1 for life in history.lives_of_devices)
            outcome.turns, outcome.happened = history.turns, history.happened
    except Exception:
        outcome.faults.append(f"seed {part.seed}: {traceback.format_exc()}")
    return outcome


def _check_cuts(history: History, mounter: Mounter | None, outcome: Outcome) -> None:
    part = outcome.part
    for cut in cuts(history, part.seed, part.numbers):
        try:
            outcome.fates[check_cut(history, cut).value] += 1
            if mounter is not None and cut.number in part.mounted:
                check_mounted(history, cut, mounter)
                outcome.mounted += 1
        except Exception:
            outcome.faults.append(f"{cut}: {traceback.format_exc()}")


@contextmanager
def recorded(seed: int, numbers: range) -> Iterator[History]:
    """A history that goes on until the last of the cuts."""
    history = History(seed, numbers[0] // A_WRITE)
    try:
        history.work(numbers[-1] // A_WRITE + 1)
        yield history
    finally:
        history.teardown()


@contextmanager
def a_mounter() -> Iterator[Mounter]:
    mounter = Mounter("16M", "--segment-size", "1M")
    try:
        yield mounter
    finally:
        mounter.close()


# -- what is told -------------------------------------------------------------------------


def run(todo: list[Part], jobs: int) -> list[Outcome]:
    outcomes = []
    columns = (TextColumn("cuts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        task = bar.add_task("cuts", total=sum(len(part.numbers) for part in todo))
        for future in as_completed([pool.submit(check_part, part) for part in todo]):
            outcome = future.result()
            outcomes.append(outcome)
            for fault in outcome.faults:
                print(fault, flush=True)
            bar.advance(task, len(outcome.part.numbers))
            if bar.disable:
                print(f"{sum(len(one.part.numbers) for one in outcomes)} cuts done", flush=True)
    return outcomes


def report(outcomes: list[Outcome], seconds: float) -> None:
    """Of each history the last part knows all."""
    last = {one.part.seed: one for one in sorted(outcomes, key=lambda one: one.part.numbers[-1])}
    fates: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for outcome in outcomes:
        fates.update(outcome.fates)
    for outcome in last.values():
        happened.update(outcome.happened)
    turns = [outcome.turns for outcome in last.values()]
    print(
        f"{len(last)} histories, {sum(one.operations for one in last.values())} operations, "
        f"rings written {min(turns):.1f} to {max(turns):.1f} times over"
    )
    print("happened: " + ", ".join(f"{what} {n}" for what, n in sorted(happened.items())))
    print("writes not flushed: " + ", ".join(f"{fate} {n}" for fate, n in sorted(fates.items())))
    faults = sum(len(outcome.faults) for outcome in outcomes)
    print(
        f"{sum(fates.values())} cuts, {sum(one.mounted for one in outcomes)} of them through a "
        f"mount, {seconds:.0f} s: {faults or 'none'} failed"
    )
    if faults:
        print("again: python scripts/crash.py --seed SEED --cut NUMBER")


def main(
    cut_count: Annotated[int, typer.Option("--cuts", min=1, help="How many.")] = 10_000,
    mount_count: Annotated[
        int, typer.Option("--mounts", min=0, help="How many of them through a mount too.")
    ] = 100,
    every: Annotated[
        int, typer.Option(min=1, help="Take each n-th cut, for a short run over long histories.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the first history.")] = 1,
    number: Annotated[
        int | None, typer.Option("--cut", min=0, help="This cut alone, of the one with the seed.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Cut the device's write stream everywhere: each rest must be a state that may be."""
    if every > 1 and every % A_WRITE == 0:
        raise typer.BadParameter(
            f"no multiple of {A_WRITE}: these are all the same part of a write"
        )
    if number is None:
        todo = list(parts(cut_count, mount_count, every, seed))
    else:
        mounted = frozenset([number] if mount_count else [])
        todo = [Part(seed, range(number, number + 1), mounted)]
    started = time.monotonic()
    outcomes = run(todo, jobs)
    report(outcomes, time.monotonic() - started)
    raise typer.Exit(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    typer.run(main)

"""Damage rings at random, thousands of times, and hold every one to the promises.

    python scripts/rot.py [--damages 5000] [--seed 1] [--kind flipped] [--workers 2]

Rings of several pasts (unmounted, killed, turned over with cleaned segments, turned over and
killed, the same encrypted) hold sessions, forks, deep directories, xattrs, links. A damage hits one
structure (flipped bits, a block of zeros or noise, a block that a lost write left old) or several
(runs, misdirected and swapped blocks, whole stale or empty segments, blocks of another history of
the ring or of another ring, a device that was cut). Each ring is opened, walked, read and written
as it is, then checked and repaired: tests/rot/verdict.py says what must hold. Exits 1 if a promise
was broken; each broken one is told with the seed that shows it again: --seed SEED --damages 1.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvfs.engine import ciphers
from tests.rot.anatomy import anatomy
from tests.rot.damages import KINDS, damaged
from tests.rot.rings import NAMES
from tests.rot.verdict import judge

_SHOWN_MAX = 20
_AT_ONCE = 8


def _outcome(kind: str | None, seed: int) -> tuple[int, str, str | None]:
    """Of one damage: what it was, and which promise it broke."""
    logging.disable(logging.CRITICAL)
    ciphers._SCRYPT_N = 2  # it is to take long, for who guesses
    random = Random(seed)
    chosen = random.choice(sorted(KINDS)) if kind is None else kind
    one = anatomy(random.choice(NAMES))
    damage = damaged(one, random, chosen)
    try:
        judge(one, damage)
    except Exception as fault:  # whatever it is, it is a promise that was broken
        return seed, chosen, f"{type(fault).__name__}: {damage.what}: {fault}"
    return seed, chosen, None


def _outcomes(
    kind: str | None, seeds: range, workers: int
) -> Iterator[tuple[int, str, str | None]]:
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(partial(_outcome, kind), seeds, chunksize=_AT_ONCE)


def rot(
    damages: Annotated[int, typer.Option(min=1, help="How many.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the first; each one has the next.")] = 1,
    kind: Annotated[str | None, typer.Option(help=f"One of {', '.join(sorted(KINDS))}.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> int:
    """Damage rings at random and hold each to the promises."""
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind} is none of {', '.join(sorted(KINDS))}")
    done: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("damages", total=damages)
        for number, what, fault in _outcomes(kind, range(seed, seed + damages), workers):
            done[what] += 1
            if fault is not None:
                broken.append((number, fault))
            bar.advance(task)
    for what, count in sorted(done.items()):
        print(f"{what.replace('_', ' '):20} {count:6}")
    for number, fault in islice(broken, _SHOWN_MAX):
        print(f"seed {number}: {fault}")
    print(f"{damages} damages from seed {seed} on: {len(broken)} broke a promise")
    return 1 if broken else 0


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=__doc__)(rot)
    sys.exit(app(standalone_mode=False) or 0)


if __name__ == "__main__":
    main()

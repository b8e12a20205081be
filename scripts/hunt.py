"""Hunt for bytes of other sessions, and for old ones, while everything is used again quickly.

    python scripts/hunt.py [--minutes 10] [--writers 4] [--hunters 3] [--kills 20]
        [--size 96M] [--warm 48M] [--seed 1] [--dir DIR]

Writers churn in a small ring with a small warm tier; each line of 64 bytes that they write says
of which file, version and place it is. Each writer compares what is its own with what it wrote;
hunters read the files of all, by read, preadv, O_DIRECT, mmap, by the daemon's memory as it is
offered, by open files without a name and by handles from before. Meanwhile sessions are forked,
reclaimed, removed, sent down and brought up, segments are cleaned, and the daemon is killed or
unmounted and mounted again. Exits 1 with the first byte that is not its file's.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.trials.crew import Crew
from scripts.trials.hunter import hunt
from scripts.trials.paint import LINE
from scripts.trials.ring import Broken, FastClock, Ring, new_ring
from scripts.trials.writer import check, write

_CLOCK_FACTOR = 100  # a session may be reclaimed 0.6 s after its last use


@dataclass(slots=True)
class Trial:
    ring: Ring
    scratch: Path
    writers: int
    hunters: int
    warm: str
    rng: random.Random
    clock: FastClock = field(default_factory=lambda: FastClock.from_now(_CLOCK_FACTOR))
    counts: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        self._mount()
        for home, _ in self._homes():
            home.mkdir()
            os.setxattr(home, "user.kvfs.unit", b"pool")

    def hunt(self, seconds: float, *, is_killed: bool) -> None:
        """For so long, then a new mount."""
        crew = Crew()
        try:
            for home, ledger in self._homes():
                seed = self.rng.getrandbits(40)
                crew.start(write, home, ledger, seed, grain=LINE, reclaims=True)
            for number in range(self.hunters):
                notes = self.scratch / f"hunter-{number}"
                crew.start(hunt, self.ring.mountpoint, notes, self.rng.getrandbits(40))
            crew.work(seconds)
            self._see()
            if is_killed:
                self.ring.kill()
            self.counts.update(crew.stop())
        finally:
            crew.close()
        if not is_killed:
            self.ring.umount()
        self.counts["kills" if is_killed else "unmounts"] += 1
        self._mount()

    def end(self) -> None:
        """The last look is each writer's at all that it has."""
        crew = Crew()
        for home, ledger in self._homes():
            crew.start(check, home, ledger, reclaims=True)
        self.counts.update(crew.join())
        self.ring.umount()
        self.ring.fsck()

    def _homes(self) -> Iterator[tuple[Path, Path]]:
        """Of each writer: its directory, and its ledger."""
        for number in range(self.writers):
            name = f"writer-{number}"
            yield self.ring.mountpoint / name, self.scratch / name

    def _mount(self) -> None:
        self.ring.mount("--warm", self.warm, "--checkpoint", "5", clock=self.clock)

    def _see(self) -> None:
        stats = self.ring.stats()
        for name in ("cleaned_segments", "reclaimed_units", "device_written"):
            self.counts[name] += stats["counters"][name]
        for name in ("evicted_files", "promoted"):
            self.counts[name] += stats["warm"][name]


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option()] = 10,
    writers: Annotated[int, typer.Option(min=1)] = 4,
    hunters: Annotated[int, typer.Option(min=0)] = 3,
    kills: Annotated[int, typer.Option(help="New mounts; two of three after a SIGKILL.")] = 20,
    size: Annotated[str, typer.Option(help="Of the ring.")] = "96M",
    warm: Annotated[str, typer.Option(help="Of the warm tier.")] = "48M",
    seed: Annotated[int, typer.Option()] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk, for the image.")
    ] = None,
) -> None:
    """Look for foreign and old bytes while everything is used again quickly."""
    console = Console()
    rng = random.Random(seed)
    with new_ring("hunt", directory, "--size", size, "--segment-size", "1M") as ring:
        scratch = ring.directory / "ledgers"
        scratch.mkdir()
        trial = Trial(ring, scratch, writers, hunters, warm, rng)
        until = time.monotonic() + 60 * minutes
        try:
            trial.begin()
            with Progress(console=console, transient=True, auto_refresh=False) as progress:
                for left in progress.track(range(kills, 0, -1), description="mounts"):
                    seconds = max(until - time.monotonic(), 0) / left
                    trial.hunt(seconds * rng.uniform(0.6, 1), is_killed=left % 3 != 0)
            trial.end()
            if ring.errors():
                raise Broken("\n".join(["the daemon has logged errors:", *ring.errors()]))
        except Broken as broken:
            console.print(f"broken, with seed {seed}: {broken}", highlight=False, soft_wrap=True)
            console.print("\n".join(ring.log_tail()), highlight=False, soft_wrap=True, markup=False)
            raise typer.Exit(1) from broken
    counts = trial.counts
    console.print(f"counts: {dict(sorted(counts.items()))}", highlight=False, soft_wrap=True)
    looked = sum(count for name, count in counts.items() if name.startswith("by "))
    console.print(
        f"{counts['kills']} kills, {counts['unmounts']} unmounts, "
        f"{counts['reclaimed_units']} units reclaimed, {counts['cleaned_segments']} segments "
        f"cleaned, {counts['evicted_files']} warm files given up; hunters looked at "
        f"{looked >> 20} MiB, writers at {counts['checked'] >> 20} MiB: no foreign byte",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


if __name__ == "__main__":
    app()

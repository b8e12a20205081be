"""Fill a ring to the brim again and again, and hold it to its promises.

    python scripts/full.py [--rounds 50] [--writers 8] [--size 64M] [--seed 1] [--dir DIR]

In each round eight processes write, overwrite, rename, link, cut, fork and remove until each met
ENOSPC several times; with reclaim, whole units go instead, oldest first, by a clock of the
daemon's that runs faster. Some rounds end with SIGKILL, some with a new mount, the others go on.
Nothing that was answered may be lost (with reclaim a whole unit may be gone, and is listed then),
a write that found no space leaves what was there, or the part that it was answered. When all is
removed, space, inodes, warm memory and the daemon's descriptors are those of the start, and fsck
finds nothing. Exits 1 on the first promise that was broken.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.trials.crew import Crew
from scripts.trials.ring import Broken, FastClock, Ring, new_ring
from scripts.trials.writer import check, empty, write

_CLOCK_FACTOR = 100  # a session may be reclaimed 0.6 s after its last use
_SETTLED_SECONDS = 60
_FILL_SECONDS = 60
# What is not in a fresh ring: nodes of the index that are empty, the log of what was reclaimed.
_METADATA_MAX = 256 * 1024
_KILLED_AFTER = (300, 5000)  # operations
_ENDINGS = ("stay", "mount", "kill")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a mount without files: space in bytes, inodes, warm files, the daemon's descriptors."""

    free: int
    inodes: int
    warm_files: int
    descriptors: int


@dataclass(slots=True)
class Trial:
    """`start` is what the ring was when nothing had been in it."""

    ring: Ring
    scratch: Path
    writers: int
    full: int
    rng: random.Random
    clock: FastClock = field(default_factory=lambda: FastClock.from_now(_CLOCK_FACTOR))
    reclaims: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    start: Figures | None = None
    lost: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self._mount()
        for home, _ in self._homes():
            home.mkdir()
            os.setxattr(home, "user.kvfs.unit", b"pool")
        self.start = self._figures()

    def round(self, ending: str) -> None:
        """One, which begins and ends with a mount without files."""
        self._fill(is_killed=ending == "kill")
        if ending == "kill":
            self.counts["kills"] += 1
            self._mount()
        elif ending == "mount":
            self.ring.umount()
            self.ring.fsck()
            self._mount()
        self._all(check)
        self._all(empty)
        self._check_space()
        if ending != "stay":
            self._mount_anew()
            self._check_space()

    def end(self) -> None:
        self.ring.umount()
        self.ring.fsck()
        self.ring.audit()

    def _fill(self, *, is_killed: bool) -> None:
        crew = Crew()
        try:
            for home, ledger in self._homes():
                seed = self.rng.getrandbits(40)
                crew.start(write, home, ledger, seed, reclaims=self.reclaims, full_max=self.full)
            if is_killed:
                until = self.rng.randrange(*_KILLED_AFTER)
                crew.work(_FILL_SECONDS, lambda: self.ring.operations >= until)
                self.ring.kill()
            else:
                crew.work(_FILL_SECONDS)
            self.counts.update(crew.stop())
        finally:
            crew.close()

    def _all(self, work: Callable[..., Counter[str]]) -> None:
        crew = Crew()
        for home, ledger in self._homes():
            crew.start(work, home, ledger, reclaims=self.reclaims)
        self.counts.update(crew.join())

    def _homes(self) -> Iterator[tuple[Path, Path]]:
        """Of each writer: its directory, and its ledger."""
        for number in range(self.writers):
            name = f"writer-{number}"
            yield self.ring.mountpoint / name, self.scratch / name

    def _mount(self) -> None:
        reclaim = "--reclaim" if self.reclaims else "--no-reclaim"
        self.ring.mount(reclaim, "--warm", "64M", "--checkpoint", "2", clock=self.clock)

    def _mount_anew(self) -> None:
        """With reclaim where it was without, and the other way round."""
        self.ring.umount()
        left = [path for path in self.ring.warm.rglob("*") if path.is_file()]
        if left:
            raise Broken(f"unmounted, and there is {left}")
        self.ring.fsck()
        self.reclaims = not self.reclaims
        self._mount()

    # -- what is there when nothing is

    def _check_space(self) -> None:
        start = self.start
        assert start is not None

        def is_as_at_the_start() -> bool:
            now = self._figures()
            return (
                start.free - now.free <= _METADATA_MAX
                and (now.inodes, now.warm_files) == (start.inodes, start.warm_files)
                and now.descriptors <= start.descriptors
            )

        if not _wait_until(is_as_at_the_start):
            raise Broken(f"all is removed: {self._figures()}, at the start {start}")
        self.lost.append(start.free - self._figures().free)

    def _figures(self) -> Figures:
        status = os.statvfs(self.ring.mountpoint)
        return Figures(
            status.f_bfree * status.f_bsize,
            status.f_files - status.f_ffree,
            len(list(self.ring.warm.rglob("*.kvmap"))),
            self._descriptors(),
        )

    def _descriptors(self) -> int:
        """Without the chunks of the operation log, of which a few wait for their next use."""
        folder = Path(f"/proc/{self.ring.stats()['pid']}/fd")
        return sum("/log/chunk." not in os.readlink(link) for link in folder.iterdir())


def _wait_until(is_so: Callable[[], bool]) -> bool:
    limit = time.monotonic() + _SETTLED_SECONDS
    while not is_so():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 50,
    writers: Annotated[int, typer.Option(min=1)] = 8,
    size: Annotated[str, typer.Option(help="Of the ring.")] = "64M",
    full: Annotated[int, typer.Option(help="How often each writer finds it full in a round.")] = 12,
    seed: Annotated[int, typer.Option()] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk, for the image.")
    ] = None,
) -> None:
    """Fill a ring to ENOSPC, with reclaim and without, and see that nothing is lost or left."""
    console = Console()
    rng = random.Random(seed)
    with new_ring("full", directory, "--size", size, "--segment-size", "1M") as ring:
        scratch = ring.directory / "ledgers"
        scratch.mkdir()
        trial = Trial(ring, scratch, writers, full, rng)
        try:
            trial.begin()
            with Progress(console=console, transient=True, auto_refresh=False) as progress:
                for number in progress.track(range(rounds), description="rounds"):
                    trial.round(rng.choice(_ENDINGS) if number else "kill")
            trial.end()
            if ring.errors():
                raise Broken("\n".join(["the daemon has logged errors:", *ring.errors()]))
        except (Broken, AssertionError) as broken:
            console.print(f"broken, with seed {seed}: {broken}", highlight=False, soft_wrap=True)
            console.print("\n".join(ring.log_tail()), highlight=False, soft_wrap=True, markup=False)
            raise typer.Exit(1) from broken
    counts = dict(sorted(trial.counts.items()))
    console.print(f"operations: {counts}", highlight=False, soft_wrap=True)
    console.print(
        f"{rounds} rounds with seed {seed}: full {counts.get('full', 0)} times, "
        f"{counts.get('found reclaimed', 0)} units reclaimed, {counts.get('kills', 0)} kills; "
        f"{counts.get('checked', 0) >> 20} MiB checked, every byte is right; at most "
        f"{max(trial.lost) >> 10} KiB less free than at the start, {trial.lost[-1] >> 10} at last",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


if __name__ == "__main__":
    app()

"""Load a mount for long, and see that it stays as it is: memory, descriptors, threads, latency.

    python scripts/soak.py [--minutes 30] [--processes 64] [--size 6G] [--warm 512M]
        [--pause-ms 200] [--json FILE] [--seed 1] [--dir DIR]

Each process works on sessions of its own, in requests of 1 KiB to 1 MiB and files up to 8 MiB, as
scripts/trials/agent.py says, and checks each byte that it reads. Every other of eight stretches of
time has wedged readers: processes that were stopped in the midst of reads and page faults, with
hundreds of files open and with leases of warm memory. Exits 1 if

- a request fails, reads a wrong byte, or takes longer than the deadline of 30 s,
- in a stretch with wedged readers some process gets nothing done,
- in the second half memory (RssAnon of the daemon, and what it takes of the tmpfs) grows: by more
  than a tenth of its mean or 32 MiB, whichever is more, on the line of least squares; descriptors
  by more than 8, or threads by more than 4. A run of less than 20 minutes is too short to tell: the
  daemon's caches of file data, index nodes and extents fill up to their budgets meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.trials.agent import work
from scripts.trials.crew import Crew
from scripts.trials.ring import MIB, Broken, Ring, new_ring
from scripts.trials.wedged import WEDGED

_STRETCHES = 8
_DEADLINE_SECONDS = 30
_TOLD_APART_SECONDS = 1200
_MEMORY_SHARE, _MEMORY_MIN = 0.1, 32 * MIB
_DESCRIPTORS_MAX, _THREADS_MAX = 8, 4
_QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}
_SAMPLE_SECONDS = 2.0
_BEGUN_SECONDS = 0.5
_WIDTH_MIN = 132

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon at a moment: seconds since the start, memory in bytes."""

    at_s: float
    anonymous: int
    tmpfs: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the time, by the monotonic clock."""

    begin: float
    end: float
    is_wedged: bool


@dataclass(slots=True)
class Report:
    """What was measured. Latencies in seconds, by kind of request."""

    samples: list[Sample] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    latencies: dict[str, dict[str, Floats]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def growth(self, name: str) -> float:
        """Of a figure in the second half, by the line of least squares."""
        rows = self.samples[len(self.samples) // 2 :]
        if len(rows) < 3:
            return 0.0
        at = np.array([row.at_s for row in rows])
        slope = np.polyfit(at, [getattr(row, name) for row in rows], 1)[0]
        return float(slope * (at[-1] - at[0]))

    def mean(self, name: str) -> float:
        rows = self.samples[len(self.samples) // 2 :]
        return float(np.mean([getattr(row, name) for row in rows]))


@dataclass(slots=True)
class Soak:
    ring: Ring
    scratch: Path
    processes: int
    pause_s: float
    rng: random.Random
    report: Report = field(default_factory=Report)

    def run(self, seconds: float, progress: Progress) -> Report:
        pid = self.ring.stats()["pid"]
        task = progress.add_task("load", total=seconds)
        agents, start = Crew(), time.monotonic()
        try:
            for number in range(self.processes):
                home = self.ring.mountpoint / f"agent-{number}"
                seed = number << 20 | self.rng.getrandbits(20)
                agents.start(work, home, self._times(number), seed, self.pause_s)
            for number in range(_STRETCHES):
                end = start + seconds * (number + 1) / _STRETCHES
                self._stretch(agents, end, number % 2 == 1, pid, start)
                progress.update(task, completed=end - start, refresh=True)
            self.report.counts = agents.stop()
        finally:
            agents.close()
        self._gather()
        return self.report

    def _stretch(self, agents: Crew, end: float, is_wedged: bool, pid: int, start: float) -> None:
        wedged = Crew()
        stopped = []
        try:
            if is_wedged:
                pids = [wedged.start(reader, self.ring.mountpoint) for reader in WEDGED]
                time.sleep(_BEGUN_SECONDS)
                for stopped_pid in pids:
                    os.kill(stopped_pid, signal.SIGSTOP)
                    stopped.append(stopped_pid)
            begin = time.monotonic()
            while time.monotonic() < end:
                self.report.samples.append(self._sample(pid, time.monotonic() - start))
                agents.work(min(_SAMPLE_SECONDS, max(end - time.monotonic(), 0)))
            self.report.stretches.append(Stretch(begin, time.monotonic(), is_wedged))
        finally:
            for stopped_pid in stopped:
                os.kill(stopped_pid, signal.SIGCONT)
            wedged.stop()

    def _sample(self, pid: int, at_s: float) -> Sample:
        lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        blocks = 0
        for directory, _, names in os.walk(self.ring.warm):
            for name in names:
                try:
                    blocks += os.lstat(os.path.join(directory, name)).st_blocks
                except FileNotFoundError:
                    continue
        return Sample(
            at_s, int(status["RssAnon"][0]) * 1024, blocks * 512,
            len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"][0]),
        )  # fmt: skip

    def _times(self, number: int) -> Path:
        return self.scratch / f"agent-{number}.npz"

    # -- afterwards

    def _gather(self) -> None:
        report = self.report
        rows: dict[str, list[Floats]] = {}
        for number in range(self.processes):
            with np.load(self._times(number)) as times:
                mine = {kind: times[kind] for kind in times.files}
            for kind, row in mine.items():
                rows.setdefault(kind, []).append(row)
            self._check_progress(number, mine)
        for kind, found in sorted(rows.items()):
            began, took = np.concatenate(found, axis=1)
            report.latencies[kind] = {
                "all": took,
                "free": took[self._within(began, is_wedged=False)],
                "wedged": took[self._within(began, is_wedged=True)],
            }
            if took.max() > _DEADLINE_SECONDS:
                report.faults.append(f"a {kind} took {took.max():.1f} s")
        if self.ring.errors():
            report.faults += self.ring.errors()
        if report.samples[-1].at_s >= _TOLD_APART_SECONDS:
            report.faults += growth_faults(report)

    def _within(self, began: Floats, *, is_wedged: bool) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(began), bool)
        for stretch in self.report.stretches:
            if stretch.is_wedged == is_wedged:
                found |= (began >= stretch.begin) & (began < stretch.end)
        return found

    def _check_progress(self, number: int, times: dict[str, Floats]) -> None:
        ended = np.concatenate([row.sum(axis=0) for row in times.values()])
        for stretch in self.report.stretches:
            done = int(((ended >= stretch.begin) & (ended < stretch.end)).sum())
            if stretch.is_wedged and not done:
                self.report.faults.append(
                    f"process {number} got nothing done in {stretch.end - stretch.begin:.0f} s "
                    f"with wedged readers"
                )


def growth_faults(report: Report) -> list[str]:
    """What of a daemon grows that should not."""
    faults = []
    for name in ("anonymous", "tmpfs"):
        allowed = max(_MEMORY_SHARE * report.mean(name), _MEMORY_MIN)
        if report.growth(name) > allowed:
            grown = f"{report.growth(name) / MIB:.0f} MiB"
            faults.append(f"{name} memory grew by {grown} in the second half")
    for name, most in (("descriptors", _DESCRIPTORS_MAX), ("threads", _THREADS_MAX)):
        if report.growth(name) > most:
            faults.append(f"{name} grew by {report.growth(name):.0f} in the second half")
    return faults


# -- what is shown ------------------------------------------------------------------------


def latency_table(report: Report) -> Table:
    table = Table(title="latency in ms", title_justify="left")
    table.add_column("request", no_wrap=True)
    heads = ["count", *_QUANTILES, "p99 free", "p99 wedged", "p99.9 free", "p99.9 wedged"]
    for head in heads:
        table.add_column(head, justify="right")
    for kind, took in report.latencies.items():
        cells = [f"{1e3 * quantile(took['all'], at):.1f}" for at in _QUANTILES.values()]
        cells += [
            f"{1e3 * quantile(took[when], at):.1f}" for at in (99, 99.9)
            for when in ("free", "wedged")
        ]  # fmt: skip
        table.add_row(kind, str(len(took["all"])), *cells)
    return table


def memory_table(report: Report) -> Table:
    table = Table(title="the daemon", title_justify="left")
    for head in ("minute", "RssAnon MiB", "tmpfs MiB", "descriptors", "threads"):
        table.add_column(head, justify="right")
    step = max(len(report.samples) // 16, 1)
    for row in report.samples[::step]:
        table.add_row(
            f"{row.at_s / 60:.1f}", f"{row.anonymous / MIB:.0f}", f"{row.tmpfs / MIB:.0f}",
            str(row.descriptors), str(row.threads),
        )  # fmt: skip
    names = ("anonymous", "tmpfs", "descriptors", "threads")
    scales = (MIB, MIB, 1, 1)
    growths = [
        f"{report.growth(name) / scale:+.1f}" for name, scale in zip(names, scales, strict=True)
    ]
    table.add_section()
    table.add_row("second half", *growths)
    return table


def quantile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def document(report: Report, seed: int) -> dict[str, Any]:
    """Memory in bytes, latencies in ms."""
    return {
        "seed": seed,
        "faults": report.faults,
        "counts": dict(sorted(report.counts.items())),
        "samples": [asdict(sample) for sample in report.samples],
        "growth_in_second_half": {
            name: report.growth(name) for name in ("anonymous", "tmpfs", "descriptors", "threads")
        },
        "latency_ms": {
            kind: {
                when: {"count": len(values)}
                | {name: 1e3 * quantile(values, at) for name, at in _QUANTILES.items()}
                for when, values in took.items()
            }
            for kind, took in report.latencies.items()
        },
    }


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option()] = 30,
    processes: Annotated[int, typer.Option(min=1)] = 64,
    size: Annotated[str, typer.Option(help="Of the ring.")] = "6G",
    warm: Annotated[str, typer.Option(help="Of the warm tier.")] = "512M",
    pause_ms: Annotated[float, typer.Option(help="Between two tasks of a process, mean.")] = 200,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk, for the image.")
    ] = None,
) -> None:
    """Load a mount with many processes for long, and see that it stays as it is."""
    console = Console(width=max(Console().width, _WIDTH_MIN))
    with new_ring("soak", directory, "--size", size) as ring:
        # What nobody used for a minute must not go: who comes back to it would call that a fault.
        ring.mount("--warm", warm, "--no-reclaim")
        soak = Soak(ring, ring.directory, processes, pause_ms / 1e3, random.Random(seed))
        try:
            with Progress(console=console, transient=True, auto_refresh=False) as progress:
                report = soak.run(60 * minutes, progress)
        except Broken as broken:
            console.print(f"broken, with seed {seed}: {broken}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from broken
        if json_file is not None:
            json_file.write_text(json.dumps(document(report, seed), indent=2) + "\n")
        console.print(latency_table(report))
        console.print(memory_table(report))
        ring.umount()
        ring.fsck()
    for fault in report.faults:
        console.print(f"broken, with seed {seed}: {fault}", highlight=False, soft_wrap=True)
    if report.faults:
        raise typer.Exit(1)
    written, read = report.counts["bytes written"], report.counts["bytes read"]
    console.print(
        f"{minutes:g} minutes, {processes} processes, {written >> 20} MiB written, "
        f"{read >> 20} MiB read and checked: no error, and no process was held up",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


if __name__ == "__main__":
    app()

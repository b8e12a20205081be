"""The profiles at the work that they are made for.

    python scripts/scenarios.py gov|ecommerce|iot [--short] [--dir DIR] [--json FILE]

Twice each. First in simulated time, without bytes: the daemon's planner, the profile's warm
tier and its shards, and how much of the planner's time a request takes. Then through a real
mount with `--profile`, by several processes, as fast as it goes; every byte that is read is
compared, and at the end all of it, after the ring was mounted anew.

gov        500 sessions at once, long and deep: a turn reads all of a session and appends
ecommerce  bursts of short sessions that are jumped between, left, and removed
iot        10 000 devices with one small command at a time, 20 000 a second
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from simulated_tier import SimulatedTier, drive

from kvfs.tiers import profiles
from kvfs.tiers.budget import Bandwidth, Budget
from kvfs.tiers.hints import ToolDone, ToolStarted
from kvfs.tiers.planner import Planner
from kvfs.tiers.predict import PredictOptions, Predictor
from kvfs.tiers.shards import shard_of

KVFS = str(Path(sys.executable).with_name("kvfs"))
PROCESSES = 4
DEVICE_BANDWIDTH = 3e9
TOKEN_BYTES = 24 * 1024
GIB = 1024**3


# -- in simulated time -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """`sessions` begin within `spread_seconds`, each with `turns` turns; between two there is
    one of the `gaps` (a function of a generator, giving seconds and whether a tool runs). A
    session begins with `tokens` and grows by `tokens_a_turn`."""

    sessions: int
    seconds: float
    spread_seconds: float
    turns: int
    gap: Callable[[np.random.Generator], tuple[float, bool]]
    tokens: int
    tokens_a_turn: int
    warm_bytes: int
    name: str


@dataclass(slots=True)
class Simulated:
    """Of the requests, `returns` are not the first of their session; these found it in
    memory: `kept` there, or `brought` in, whole or on its way. `planner_us` is a request's time
    in the planner, in microseconds of this machine."""

    sessions: int = 0
    seconds: float = 0.0
    requests: int = 0
    returns: int = 0
    kept: int = 0
    brought: int = 0
    wrong: int = 0
    evicted: int = 0
    shards_used: int = 0
    sessions_in_fullest_shard: int = 0
    planner_us: float = 0.0
    requests_a_second_possible: float = 0.0


def agent_gap(random: np.random.Generator) -> tuple[float, bool]:
    """As of coding agents: after a tool call 9 s at the median, after a user's message 127 s."""
    if random.random() < 0.85:
        return float(np.exp(random.logistic(np.log(9), 0.6))), True
    return float(np.exp(random.logistic(np.log(127), 1.0))), False


def shopping_gap(random: np.random.Generator) -> tuple[float, bool]:
    """Mostly seconds; now and then one comes back after a while."""
    if random.random() < 0.9:
        return float(random.exponential(8)), False
    return float(random.uniform(120, 1200)), False


def command_gap(random: np.random.Generator) -> tuple[float, bool]:
    return float(random.uniform(0.4, 0.6)), False


def simulate(scenario: str, load: Load) -> Simulated:
    profile = profiles.load(scenario)
    tier = SimulatedTier(DEVICE_BANDWIDTH, load.warm_bytes, profile)
    options = PredictOptions(profile.warm_idle_seconds)
    planner = Planner(
        tier, Predictor(options), Budget(Bandwidth(DEVICE_BANDWIDTH)), profile.warm_group, drive,
        lambda: False, lambda: tier.demanded, lambda: tier.now,
    )  # fmt: skip
    result = Simulated(load.sessions, load.seconds)
    shards = Counter(
        shard_of(session, f"{load.name}{session:06}".encode(), None, profile)
        for session in range(1, load.sessions + 1)
    )
    result.shards_used, result.sessions_in_fullest_shard = len(shards), max(shards.values())
    random = np.random.default_rng(1)
    starts = random.uniform(0, load.spread_seconds, load.sessions)
    due = [(float(start), session, 0, "turn") for session, start in enumerate(starts, 1)]
    heapq.heapify(due)
    next_tick, planner_seconds = 0.0, 0.0
    while due and due[0][0] < load.seconds:
        now, session, turn, what = heapq.heappop(due)
        tier.goes_on(now)
        started = time.perf_counter()
        while next_tick <= now:
            planner.tick(next_tick)
            next_tick += 1.0
        if what == "tool_done":
            planner.hint(session, ToolDone(), now, tier.size(session))
            planner_seconds += time.perf_counter() - started
            continue
        up = tier.up.get(session)
        planner.saw_use(session, now)
        planner_seconds += time.perf_counter() - started
        result.requests += 1
        result.returns += turn > 0
        if turn and up is not None:
            result.kept += not up.by_guess
            result.brought += up.by_guess
        tier.demand(session, TOKEN_BYTES * (load.tokens + turn * load.tokens_a_turn))
        if turn + 1 < load.turns:
            gap, is_tool = load.gap(random)
            heapq.heappush(due, (now + gap, session, turn + 1, "turn"))
            if is_tool:
                planner.hint(session, ToolStarted(), now, tier.size(session))
                heapq.heappush(due, (now + max(gap - 0.5, 0.0), session, turn, "tool_done"))
    result.wrong = sum(planner.outcomes.wrong.values())
    result.evicted = tier.evicted
    result.planner_us = 1e6 * planner_seconds / max(result.requests, 1)
    result.requests_a_second_possible = result.requests / max(planner_seconds, 1e-9)
    return result


LOADS = {
    "gov": Load(500, 3600, 1800, 10_000, agent_gap, 20_000, 700, 128 * GIB, "deep-"),
    "ecommerce": Load(20_000, 1800, 1500, 12, shopping_gap, 400, 60, 16 * GIB, "visit-"),
    "iot": Load(10_000, 60, 0.5, 10_000, command_gap, 6, 0, 16 * GIB, "device-"),
}
SHORT_LOADS = {
    "gov": Load(500, 300, 60, 10_000, agent_gap, 20_000, 700, 128 * GIB, "deep-"),
    "ecommerce": Load(1000, 200, 150, 12, shopping_gap, 400, 60, 16 * GIB, "visit-"),
    "iot": Load(10_000, 2, 0.5, 10_000, command_gap, 6, 0, 16 * GIB, "device-"),
}


# -- through a mount -------------------------------------------------------------------


@dataclass(slots=True)
class Figures:
    """Of one process, or of all: sessions that were made and are left, requests and bytes,
    the time that each request took, and what was not as it was written."""

    sessions: int = 0
    left: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    read: int = 0
    written: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        self.sessions += other.sessions
        self.left.update(other.left)
        self.requests += other.requests
        self.read += other.read
        self.written += other.written
        self.seconds += other.seconds
        self.wrong += other.wrong


@dataclass(slots=True)
class Mounted:
    """What a mount reached. `daemon_cpu` and `machine_cpu` in cores."""

    processes: int = PROCESSES
    sessions: int = 0
    requests: int = 0
    requests_a_second: float = 0.0
    mb_a_second: float = 0.0
    p50_us: float = 0.0
    p99_us: float = 0.0
    daemon_cpu: float = 0.0
    machine_cpu: float = 0.0
    files_compared_at_the_end: int = 0
    wrong: list[str] = field(default_factory=list)


def content(path: str, start: int, length: int) -> bytes:
    """What bytes [start, start + length) of a file are, by its name below the mount."""
    at = np.arange(start, start + length, dtype=np.uint64)
    seed = np.uint64(int.from_bytes(path.encode()[-8:], "little"))
    mixed = (at + seed) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(53)).astype(np.uint8).tobytes()


class Client:
    """One process at the mount: makes requests, takes their time, compares what it reads.
    Files are opened with O_DIRECT, so that each request reaches the daemon."""

    def __init__(
        self, mountpoint: Path, number: int, seconds: float, ready: threading.Barrier
    ) -> None:
        self.figures = Figures()
        self.random = np.random.default_rng(number)
        self.number = number
        self._mountpoint = mountpoint
        self._seconds = seconds
        self._ready = ready
        self._end = 0.0

    def is_ready(self) -> None:
        """Wait for the others; only what comes from now on counts."""
        self._ready.wait()
        figures = self.figures
        figures.requests = figures.read = figures.written = 0
        figures.seconds.clear()
        self._end = time.monotonic() + self._seconds

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._end and not self.figures.wrong

    def make_session(self, name: str) -> None:
        (self._mountpoint / name).mkdir()
        self.figures.sessions += 1

    def remove_session(self, name: str) -> None:
        shutil.rmtree(self._mountpoint / name)
        gone = [path for path in self.figures.left if path.startswith(f"{name}/")]
        for path in gone:
            del self.figures.left[path]

    def open(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        return os.open(self._mountpoint / path, flags, 0o600)

    def append(self, fd: int, path: str, length: int) -> None:
        size = self.figures.left.get(path, 0)
        self.write(fd, path, size, length)

    def write(self, fd: int, path: str, start: int, length: int) -> None:
        data = content(path, start, length)
        begun = time.perf_counter()
        written = os.pwrite(fd, data, start)
        self._took(begun)
        if written != length:
            self.figures.wrong.append(f"{path}: {written} of {length} bytes were written")
        self.figures.written += length
        self.figures.left[path] = max(self.figures.left.get(path, 0), start + length)

    def read(self, fd: int, path: str, start: int, length: int) -> None:
        begun = time.perf_counter()
        data = os.pread(fd, length, start)
        self._took(begun)
        if data != content(path, start, length):
            self.figures.wrong.append(f"{path}: bytes from {start} on are not what was written")
        self.figures.read += length

    def _took(self, begun: float) -> None:
        self.figures.requests += 1
        self.figures.seconds.append(time.perf_counter() - begun)


LAYERS, ROUND_BYTES, DEPTH_BYTES = 2, 4096, 64 * 1024


def serve_gov(client: Client, sessions: int) -> None:
    """All sessions are there and open at once; turns come in any order."""
    names = [f"deep-{client.number}-{number:04}" for number in range(sessions)]
    files: dict[str, int] = {}
    for name in names:
        client.make_session(name)
        for layer in range(LAYERS):
            path = f"{name}/layer.{layer:03}"
            files[path] = client.open(path)
            client.append(files[path], path, DEPTH_BYTES)
    client.is_ready()
    while client.goes_on:
        name = names[int(client.random.integers(len(names)))]
        for layer in range(LAYERS):
            path = f"{name}/layer.{layer:03}"
            client.read(files[path], path, 0, client.figures.left[path])
            client.append(files[path], path, ROUND_BYTES)


def serve_ecommerce(client: Client, burst: int) -> None:
    """A burst of sessions begins; each has a few short rounds, in any order, and each round
    opens its files anew; sessions of earlier bursts are jumped back to, old ones removed."""
    names: list[str] = []
    client.is_ready()
    while client.goes_on:
        new = [f"visit-{client.number}-{client.figures.sessions + n:06}" for n in range(burst)]
        for name in new:
            client.make_session(name)
        rounds = [name for name in new for _ in range(3)]
        rounds += [names[int(client.random.integers(len(names)))] for _ in names[:burst]]
        client.random.shuffle(rounds)
        for name in rounds:
            _visit(client, name)
        names += new
        while len(names) > 10 * burst:
            client.remove_session(names.pop(0))


def _visit(client: Client, name: str) -> None:
    for layer in range(2):
        path = f"{name}/layer.{layer:03}"
        fd = client.open(path)
        size = client.figures.left.get(path, 0)
        if size:
            client.read(fd, path, 0, size)
        client.append(fd, path, 2048)
        os.close(fd)


COMMAND_BYTES, COMMANDS_KEPT = 256, 16


def serve_iot(client: Client, devices: int) -> None:
    """Each command is read as it was, or written over the oldest; a device's file stays open."""
    files: list[tuple[int, str]] = []
    for number in range(devices):
        name = f"device-{client.number}{number:05}"
        client.make_session(name)
        path = f"{name}/command"
        files.append((client.open(path), path))
        client.append(*files[-1], COMMAND_BYTES * COMMANDS_KEPT)
    client.is_ready()
    while client.goes_on:
        fd, path = files[int(client.random.integers(devices))]
        start = COMMAND_BYTES * int(client.random.integers(COMMANDS_KEPT))
        if client.random.random() < 0.5:
            client.read(fd, path, start, COMMAND_BYTES)
        else:
            client.write(fd, path, start, COMMAND_BYTES)


SERVES: dict[str, tuple[Callable[[Client, int], None], int, int]] = {
    # with so many, in all, for the full form and the short one
    "gov": (serve_gov, 500, 500),
    "ecommerce": (serve_ecommerce, 80, 20),
    "iot": (serve_iot, 10_000, 1000),
}


def mounted(scenario: str, short: bool, directory: Path | None) -> Mounted:
    """Make a ring, mount it with the profile, serve, mount it anew, compare all that is left."""
    seconds = 1.0 if short else 30.0
    with tempfile.TemporaryDirectory(dir=directory) as name:
        place = Path(name)
        mountpoint, image = place / "mnt", place / "ring.img"
        mountpoint.mkdir()
        kvfs("mkfs", image, "--size", "1G" if short else "8G")
        mount = partial(
            kvfs, "mount", mountpoint, image, "--profile", scenario, "--log", place / "log"
        )
        mount()
        try:
            figures, result = serve(scenario, mountpoint, seconds, short)
            kvfs("umount", mountpoint)
            mount()
            compare(mountpoint, figures, result)
        finally:
            kvfs("umount", mountpoint)
        return result


def serve(scenario: str, mountpoint: Path, seconds: float, short: bool) -> tuple[Figures, Mounted]:
    """Several processes at once, from the moment at which all have their sessions."""
    ready = multiprocessing.Barrier(PROCESSES + 1)
    results: multiprocessing.Queue[Figures] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(
            target=_serve_in_process,
            args=(scenario, mountpoint, number, seconds, short, ready, results),
        )
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    ready.wait()
    daemon = psutil.Process(json.loads((mountpoint / ".kvfs/stats.json").read_text())["pid"])
    begun, before = time.monotonic(), cpu_seconds(daemon)
    psutil.cpu_percent()
    time.sleep(seconds)
    result = Mounted(
        daemon_cpu=(cpu_seconds(daemon) - before) / (time.monotonic() - begun),
        machine_cpu=psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1),
    )
    figures = Figures()
    for _ in processes:
        figures.add(results.get())
    for process in processes:
        process.join()
    took = np.array(figures.seconds)
    result.sessions, result.requests = figures.sessions, figures.requests
    result.requests_a_second = figures.requests / seconds
    result.mb_a_second = (figures.read + figures.written) / seconds / 1e6
    result.p50_us, result.p99_us = (float(np.quantile(took, q)) * 1e6 for q in (0.5, 0.99))
    result.wrong = figures.wrong
    return figures, result


def _serve_in_process(
    scenario: str,
    mountpoint: Path,
    number: int,
    seconds: float,
    short: bool,
    ready: threading.Barrier,
    results: multiprocessing.Queue[Figures],
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    act, count, count_short = SERVES[scenario]
    client = Client(mountpoint, number, seconds, ready)
    act(client, (count_short if short else count) // PROCESSES)
    results.put(client.figures)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def compare(mountpoint: Path, figures: Figures, result: Mounted) -> None:
    """Each file that should be there with all of its bytes, and no other."""
    there = {str(path.relative_to(mountpoint)) for path in mountpoint.glob("*/*")}
    result.wrong += [f"{path}: it is gone" for path in figures.left.keys() - there]
    result.wrong += [f"{path}: it was removed" for path in there - figures.left.keys()]
    for path in there & figures.left.keys():
        size = figures.left[path]
        if (mountpoint / path).read_bytes() != content(path, 0, size):
            result.wrong.append(f"{path}: it is not what was written, after a new mount")
        result.files_compared_at_the_end += 1


def kvfs(*arguments: str | Path) -> None:
    subprocess.run([KVFS, *arguments], check=True, stdout=subprocess.DEVNULL)


# -- what is told ----------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=profiles.NAMES)
    parser.add_argument("--short", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    scenario: str = arguments.scenario
    simulated = simulate(scenario, (SHORT_LOADS if arguments.short else LOADS)[scenario])
    print_simulated(scenario, simulated)
    real = mounted(scenario, arguments.short, arguments.dir)
    print_mounted(scenario, real)
    if arguments.json is not None:
        document = {"simulated": asdict(simulated), "mounted": asdict(real)}
        arguments.json.write_text(json.dumps(document, indent=2))
    if real.wrong:
        raise SystemExit(f"{len(real.wrong)} are wrong, such as {real.wrong[0]}")


def print_simulated(scenario: str, result: Simulated) -> None:
    print(
        f"{scenario}, simulated: {result.sessions} sessions, {result.seconds:.0f} s, "
        f"{result.requests} requests ({result.requests / result.seconds:.0f} a second)\n"
        f"  {100 * (result.kept + result.brought) / max(result.returns, 1):.1f} % of those that "
        f"return find their session in memory, {result.brought} brought in, whole or on its way; "
        f"brought in for nothing {result.wrong}, evicted {result.evicted}\n"
        f"  {result.shards_used} shards in use, at most {result.sessions_in_fullest_shard} "
        f"sessions in one\n"
        f"  planner {result.planner_us:.1f} us a request: "
        f"{result.requests_a_second_possible:.0f} a second at most"
    )


def print_mounted(scenario: str, result: Mounted) -> None:
    print(
        f"{scenario}, mounted: {result.processes} processes, {result.sessions} sessions, "
        f"{result.requests} requests\n"
        f"  {result.requests_a_second:.0f} requests a second, {result.mb_a_second:.1f} MB/s, "
        f"{result.p50_us:.0f} us at the median, {result.p99_us:.0f} us at p99\n"
        f"  daemon {result.daemon_cpu:.2f} cores, machine {result.machine_cpu:.2f}: "
        f"{limit(result)}\n"
        f"  {result.files_compared_at_the_end} files compared after a new mount, "
        f"{len(result.wrong)} wrong"
    )


def limit(result: Mounted) -> str:
    if result.daemon_cpu > 0.85:
        return "the daemon's loop is the limit, one thread of Python"
    if result.machine_cpu > 0.9 * (psutil.cpu_count() or 1):
        return "the machine's cores are the limit, which daemon and clients share"
    return "clients and daemon wait for each other, or for the device"


if __name__ == "__main__":
    main()

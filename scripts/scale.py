"""A million layer files: how fast they mount, and how much memory serving them takes.

    python scripts/scale.py [--sessions 31250] [--visits 10000] [--dir DIR] [--keep]

Builds an image of sessions with 32 small layer files each through the library, unmounts
it cleanly, drops it from the page cache, and mounts it with the real command. Then visits
random sessions through the mount (names, attributes of all files, content of some), and
lists the root, while the daemon's anonymous memory is watched. Prints a table; the exit
status is 1 when a goal is missed. Needs 8 GiB of disk for a million files.

With `--keep` the image stays in DIR and the next run there begins with it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvfs.engine.device import FileDevice, create_image
from kvfs.engine.format import DATA_START, ROOT_INODE
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store, StoreOptions
from kvfs.engine.superblocks import format_device
from kvfs.tiers.oplog import OperationLog

LAYERS = 32
READ_LAYERS = 4  # of each session that is visited
SEGMENT_SIZE = 64 * 1024 * 1024
SESSION_SPACE = 224 * 1024  # what a session takes of the ring, with the index's share
SPACE_MIN = 1024 * 1024 * 1024
GARBAGE_THRESHOLDS = (5_000, 5, 100)
MOUNT_SECONDS_MAX = 2.0
ANONYMOUS_MIB_MAX = 300
KVFS = str(Path(sys.executable).with_name("kvfs"))


@dataclass(slots=True)
class Built:
    """Seconds; the longest that one call stood still, which is a checkpoint."""

    seconds: float = 0.0
    operations: int = 0
    longest: float = 0.0
    close_seconds: float = 0.0


@dataclass(slots=True)
class Served:
    """Seconds and MiB. `anonymous` is the daemon's RssAnon: after the mount, as the visits
    go on, after the root was listed."""

    mount_seconds: float = 0.0
    visit_seconds: float = 0.0
    list_seconds: float = 0.0
    listed: int = 0
    wrong: list[str] = field(default_factory=list)
    anonymous: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=31_250)
    parser.add_argument("--visits", type=int, default=10_000)
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk")
    parser.add_argument("--keep", action="store_true", help="leave the image in DIR")
    arguments = parser.parse_args()
    # As the daemon does: what lives long is not looked at by the collector again and again.
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    with contextlib.ExitStack() as stack:
        directory = arguments.dir
        if directory is None or not arguments.keep:
            made = tempfile.TemporaryDirectory(dir=directory)
            directory = Path(stack.enter_context(made))
        image = directory / f"scale-{arguments.sessions}.img"
        built = None if image.exists() else build(image, arguments.sessions)
        served = serve(image, arguments.sessions, min(arguments.visits, arguments.sessions))
    sys.exit(report(arguments.sessions, built, served))


# -- building


def session_name(number: int) -> str:
    return f"session-{number:05}"


def content(session: int, layer: int) -> bytes:
    """Some hundred bytes that tell where they belong."""
    return f"session {session} layer {layer}\n".encode() * (4 + layer)


def build(image: Path, sessions: int) -> Built:
    size = DATA_START + SPACE_MIN + sessions * SESSION_SPACE // SEGMENT_SIZE * SEGMENT_SIZE
    unfinished = image.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    create_image(unfinished, size)
    device = FileDevice(unfinished)
    built = Built()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as log:
        format_device(device, SEGMENT_SIZE)
        operations = OperationLog(Path(log), 256 * 1024 * 1024)
        store = Store.open(device, str(image), InlineExecutor(), operations, StoreOptions())
        started = time.perf_counter()
        for session in track(range(sessions), "building"):
            add_session(store, session)
            tick_started = time.perf_counter()
            run(store.tick())
            built.longest = max(built.longest, time.perf_counter() - tick_started)
        built.seconds = time.perf_counter() - started
        built.operations = store.counters.operations
        started = time.perf_counter()
        run(store.close())
        built.close_seconds = time.perf_counter() - started
    device.close()
    unfinished.rename(image)
    return built


def add_session(store: Store, session: int) -> None:
    def create(parent: int, name: str, mode: int) -> int:
        step = store.create(parent, name.encode(), mode, os.geteuid(), os.getegid())
        return run(step).inode.ino

    directory = create(ROOT_INODE, session_name(session), stat.S_IFDIR | 0o700)
    for layer in range(LAYERS):
        ino = create(directory, f"layer.{layer:03}", stat.S_IFREG | 0o600)
        run(store.write(ino, 0, content(session, layer)))


# -- serving


@contextlib.contextmanager
def mounted(image: Path, served: Served) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        mountpoint = Path(name) / "mnt"
        mountpoint.mkdir()
        drop_from_page_cache(image)
        started = time.perf_counter()
        kvfs("mount", mountpoint, image, "--log", Path(name) / "log")
        served.mount_seconds = time.perf_counter() - started
        try:
            yield mountpoint
        finally:
            kvfs("umount", mountpoint)


def drop_from_page_cache(image: Path) -> None:
    fd = os.open(image, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def serve(image: Path, sessions: int, visits: int) -> Served:
    served = Served()
    random = Random(sessions)
    with mounted(image, served) as mountpoint:
        pid = json.loads((mountpoint / ".kvfs" / "stats.json").read_text())["pid"]
        served.anonymous.append(anonymous_mib(pid))
        started = time.perf_counter()
        visited = random.sample(range(sessions), visits)
        for count, session in enumerate(track(visited, "visiting"), 1):
            served.wrong += visit(mountpoint, session, random)
            if count * 10 % visits < 10:
                served.anonymous.append(anonymous_mib(pid))
        served.visit_seconds = time.perf_counter() - started
        started = time.perf_counter()
        listing = subprocess.run(["ls", mountpoint], check=True, capture_output=True, text=True)
        served.list_seconds = time.perf_counter() - started
        names = listing.stdout.splitlines()
        served.listed = len(names)
        if names != [session_name(number) for number in range(sessions)]:
            served.wrong.append("the names in the root")
        served.anonymous.append(anonymous_mib(pid))
    return served


def visit(mountpoint: Path, session: int, random: Random) -> list[str]:
    """What was not as it was written."""
    directory = mountpoint / session_name(session)
    names = sorted(os.listdir(directory))
    if names != [f"layer.{layer:03}" for layer in range(LAYERS)]:
        return [f"the names in {directory.name}"]
    wrong = [
        f"the size of {directory.name}/{name}"
        for layer, name in enumerate(names)
        if (directory / name).stat().st_size != len(content(session, layer))
    ]
    for layer in random.sample(range(LAYERS), READ_LAYERS):
        if (directory / names[layer]).read_bytes() != content(session, layer):
            wrong.append(f"the content of {directory.name}/{names[layer]}")
    return wrong


def anonymous_mib(pid: int) -> float:
    found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


# -- telling


def report(sessions: int, built: Built | None, served: Served) -> int:
    console = Console()
    table = Table("what", "measured", "goal", "", title=f"{sessions * LAYERS} files")
    if built is not None:
        rate = f"{built.operations / built.seconds:.0f} operations/s"
        table.add_row("built in", f"{built.seconds:.1f} s, {rate}")
        table.add_row("longest checkpoint", f"{built.longest:.2f} s")
        table.add_row("closed in", f"{built.close_seconds:.2f} s")
    peak = max(served.anonymous)
    goals = [
        ("mounted in", f"{served.mount_seconds:.2f} s", f"{MOUNT_SECONDS_MAX} s",
         served.mount_seconds <= MOUNT_SECONDS_MAX),
        ("RssAnon at most", f"{peak:.0f} MiB", f"{ANONYMOUS_MIB_MAX} MiB",
         peak <= ANONYMOUS_MIB_MAX),
        ("sessions listed by ls", str(served.listed), str(sessions), served.listed == sessions),
        ("found wrong", str(len(served.wrong)), "0", not served.wrong),
    ]  # fmt: skip
    for what, measured, goal, met in goals:
        table.add_row(what, measured, goal, "met" if met else "MISSED")
    table.add_row("visits in", f"{served.visit_seconds:.1f} s")
    table.add_row("ls of the root in", f"{served.list_seconds:.2f} s")
    table.add_row("RssAnon over time, MiB", " ".join(f"{mib:.0f}" for mib in served.anonymous))
    console.print(table)
    for wrong in served.wrong[:10]:
        console.print(f"wrong: {wrong}")
    return 0 if all(met for *_, met in goals) else 1


def kvfs(*arguments: str | Path) -> None:
    subprocess.run([KVFS, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

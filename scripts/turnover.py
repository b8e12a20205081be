"""Turn a nearly full ring over again and again, kill the daemon meanwhile, and check every byte.

    python scripts/turnover.py [--turns 10] [--use 85] [--size 512M] [--segment-size 4M]
        [--kills 20] [--writers 3] [--seed 1] [--dir DIR]

A turn is as many bytes written to the device as the ring has. Each writer has a directory
of its own with sessions in it, whose files are written, appended to, overwritten in part,
truncated, renamed over and removed, and which are forked and removed. What a file has to
contain follows from who painted which part of it: a pattern made of path, version and
offset. After each SIGKILL the image is mounted again, and everything that was answered
must be there; of the one operation of each writer that was under way, nothing, all, or
(of a write) a part from its beginning on. At the end the space must add up, the index and
the ring must not contradict each other, and what is free once everything is removed must
be what was free at the start. Exits 1 on the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.trials.paint import Painting, Stroke, difference, mark_of
from scripts.trials.ring import EMPTY_MAX, MIB, Broken, Ring, new_ring
from scripts.trials.tree import sync

GONE = (errno.ENOTCONN, errno.ECONNABORTED)
SIZES = (3_000, 40_000, 300_000, 2_000_000)
FILE_MAX = 3_000_000
STROKES_MAX = 40
SESSIONS_MAX = 8
# Metadata: what an inode and an extent take in the index, with nodes that are half full.
RESERVE_MAX = MIB
INODE_MAX, EXTENT_MAX = 2048, 1024


@dataclass(slots=True)
class Tree:
    """Sessions and files of a writer, by their paths below its directory."""

    sessions: set[str] = field(default_factory=set)
    files: dict[str, Painting] = field(default_factory=dict)

    def of(self, session: str) -> list[str]:
        return sorted(path for path in self.files if path.startswith(f"{session}/"))

    def copy(self) -> Tree:
        return Tree(set(self.sessions), dict(self.files))

    @property
    def names(self) -> tuple[set[str], set[str]]:
        return set(self.sessions), set(self.files)


@dataclass(frozen=True, slots=True)
class Action:
    """One operation: `target` is the new name of a rename and of a fork, `size` that of a
    truncated file."""

    kind: str
    path: str
    target: str = ""
    size: int = 0
    stroke: Stroke | None = None

    def run(self, home: Path) -> None:
        path = home / self.path
        match self.kind:
            case "mkdir":
                path.mkdir()
            case "create":
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            case "write":
                assert self.stroke is not None
                _write(path, self.stroke)
            case "truncate":
                os.truncate(path, self.size)
            case "rename":
                path.rename(home / self.target)
            case "unlink":
                path.unlink()
            case "rmdir":
                path.rmdir()
            case "fork":
                os.setxattr(path, "user.kvfs.fork", self.target.encode())
            case "sync":
                sync(path)

    def apply(self, tree: Tree) -> None:
        files = tree.files
        match self.kind:
            case "mkdir":
                tree.sessions.add(self.path)
            case "create":
                files[self.path] = Painting()
            case "write":
                assert self.stroke is not None
                files[self.path] = files[self.path].with_stroke(self.stroke)
            case "truncate":
                files[self.path] = files[self.path].cut(self.size)
            case "rename":
                files[self.target] = files.pop(self.path)
            case "unlink":
                del files[self.path]
            case "rmdir":
                tree.sessions.remove(self.path)
            case "fork":
                tree.sessions.add(self.target)
                for path in tree.of(self.path):
                    files[f"{self.target}/{path.partition('/')[2]}"] = files[path]


def _write(path: Path, stroke: Stroke) -> None:
    data = stroke.data
    fd = os.open(path, os.O_WRONLY)
    try:
        if os.pwrite(fd, data, stroke.start) != len(data):
            os.listdir(path.parent)  # fails where the daemon died between two of its requests
            raise SystemExit("a write was short")
    finally:
        os.close(fd)


# -- a writer ---------------------------------------------------------------------------


class Writer:
    """Churns in a directory until told to stop or until the filesystem is gone. `tree` is
    what was answered, `under_way` the operation that was not."""

    def __init__(self, home: Path, use: float, seed: int) -> None:
        self.tree = Tree()
        self.under_way: Action | None = None
        self.written = 0
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._home = home
        self._use = use
        self._random = random.Random(seed)
        self._version = 0

    @property
    def home(self) -> Path:
        return self._home

    def churn(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                for action in self._choose():
                    self.under_way = action
                    action.run(self._home)
                    action.apply(self.tree)
                    self.under_way = None
                    self.counts[action.kind] += 1
                    if action.stroke is not None:
                        self.written += action.stroke.end - action.stroke.start
        except OSError as failure:
            if failure.errno not in GONE:
                self.failure = failure
        except BaseException as failure:
            self.failure = failure

    def _is_full(self) -> bool:
        status = os.statvfs(self._home)
        return status.f_bfree < status.f_blocks * (1 - self._use)

    def _choose(self) -> list[Action]:
        """Operations that belong together: each is one for itself all the same."""
        rng, tree = self._random, self.tree
        sessions = sorted(tree.sessions)
        if not sessions or (len(sessions) < SESSIONS_MAX and rng.random() < 0.02):
            return [Action("mkdir", self._new_name("s"))]
        session = rng.choice(sessions)
        paths = tree.of(session)
        is_full = self._is_full()
        kind = rng.choices(
            ["add", "replace", "append", "overwrite", "truncate", "unlink", "fork", "drop", "sync"],
            [0 if is_full else 40, 30, 15, 15, 5, 25 if is_full else 4, 1, 1, 1],
        )[0]
        if kind == "fork" and len(sessions) < SESSIONS_MAX:
            return [Action("fork", session, target=self._new_name("s"))]
        if kind == "drop" and is_full and len(sessions) > 2:
            return [*(Action("unlink", path) for path in paths), Action("rmdir", session)]
        if kind == "add" or not paths:
            return self._new_file(f"{session}/{self._new_name('f')}")
        path = rng.choice(paths)
        return self._change(kind, path, tree.files[path])

    def _change(self, kind: str, path: str, painting: Painting) -> list[Action]:
        rng, size = self._random, painting.size
        is_long = size > FILE_MAX or len(painting.strokes) > STROKES_MAX
        if kind == "truncate":
            return [Action("truncate", path, size=rng.randrange(size + 10_000))]
        if kind in ("unlink", "sync"):
            return [Action(kind, path)]
        if kind in ("append", "overwrite") and not is_long:
            start = size if kind == "append" else rng.randrange(size + 1)
            return [self._stroke(path, start, start + rng.randrange(1, rng.choice(SIZES)))]
        temporary = f"{path.partition('/')[0]}/{self._new_name('t')}"
        return [*self._new_file(temporary), Action("rename", temporary, target=path)]

    def _new_file(self, path: str) -> list[Action]:
        size = self._random.randrange(1, self._random.choice(SIZES))
        return [Action("create", path), self._stroke(path, 0, size)]

    def _stroke(self, path: str, start: int, end: int) -> Action:
        self._version += 1
        return Action("write", path, stroke=Stroke(mark_of(path), self._version, start, end))

    def _new_name(self, letter: str) -> str:
        self._version += 1
        return f"{letter}{self._version}"

    # -- checking

    def settle(self) -> None:
        """After a kill: how much of what was under way is there?"""
        action, self.under_way = self.under_way, None
        if action is None:
            return
        done = self.tree.copy()
        action.apply(done)
        if action.kind == "write":
            self._settle_write(action)
        elif action.kind == "truncate":
            if (self._home / action.path).stat().st_size == action.size:
                self.tree = done
        elif names_below(self._home) == done.names:
            self.tree = done

    def _settle_write(self, action: Action) -> None:
        """The kernel sends a long write in several requests."""
        stroke = action.stroke
        assert stroke is not None
        found = np.frombuffer((self._home / action.path).read_bytes(), np.uint8)
        there = found[stroke.start : stroke.end]
        differs = there != np.frombuffer(stroke.data, np.uint8)[: len(there)]
        length = int(np.argmax(differs)) if differs.any() else len(there)
        if length:
            part = replace(action, stroke=replace(stroke, end=stroke.start + length))
            part.apply(self.tree)

    def check(self) -> int:
        """The bytes that were compared. Exits where anything is wrong."""
        if names_below(self._home) != self.tree.names:
            found, wanted = names_below(self._home), self.tree.names
            extra = sorted((found[0] | found[1]) - (wanted[0] | wanted[1]))
            lost = sorted((wanted[0] | wanted[1]) - (found[0] | found[1]))
            raise SystemExit(f"{self._home}: lost {lost}, and should not be there: {extra}")
        total = 0
        for path, painting in sorted(self.tree.files.items()):
            found_bytes, expected = (self._home / path).read_bytes(), painting.render()
            told = difference(found_bytes, expected)
            if told:
                raise SystemExit(f"{path}: {told}")
            total += painting.size
        return total


def names_below(home: Path) -> tuple[set[str], set[str]]:
    sessions = {path.name for path in home.iterdir()}
    files = {f"{name}/{path.name}" for name in sessions for path in (home / name).iterdir()}
    return sessions, files


# -- the mount ----------------------------------------------------------------------------


@dataclass(slots=True)
class Totals:
    """Counters of all mounts, as of the last look at each."""

    counters: Counter[str] = field(default_factory=Counter)
    current: Counter[str] = field(default_factory=Counter)

    def look(self, stats: dict[str, Any]) -> None:
        self.current = Counter(stats["counters"])

    def next_mount(self) -> None:
        self.counters.update(self.current)
        self.current = Counter()

    def __getitem__(self, name: str) -> int:
        return self.counters[name] + self.current[name]


def check_space(ring: Ring) -> str:
    """What files take, shared bytes once, is what the ring says it holds."""
    taken: dict[int, int] = {}
    inodes = 0
    for path in regular_files(ring.mountpoint):
        inodes += 1
        own = {row["address"]: -(-row["stored"] // 4096) * 4096 for row in extents(path)}
        if path.stat().st_blocks * 512 != sum(own.values()):
            raise SystemExit(f"{path}: {path.stat().st_blocks} blocks, extents say otherwise")
        taken.update(own)
    space = ring.stats()["space"]
    files = sum(taken.values())
    metadata = space["live"] - files
    if not 0 <= metadata <= EMPTY_MAX + inodes * INODE_MAX + len(taken) * EXTENT_MAX:
        raise SystemExit(f"{space['live']} bytes are live, files take {files}")
    if not 0 <= space["total"] - space["free"] - space["live"] <= RESERVE_MAX:
        raise SystemExit(f"free and live do not add up: {space}")
    return f"{files >> 20} MiB of files, {metadata >> 10} KiB of metadata"


def regular_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and path.name != ".kvfs":
            yield from regular_files(path)
        elif stat.S_ISREG(mode):
            yield path


def extents(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(os.getxattr(path, "user.kvfs.extents"))
    if any("truncated" in row for row in rows):
        raise SystemExit(f"{path} has too many extents")
    return rows


# -- the harness --------------------------------------------------------------------------


def turn_over(ring: Ring, arguments: argparse.Namespace) -> None:
    rng = random.Random(arguments.seed)
    ring.mount("--no-reclaim")
    size = ring.image.stat().st_size
    free_at_start = os.statvfs(ring.mountpoint).f_bfree
    writers = []
    for number in range(arguments.writers):
        home = ring.mountpoint / f"writer-{number}"
        home.mkdir()
        writers.append(Writer(home, arguments.use / 100, rng.randrange(1 << 40)))
    totals, checked = Totals(), 0
    for kill in range(arguments.kills + 1):
        share = (kill + rng.random()) / arguments.kills if kill < arguments.kills else 1
        churn(ring, writers, totals, int(share * arguments.turns * size), kill < arguments.kills)
        if kill == arguments.kills:
            ring.umount()
            ring.audit()
        totals.next_mount()
        ring.mount("--no-reclaim")
        for writer in writers:
            writer.settle()
            checked += writer.check()
        print(
            f"{totals['device_written'] / size:.2f} turns, "
            f"{min(kill + 1, arguments.kills)} kills: {checked >> 20} MiB right so far",
            flush=True,
        )
    print(f"space: {check_space(ring)}")
    check_empty(ring, writers, free_at_start)
    summarize(writers, totals, size, arguments.kills)


def churn(ring: Ring, writers: list[Writer], totals: Totals, until: int, is_killed: bool) -> None:
    """Until so much was written to the device by all mounts, or the daemon has been killed
    at that moment."""
    pid = ring.stats()["pid"]
    stop = threading.Event()
    threads = [threading.Thread(target=writer.churn, args=[stop]) for writer in writers]
    for thread in threads:
        thread.start()
    while totals["device_written"] < until and not any(writer.failure for writer in writers):
        time.sleep(0.05)
        totals.look(ring.stats())
    if is_killed:
        os.kill(pid, signal.SIGKILL)
    else:
        stop.set()
    for thread in threads:
        thread.join()
    for writer in writers:
        if writer.failure is not None:
            raise writer.failure
    if not is_killed:
        totals.look(ring.stats())


def check_empty(ring: Ring, writers: list[Writer], free_at_start: int) -> None:
    """Nothing is left of what was removed."""
    for writer in writers:
        shutil.rmtree(writer.home)
    ring.umount()
    ring.audit()
    ring.mount("--no-reclaim")
    status = os.statvfs(ring.mountpoint)
    lost = (free_at_start - status.f_bfree) * status.f_bsize
    ring.umount()
    if lost > EMPTY_MAX:
        raise SystemExit(f"everything is removed, and {lost} bytes are not free again")
    print(f"everything removed: {lost} bytes less are free than at the start")


def summarize(writers: list[Writer], totals: Totals, size: int, kills: int) -> None:
    counts: Counter[str] = Counter()
    for writer in writers:
        counts.update(writer.counts)
    written = totals["device_written"]
    print(f"operations: {dict(sorted(counts.items()))}")
    print(
        f"{written / size:.1f} turns, {kills} kills, {sum(w.written for w in writers) >> 20} MiB "
        f"written by programs, {totals['payload_written'] >> 20} MiB of files and "
        f"{written >> 20} MiB in all to the device ({totals['carried'] >> 20} MiB carried out of "
        f"{totals['cleaned_segments']} segments): write amplification "
        f"{written / max(1, totals['payload_written']):.2f}; every byte is right"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=float, default=10)
    parser.add_argument("--use", type=float, default=85, help="percent of the ring")
    parser.add_argument("--size", default="512M")
    parser.add_argument("--segment-size", default="4M")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk")
    arguments = parser.parse_args()
    made = ("--size", arguments.size, "--segment-size", arguments.segment_size)
    try:
        with new_ring("turnover", arguments.dir, *made) as ring:
            turn_over(ring, arguments)
    except Broken as broken:
        raise SystemExit(str(broken)) from broken


if __name__ == "__main__":
    main()

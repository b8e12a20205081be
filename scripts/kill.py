"""SIGKILL the daemon again and again under a writing load, and hold it to its promises.

    python scripts/kill.py [--kills 200] [--writers 4] [--seed 1] [--dir DIR]

Each writer works in a directory of its own and keeps a manifest on an ordinary
filesystem: a line before an operation (its intent), a line after it (the promise).
Then the image is mounted again and every directory must hold exactly
what was promised; of the one operation that was under way, nothing, a part from its
beginning on (for a write) or all may be there. One kill in four meets the daemon while it
mounts and brings back what the kill before left. Exits 1 on the first thing lost or wrong.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

KVFS = str(Path(sys.executable).with_name("kvfs"))
SIZE_MAX = 3 * 1024 * 1024
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
Tree = dict[str, bytearray]
_MOUNTING_EVERY = 4
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a writer. `data_seed` and `length` give its bytes, `size` is a
    length to truncate to. All offsets and lengths in bytes."""

    kind: str
    name: str
    target: str = ""
    offset: int = 0
    length: int = 0
    data_seed: int = 0

    @property
    def data(self) -> bytes:
        return random.Random(self.data_seed).randbytes(self.length)

    def run(self, directory: Path) -> None:
        path = directory / self.name
        match self.kind:
            case "create":
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            case "write":
                self._write(path)
            case "truncate":
                os.truncate(path, self.length)
            case "rename":
                os.rename(path, directory / self.target)
            case "unlink":
                path.unlink()
            case "sync":
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def _write(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY)
        try:
            if os.pwrite(fd, self.data, self.offset) != self.length:
                os.listdir(path.parent)  # fails where the daemon died between two of its requests
                raise SystemExit("a write was short")
        finally:
            os.close(fd)

    def apply(self, tree: Tree) -> None:
        match self.kind:
            case "create":
                tree[self.name] = bytearray()
            case "write":
                _put(tree[self.name], self.offset, self.data)
            case "truncate":
                _resize(tree[self.name], self.length)
            case "rename":
                tree[self.target] = tree.pop(self.name)
            case "unlink":
                del tree[self.name]


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if data:
        _resize(content, max(len(content), offset + len(data)))
        content[offset : offset + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


# -- a writer -------------------------------------------------------------------------


def write_forever(directory: Path, manifest: Path, tree: Tree, seed: int) -> None:
    """Until the filesystem is gone. `tree` is what is there."""
    with manifest.open("w", buffering=1) as lines:
        try:
            write_until_gone(directory, lines, tree, random.Random(seed))
        except OSError as failure:
            if failure.errno not in GONE:
                raise


def write_until_gone(directory: Path, lines: TextIO, tree: Tree, rng: random.Random) -> None:
    while True:
        action = choose(rng, tree)
        lines.write(f"? {json.dumps(asdict(action))}\n")
        action.run(directory)
        lines.write("ok\n")
        action.apply(tree)


def choose(rng: random.Random, tree: Tree) -> Action:
    names = sorted(tree)
    kinds = ["create", "write", "write", "write", "append", "append", "truncate", "rename", "sync"]
    kind = rng.choice([*kinds, "unlink"] if len(names) > 3 else kinds)
    if (kind == "create" and len(names) < 12) or not names:
        return Action("create", f"f{rng.randrange(1 << 40):010x}")
    name = rng.choice(names)
    size = len(tree[name])
    if kind == "rename":
        return Action(
            "rename", name, target=rng.choice([*names, f"r{rng.randrange(1 << 40):010x}"])
        )
    if kind in ("truncate", "unlink", "sync"):
        return Action(kind, name, length=rng.randrange(size + 65536) if kind == "truncate" else 0)
    offset = size if kind != "write" else rng.randrange(size + 4096)
    if offset >= SIZE_MAX:
        return Action("truncate", name, length=rng.randrange(SIZE_MAX))
    length = rng.choice([rng.randrange(1, 5000), 4096, 65536, 262144, rng.randrange(1, 1 << 20)])
    return Action("write", name, offset=offset, length=length, data_seed=rng.randrange(1 << 62))


# -- what was promised ------------------------------------------------------------------


def read_tree(directory: Path) -> Tree:
    return {path.name: bytearray(path.read_bytes()) for path in directory.iterdir()}


def actions(manifest: Path) -> Iterator[tuple[Action, bool]]:
    """Each operation, and whether it was answered. A cut last line was never begun."""
    lines = manifest.read_text().splitlines(keepends=True) if manifest.exists() else []
    for at, line in enumerate(lines):
        if line.startswith("? ") and line.endswith("\n"):
            answered = at + 1 < len(lines) and lines[at + 1] == "ok\n"
            yield Action(**json.loads(line[2:])), answered


def check(directory: Path, manifest: Path, before: Tree) -> tuple[Tree, int]:
    """The tree that is there, and how many promises it keeps. Exits on a broken one."""
    expected, promised, doubtful = before, 0, None
    for action, answered in actions(manifest):
        if answered:
            action.apply(expected)
            promised += 1
        else:
            doubtful = action
    found = read_tree(directory)
    if found != expected and not (doubtful and possible(found, expected, doubtful)):
        report_difference(directory, expected, found, doubtful)
        raise SystemExit(1)
    return found, promised


def possible(found: Tree, expected: Tree, doubtful: Action) -> bool:
    """Whether `found` is `expected` with the doubtful operation done, or begun."""
    done = {name: bytearray(content) for name, content in expected.items()}
    doubtful.apply(done)
    if found == done:
        return True
    if doubtful.kind != "write" or found.keys() != expected.keys():
        return False
    # The kernel sends a long write in several requests.
    data, content = doubtful.data, found[doubtful.name]
    there = content[doubtful.offset : doubtful.offset + len(data)]
    common = _first_difference(there, data)
    partly = {name: bytearray(content) for name, content in expected.items()}
    _put(partly[doubtful.name], doubtful.offset, data[:common])
    return found == partly


def _first_difference(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """The length of the shorter one when they do not differ before its end."""
    return next(
        (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def report_difference(
    directory: Path, expected: Tree, found: Tree, doubtful: Action | None
) -> None:
    print(f"{directory}: not what was promised; under way was {doubtful}")
    for name in sorted(expected.keys() | found.keys()):
        want, have = expected.get(name), found.get(name)
        if want == have:
            continue
        if want is None or have is None:
            print(f"  {name}: {'lost' if have is None else 'should not be there'}")
            continue
        first = _first_difference(want, have)
        print(f"  {name}: {len(want)} bytes promised, {len(have)} found, differ from {first}")


# -- the harness --------------------------------------------------------------------------


def kvfs(*arguments: str | Path) -> None:
    subprocess.run([KVFS, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


@dataclass(slots=True)
class Harness:
    """An image, where it is mounted, and what its writers may rely on."""

    directory: Path
    writers: int
    rng: random.Random
    trees: list[Tree] = field(default_factory=list)
    promises: int = 0

    def __post_init__(self) -> None:
        self.mountpoint.mkdir()
        kvfs("mkfs", self.image, "--size", "1G", "--segment-size", "8M")
        self.trees = [{} for _ in range(self.writers)]

    @property
    def image(self) -> Path:
        return self.directory / "ring.img"

    @property
    def mountpoint(self) -> Path:
        return self.directory / "mnt"

    @property
    def mount(self) -> list[str | Path]:
        """The command."""
        return ["mount", self.mountpoint, self.image, "--log", self.directory / "kvfs.log"]

    def home(self, writer: int) -> Path:
        return self.mountpoint / f"writer-{writer}"

    def manifest(self, writer: int) -> Path:
        return self.directory / f"manifest.{writer}"

    def mount_and_check(self) -> None:
        kvfs(*self.mount)
        for writer in range(self.writers):
            home, manifest = self.home(writer), self.manifest(writer)
            home.mkdir(exist_ok=True)
            self.trees[writer], kept = check(home, manifest, self.trees[writer])
            manifest.unlink(missing_ok=True)
            self.promises += kept

    def kill_under_load(self) -> None:
        self.mount_and_check()
        pid = json.loads((self.mountpoint / ".kvfs" / "stats.json").read_text())["pid"]
        processes = [
            _FORK.Process(
                target=write_forever,
                args=(
                    self.home(writer), self.manifest(writer), self.trees[writer],
                    self.rng.randrange(1 << 40),
                ),
            )
            for writer in range(self.writers)
        ]  # fmt: skip
        for process in processes:
            process.start()
        time.sleep(self.rng.uniform(0.1, 1.5))
        os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.join(timeout=60)
            if process.exitcode != 0:
                process.kill()
                raise SystemExit("a writer failed, or hangs")

    def kill_while_mounting(self) -> None:
        """Mostly before it answers."""
        with (self.directory / "kvfs.log").open("a") as log:
            daemon = subprocess.Popen([KVFS, *map(str, self.mount), "--foreground"], stderr=log)
        time.sleep(self.rng.uniform(0.2, 1.5))
        daemon.kill()
        daemon.wait()

    def close(self) -> None:
        subprocess.run([KVFS, "umount", "--force", str(self.mountpoint)], capture_output=True)


def run(harness: Harness, kills: int) -> None:
    columns = (TextColumn("kills"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    started = time.monotonic()
    # Refreshed by hand: a process that forks had better be without threads.
    with Progress(
        *columns, console=console, disable=not console.is_terminal, auto_refresh=False
    ) as bar:
        for kill in bar.track(range(1, kills + 1)):
            if kill % _MOUNTING_EVERY == 0:
                harness.kill_while_mounting()
            else:
                harness.kill_under_load()
            if bar.disable:
                print(f"kill {kill} of {kills}: {harness.promises} promises kept", flush=True)
    harness.mount_and_check()
    kvfs("umount", harness.mountpoint)
    kvfs("fsck", harness.image)
    print(
        f"{kills} kills, {kills // _MOUNTING_EVERY} of them while it mounted, "
        f"{time.monotonic() - started:.0f} s: {harness.promises} promises kept, none broken"
    )


def main(
    kills: Annotated[int, typer.Option(min=0, help="How many.")] = 200,
    writers: Annotated[int, typer.Option(min=1, help="Processes that write.")] = 4,
    seed: Annotated[int, typer.Option(help="Of what is done, and when it is killed.")] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk.")
    ] = None,
) -> None:
    """SIGKILL the daemon under a writing load: nothing that it answered may be lost."""
    with tempfile.TemporaryDirectory(prefix="kvfs-kill-", dir=directory) as name:
        harness = Harness(Path(name), writers, random.Random(seed))
        try:
            run(harness, kills)
        finally:
            harness.close()


if __name__ == "__main__":
    typer.run(main)

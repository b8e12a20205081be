"""SIGKILL the daemon again and again under a writing load, and hold it to its promises.

    python scripts/kill.py [--kills 50] [--writers 4] [--seed 1] [--dir DIR]

Each writer works in a directory of its own and keeps a manifest on an ordinary
filesystem: a line before an operation (its intent), a line after it (the promise).
After each kill the image is mounted again and every directory must hold exactly
what was promised; of the one operation that was under way, nothing, a part from its
beginning on (for a write) or all may be there. Exits 1 on the first thing lost or wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

KVFS = str(Path(sys.executable).with_name("kvfs"))
SIZE_MAX = 3 * 1024 * 1024
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
Tree = dict[str, bytearray]


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


def write_forever(directory: Path, manifest: Path, seed: int) -> None:
    """Until the filesystem is gone."""
    with manifest.open("w", buffering=1) as lines:
        try:
            write_until_gone(directory, lines, random.Random(seed))
        except OSError as failure:
            if failure.errno not in GONE:
                raise


def write_until_gone(directory: Path, lines: TextIO, rng: random.Random) -> None:
    tree = read_tree(directory)
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


def run(directory: Path, kills: int, writers: int, seed: int) -> None:
    image, mountpoint = directory / "ring.img", directory / "mnt"
    mountpoint.mkdir()
    kvfs("mkfs", image, "--size", "1G", "--segment-size", "8M")
    rng = random.Random(seed)
    trees: list[Tree] = [{} for _ in range(writers)]
    promises = 0
    log = directory / "kvfs.log"
    for kill in range(kills + 1):
        kvfs("mount", mountpoint, image, "--log", log)
        for writer in range(writers):
            home = mountpoint / f"writer-{writer}"
            home.mkdir(exist_ok=True)
            trees[writer], kept = check(home, directory / f"manifest.{writer}", trees[writer])
            promises += kept
        if kill == kills:
            break
        load_and_kill(directory, mountpoint, writers, rng)
        print(f"kill {kill + 1} of {kills}: {promises} promises kept so far", flush=True)
    kvfs("umount", mountpoint)
    print(f"{kills} kills, {promises} promises kept, none broken")


def load_and_kill(directory: Path, mountpoint: Path, writers: int, rng: random.Random) -> None:
    pid = json.loads((mountpoint / ".kvfs" / "stats.json").read_text())["pid"]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--writer", mountpoint / f"writer-{writer}",
             "--manifest", directory / f"manifest.{writer}", "--seed", str(rng.randrange(1 << 40))]
        )
        for writer in range(writers)
    ]  # fmt: skip
    time.sleep(rng.uniform(0.3, 2.0))
    os.kill(pid, signal.SIGKILL)
    for process in processes:
        if process.wait(timeout=60):
            raise SystemExit("a writer failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk")
    parser.add_argument("--writer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--manifest", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.writer:
        write_forever(arguments.writer, arguments.manifest, arguments.seed)
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        try:
            run(Path(name), arguments.kills, arguments.writers, arguments.seed)
        finally:
            subprocess.run(
                [KVFS, "umount", "--force", str(Path(name) / "mnt")], capture_output=True
            )


if __name__ == "__main__":
    main()

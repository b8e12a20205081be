"""Row 11: names and attributes, beside a pyfuse3 filesystem that does nothing, and one whose
requests are read as KVFS reads them.

Each operation is done so many times by one program in one thread, on the one filesystem and
then on the other. Cold: the kernel has dropped its dentries and inodes, and the daemon has
worked off what it was told of that.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.bench import null_filesystem, null_session
from scripts.bench.disk import drop_caches, timed
from scripts.bench.mount import fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.rows import Row, Series, speed_row

GOAL = 0.5
_NULL, _OWN_NULL = "a null filesystem", "one that reads requests as KVFS does"
_QUIET_SECONDS = 0.1

OPERATIONS = {
    "stat-cold": "stat, dentry and inode dropped",
    "stat": "stat, cached by the kernel",
    "open": "open and close",
    "create": "create and close",
    "rename": "rename within a directory",
    "unlink": "unlink",
    "readdir": "names of a directory listed, dropped before",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A mounted filesystem and the process that serves it. `many` is a directory with files
    named by number, of which only names and attributes are asked for."""

    root: Path
    daemon: psutil.Process

    @property
    def many(self) -> Path:
        return self.root / "many"

    def fill(self, count: int) -> None:
        self.many.mkdir()
        for number in range(count):
            _create(f"{self.many}/{number:06}")

    def settle(self) -> None:
        """What is due to be done, such as forgetting inodes, is not counted on what follows."""
        used = -1.0
        while used != (used := sum(self.daemon.cpu_times()[:2])):
            time.sleep(_QUIET_SECONDS)

    def drop(self) -> None:
        drop_caches()
        self.settle()
        self.many.stat()


def measure(plan: Plan) -> list[Row]:
    names, count = plan.pick(100_000, 10_000), plan.pick(10_000, 2_000)
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:

        def null(name: str, program: str) -> Subject:
            point = plan.directory / name
            pid = stack.enter_context(null_filesystem.mounted(point, program=program))
            return Subject(point, psutil.Process(pid))

        options = ("--warm", "256M", "--no-reclaim")
        mount = stack.enter_context(fresh_mount(plan.directory, "2G", *options))
        subjects = {
            "KVFS": Subject(mount.point, psutil.Process(mount.stats()["pid"])),
            _NULL: null("null", null_filesystem.__file__),
            _OWN_NULL: null("own-null", null_session.__file__),
        }
        for name, subject in subjects.items():
            subject.fill(names)
            found[name] = defaultdict(list)
        for number in range(plan.rounds + 1):
            for name, subject in subjects.items():
                rates = one_round(subject, number, names, count)
                if number:
                    for operation, rate in rates.items():
                        found[name][operation].append(rate)
    remark = f"{count} of each a round; {names} names listed, and as many where stat is asked"
    return [
        speed_row(
            f"11{letter}", what, GOAL,
            Series("KVFS", found["KVFS"][operation]),
            Series(_NULL, found[_NULL][operation]),
            unit="ops/s",
            peers=[Series(_OWN_NULL, found[_OWN_NULL][operation])],
            remark=remark if letter == "a" else "",
        )
        for letter, (operation, what) in zip("abcdefg", OPERATIONS.items(), strict=True)
    ]  # fmt: skip


def one_round(subject: Subject, number: int, names: int, count: int) -> dict[str, float]:
    """Operations a second, by their name."""
    rates = {}
    chosen = random.Random(number).sample(range(names), count)
    known = [f"{subject.many}/{name:06}" for name in chosen]
    own = subject.root / f"round-{number}"
    own.mkdir()
    fresh = [f"{own}/{name:06}" for name in range(count)]
    renamed = [f"{path}.renamed" for path in fresh]

    def rate(operation: str, work: Callable[[], object], of: int = count) -> None:
        rates[operation] = of / timed(work)

    subject.drop()
    rate("stat-cold", lambda: _each(os.stat, known))
    rate("stat", lambda: _each(os.stat, known))
    rate("open", lambda: _each(_open, known))
    rate("create", lambda: _each(_create, fresh))
    rate("rename", lambda: _each(os.rename, fresh, renamed))
    rate("unlink", lambda: _each(os.unlink, renamed))
    subject.drop()
    listed: list[str] = []
    rate("readdir", lambda: listed.extend(os.listdir(subject.many)), names)
    if len(set(listed)) != names or os.listdir(own):
        raise SystemExit(f"{subject.root}: names are wrong")
    return rates


def _each(call: Callable[..., object], *paths: list[str]) -> None:
    for arguments in zip(*paths, strict=True):
        call(*arguments)


def _open(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

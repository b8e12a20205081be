"""An engine, and a process of it that stores and loads when it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.engines.environments import ROOT, Environment
from scripts.trials.ring import Broken

_DRIVERS = Path(__file__).with_name("drivers")
_LINES = 40


@dataclass(frozen=True, slots=True)
class Engine:
    """`driver` is a module of `drivers/` that is given the directory and `arguments`.

    `many_small`: it keeps many small files, and is to be faster than on ext4.
    `finds_again`: what a former process stored is found by a new one; else its index is in its
    memory alone, and KVFS is restarted under the one that runs.
    `is_pool`: its files have nothing to do with each other, which its directory is told.
    `keeps_open`: what it stores is for its process alone, in a file that it keeps open.
    `stores_again`: what is gone it makes anew and stores; else it goes on believing in its files
    until its next process, on any filesystem.
    `leaves`: a pattern for what its process leaves in /dev/shm when it is killed.
    `is_slow_to_start`: its speed is taken in one process a round.
    `imports_kvfs`: its driver does.
    `rival`: it is at home on KVFS alone, and to be faster there than this one.
    """

    name: str
    environment: Environment
    driver: str
    arguments: tuple[str, ...] = ()
    many_small: bool = False
    finds_again: bool = True
    is_pool: bool = False
    keeps_open: bool = False
    stores_again: bool = True
    leaves: str | None = None
    is_slow_to_start: bool = False
    imports_kvfs: bool = False
    rival: Engine | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a store or a load: `bytes` moved and `digest` of what came of it (bytes or tokens),
    which is the same whether it was found or made anew; `hits` is how much was found, in the
    engine's own measure."""

    seconds: float
    bytes: int
    hits: int
    digest: str


class Running:
    """A process of an engine."""

    def __init__(self, engine: Engine, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._engine, self._process, self._log = engine, process, log

    def store(self) -> Outcome:
        """The same each time: what is there already is a hit."""
        return self._ask("store")

    def load(self) -> Outcome:
        """What was stored, as far as it is found; the rest is made anew."""
        return self._ask("load")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, what: str) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._log.seek(0)
            end = "".join(self._log.readlines()[-_LINES:])
            raise Broken(f"{self._engine.name} has ended in its {what}:\n{end}")
        return Outcome(**json.loads(answer))


@contextmanager
def running(engine: Engine, directory: Path) -> Iterator[Running]:
    """A process of its own, which is killed at the end: none of them may need more time."""
    left_before = _left_by(engine)
    python, driver = engine.environment.python, _DRIVERS / f"{engine.driver}.py"
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if engine.imports_kvfs:
        variables["PYTHONPATH"] = str(ROOT)
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [python, driver, directory, *engine.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=variables,
        ) as process,
    ):
        try:
            yield Running(engine, process, log)
        finally:
            process.kill()
            process.wait()
            for path in _left_by(engine) - left_before:
                path.unlink(missing_ok=True)


def _left_by(engine: Engine) -> set[Path]:
    return set() if engine.leaves is None else set(Path("/dev/shm").glob(engine.leaves))

"""vLLM with KVFS's own connector and a real model: the same tokens as without, whatever happens to
what is stored."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.engines.environments import ROOT, VLLM
from tests.support.mounter import Mounter, mounted

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("fuse"),
]

BLOCK = 32
_DRIVER = ROOT / "scripts/engines/drivers/vllm_ask.py"
_numbers = random.Random(1)
A, B, C, D, E = ([_numbers.randrange(100, 40_000) for _ in range(140)] for _ in range(5))


@dataclass(frozen=True)
class Ask:
    prompts: list[list[int]]
    count: int = 4
    aborted: int | None = None


FIRST = Ask([A])
TURN = Ask([[*A, *B[:40]]])
TOGETHER = Ask([[*A, number, *C[:30]] for number in range(3)])
CROWDED = Ask([B, C, D], count=30)
ABORTED = Ask([E, A], aborted=1)
ALL = [FIRST, TURN, TOGETHER, CROWDED, ABORTED]


@dataclass(frozen=True)
class Answer:
    tokens: list[list[int]]
    hits: list[int]
    preemptions: int


@contextmanager
def engine(place: Path | None, dtype: str = "float32") -> Iterator[Callable[[Ask], Answer]]:
    """A process; its end kills it. Without a place it has no connector."""
    VLLM.make()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [VLLM.python, _DRIVER, place or "-", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={"PYTHONPATH": str(ROOT)},
        ) as process,
    ):

        def ask(question: Ask) -> Answer:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(vars(question)) + "\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                return Answer(**json.loads(answer))
            log.seek(0)
            raise AssertionError(log.read()[-4000:])

        try:
            yield ask
        finally:
            process.kill()


@cache
def reference() -> list[Answer]:
    with engine(None) as ask:
        return [ask(question) for question in ALL]


def right(question: Ask) -> list[list[int]]:
    return reference()[ALL.index(question)].tokens


@pytest.fixture
def place(fuse: None) -> Iterator[Path]:
    with mounted() as mountpoint:
        yield mountpoint / "kv"


def sessions(place: Path) -> list[Path]:
    return [one for one in place.iterdir() if not one.name.startswith(".")]


def test_two_engines_and_another_model_in_one_directory(place: Path) -> None:
    with engine(place) as one, engine(place) as two, engine(place, "bfloat16") as other:
        assert one(FIRST).hits == [0]
        turn = two(TURN)
        assert (turn.tokens, turn.hits) == (right(TURN), [len(A) // BLOCK * BLOCK])
        assert len(sessions(place)) == 1
        assert other(FIRST).hits == [0] and len(sessions(place)) == 2
        together = two(TOGETHER)
        assert together.tokens == right(TOGETHER) and min(together.hits) >= 128
        crowded = one(CROWDED)
        assert crowded.tokens == right(CROWDED) and crowded.preemptions
        again = two(CROWDED)
        assert again.tokens == right(CROWDED) and min(again.hits) == 128
        assert one(ABORTED).tokens == two(ABORTED).tokens == right(ABORTED)
        for question in ALL:
            answer = one(question)
            assert answer.tokens == right(question) and min(answer.hits) >= 128


def _cut(session: Path) -> None:
    with open(session / "layer.020", "r+b") as file:
        file.truncate(1000)


def _remove_a_layer(session: Path) -> None:
    (session / "layer.007").unlink()


def _put_another_layer_in_its_place(session: Path) -> None:
    shutil.copyfile(session / "layer.003", session / "layer.029")


def _change_a_byte(session: Path) -> None:
    with open(session / "layer.015", "r+b") as file:
        file.seek(5000)
        file.write(b"\x5a")


DAMAGES = [
    _cut,
    _remove_a_layer,
    _put_another_layer_in_its_place,
    _change_a_byte,
    shutil.rmtree,
]


def test_what_is_damaged_is_computed_again(place: Path) -> None:
    with engine(place) as ask:
        for damage in DAMAGES:
            assert ask(FIRST).tokens == right(FIRST)
            assert ask(FIRST).hits == [len(A) // BLOCK * BLOCK]
            for session in sessions(place):
                damage(session)
            assert ask(TURN).tokens == right(TURN)
            assert ask(FIRST).tokens == right(FIRST)


def test_the_daemon_is_killed_under_a_running_engine(fuse: None) -> None:
    mounter = Mounter()
    try:
        mounter.mount()
        with engine(mounter.mountpoint / "kv") as ask:
            answers: list[Any] = [ask(FIRST)]
            mounter.kill()
            answers.append(ask(FIRST))
            mounter.mount()
            answers += [ask(FIRST), ask(FIRST)]
        assert [answer.tokens for answer in answers] == [right(FIRST)] * 4
        assert answers[1].hits == [0] and answers[3].hits == [128]
    finally:
        mounter.close()

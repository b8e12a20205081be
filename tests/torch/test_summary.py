"""Summaries are what was put for the tokens that are there, or they are not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import PreTrainedModel

from kvfs.torch import KVFSCache
from kvfs.torch.minilm import MiniLM
from kvfs.torch.summary import DIMENSIONS, Match, SummaryIndex, SummarySlot, project

Prompt = Callable[..., torch.Tensor]
ROUND_TOKENS = 10
FIRST_OF_RAMP = [-0.129855, -0.246481, -0.258574]


def write_session(directory: Path, tokens: list[int]) -> None:
    """The two files that a summary speaks of, with a round's end every ten tokens."""
    directory.mkdir(exist_ok=True)
    (directory / "tokens").write_bytes(np.array(tokens, "<i4").tobytes())
    ends = list(range(ROUND_TOKENS, len(tokens) + 1, ROUND_TOKENS))
    (directory / "session.json").write_text(json.dumps({"rounds": ends}))


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(DIMENSIONS).astype(np.float32)


def test_each_round_keeps_its_own(tmp_path: Path) -> None:
    write_session(tmp_path / "agent", list(range(45)))
    slot = SummarySlot(tmp_path / "agent")
    assert dict(slot) == {}
    for round in (3, 0):
        slot.put(round, vector(round))
    slot.put(3, vector(7))
    assert sorted(dict(slot)) == [0, 3]
    assert np.array_equal(slot.get(3), vector(7))
    assert slot.get(1) is None
    with pytest.raises(IndexError, match=r"round 4 has not ended in .*agent, which has 4"):
        slot.put(4, vector(4))
    for wrong in (np.zeros(384), np.full(DIMENSIONS, np.nan)):
        with pytest.raises(ValueError, match="a summary is 128 finite numbers"):
            slot.put(0, wrong)


def test_a_round_that_was_cut_and_written_anew_has_none(tmp_path: Path) -> None:
    """The crop of a session leaves the file of summaries alone."""
    write_session(tmp_path / "agent", list(range(40)))
    slot = SummarySlot(tmp_path / "agent")
    for round in range(4):
        slot.put(round, vector(round))
    write_session(tmp_path / "agent", list(range(25)))
    assert sorted(dict(slot)) == [0, 1]
    write_session(tmp_path / "agent", [*range(25), *range(100, 115)])
    assert sorted(dict(slot)) == [0, 1]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_damaged_is_never_shown(data: st.DataObject) -> None:
    """Whatever happens to the file: a summary is the one that was put, or none."""
    with TemporaryDirectory() as name:
        directory = Path(name) / "agent"
        write_session(directory, list(range(40)))
        slot = SummarySlot(directory)
        for round in range(4):
            slot.put(round, vector(round))
        file = directory / "summary"
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "shift"])):
            case "flip":
                content[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[at:]
            case _:
                content.insert(at, 0)
        file.write_bytes(content)
        left = dict(slot)
        assert all(np.array_equal(left[round], vector(round)) for round in left)
        size = 536
        assert {round for round in range(4) if (round + 1) * size <= at} <= set(left)
        assert at // size not in left


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_index_finds_what_a_comparison_with_each_finds(rounds: int, k: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    vectors = draw.standard_normal((rounds, DIMENSIONS)).astype(np.float32)
    question = draw.standard_normal(DIMENSIONS)
    with TemporaryDirectory() as name:
        for number, one in enumerate(vectors):
            session, round = Path(name) / f"agent-{number % 3}", number // 3
            if round == 0:
                write_session(session, list(range(ROUND_TOKENS * rounds)))
            SummarySlot(session).put(round, one)
        found = SummaryIndex(name).search(question, k)
    cosines = vectors @ question / np.linalg.norm(vectors, axis=1) / np.linalg.norm(question)
    expected = np.argsort(-cosines)[:k]
    assert [(match.session, match.round) for match in found] == [
        (f"agent-{at % 3}", at // 3) for at in expected
    ]
    assert np.allclose([match.score for match in found], cosines[expected], atol=1e-5)


def test_an_index_of_nothing_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a session")
    (tmp_path / "empty").mkdir()
    assert SummaryIndex(tmp_path).search(vector(0)) == []


def test_a_projection_keeps_angles_and_never_changes() -> None:
    draw = np.random.default_rng(0)
    pairs = draw.standard_normal((200, 2, 384))
    pairs[:, 1] += pairs[:, 0] * draw.uniform(-2, 2, (200, 1))

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    errors = [cosine(a, b) - cosine(project(a), project(b)) for a, b in pairs]
    assert np.sqrt(np.mean(np.square(errors))) < 1 / np.sqrt(DIMENSIONS)
    # Stored vectors were made with these directions.
    ramp = project(np.arange(384) / 384)
    assert np.allclose(ramp[:3], FIRST_OF_RAMP, atol=1e-5)
    assert np.array_equal(project(vector(1)), vector(1))
    with pytest.raises(ValueError, match="at least 128 numbers"):
        project(np.zeros(64))


def test_a_session_carries_its_summaries(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        with torch.no_grad():
            for round in range(3):
                model(input_ids=prompt(20, seed=round), cache=cache)
                cache.end_round()
                cache.summary.put(round, vector(round))
        os.setxattr(cache.path, "user.kvfs.fork", b"copy")
        cache.crop(-30)
    assert SummaryIndex(kv_directory).search(vector(2))[0].session == "copy"
    (best,) = SummaryIndex(kv_directory).search(vector(0))
    assert best == Match("agent", 0, pytest.approx(1.0))
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        assert sorted(dict(cache.summary)) == [0]


def test_questions_find_the_round_that_they_are_about(tmp_path: Path) -> None:
    try:
        encoder = MiniLM()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    rounds = [
        "The oven should be at 230 degrees; the loaf is done when it sounds hollow.",
        "The log of the daemon was rotated away and still fills the root file system.",
        "Rename is atomic, but the new name may reach the disk before the bytes do.",
    ]
    write_session(tmp_path / "agent", list(range(30)))
    slot = SummarySlot(tmp_path / "agent")
    for round, text in enumerate(rounds):
        slot.put(round, project(encoder(text)))
    index = SummaryIndex(tmp_path)
    questions = [
        "How hot do I bake bread?",
        "Why was the disk full?",
        "Can a file be empty after a power cut?",
    ]
    found = [index.search(project(encoder(question)))[0].round for question in questions]
    assert found == [0, 1, 2]

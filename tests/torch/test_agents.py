"""The pieces of scripts/agents.py, with a model that is small enough for a test."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache, PreTrainedModel

from kvfs.tiers.profiles import Profile
from kvfs.torch import HotPool, KVRouter
from scripts import agents
from scripts.agents import AGENTS, Agent, Stage, Turn
from scripts.demo import Mount, fresh_mount

WORDS = [1 + number * 7 % 251 for number in range(400)]
FIELDS = (
    "session", "stream", "turn", "kind", "think_s", "in_tok", "out_tok", "prefix_match_tok",
)  # fmt: skip


@pytest.fixture
def disk_mount(fuse: None, tmp_path: Path) -> Iterator[Mount]:
    """A mount as the scripts make it."""
    with fresh_mount(tmp_path) as mount:
        yield mount


def some_agents(turns: int) -> list[Agent]:
    """Eight of them, each with tool calls, a user's message and a context that is shortened."""
    later = [
        Turn("tool", 0.01, 9, 4),
        Turn("user", 0.02, 5, 6, keep=0.4),
        Turn("tool", 0.0, 1, 4),
    ]
    script = [Turn("first", 0.0, 60, 4), *(later[at % 3] for at in range(turns - 1))]
    return [Agent(f"agent-{number}", script, WORDS[number:], 0.0) for number in range(AGENTS)]


def test_a_trace_becomes_scripts_that_fit_the_context(tmp_path: Path) -> None:
    trace = tmp_path / "turns.csv"
    with trace.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for session in range(AGENTS):
            writer.writerow([f"s{session}", "main", 0, "first", "0.0", 70_000, 200, 0])
            writer.writerow([f"s{session}", "sub", 0, "first", "0.0", 9, 9, 0])
            writer.writerow([f"s{session}", "main", 1, "tool", "12.0", 71_000, 300, 70_000])
            writer.writerow([f"s{session}", "main", 2, "user", "", 20_000, 90, 10_000])
    scripts = agents.scripts_from(trace, turns=3)
    assert scripts == [
        [
            Turn("first", 0.0, 70_000, 200),
            Turn("tool", 12.0, 800, 300),
            Turn("user", 0.0, 10_000, 90, keep=10_000 / 71_000),
        ]
    ] * len(scripts)
    assert len(scripts) == AGENTS
    with pytest.raises(agents.DemoError, match="fewer than 8 sessions of 4 turns"):
        agents.scripts_from(trace, turns=4)


@pytest.mark.parametrize("context", [300, 768])
def test_scaled_turns_stay_within_the_context(context: int) -> None:
    for script in agents.drawn_scripts(turns=12):
        small = agents.scaled(script, context, speed=10)
        agent = Agent("agent", small, WORDS, 0.0)
        longest = 0
        while (turn := agent.turn) is not None:
            prompt = agent.prompt()
            assert prompt == agent.prompt()
            kept = int(len(agent.ids) * turn.keep)
            assert prompt[:kept] == agent.ids[:kept]
            agent.answered(prompt, [7] * turn.answer_tokens)
            longest = max(longest, len(agent.ids))
            assert turn.gap_seconds <= agents.LONGEST_GAP_SECONDS / 10
        assert context / 2 < longest <= context
    with pytest.raises(agents.DemoError, match="--context 40 is too short for 12 turns"):
        agents.scaled(agents.drawn_scripts(turns=12)[0], 40, speed=10)


def test_what_a_prompt_does_not_begin_with_leaves_the_cache(model: PreTrainedModel) -> None:
    cache = DynamicCache()
    agents.answer(model, WORDS[:20], 5, cache, agents.FirstToken())
    assert cache.get_seq_length() == 24
    said = [*WORDS[:20], 1, 2, 3, 4, 5]
    agents.crop_for([*said, 9], said, cache)
    assert cache.get_seq_length() == 24
    agents.crop_for([*WORDS[:12], 250, 9], said, cache)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("kill_at", [None, 9])
def test_agents_with_a_router_say_what_agents_in_memory_say(
    kill_at: int | None,
    disk_mount: Mount,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hot memory for two of eight; with SIGKILL of the daemon in the middle of an answer."""
    monkeypatch.setattr(agents, "OUTAGE_SECONDS", 0.3)
    kept, routed = some_agents(4), some_agents(4)
    agents.play_in_memory(kept, model)
    pool = HotPool(2 * 8 * 8 * 4096, slab_bytes=4096)
    with KVRouter(
        disk_mount.point, model, pool=pool, profile=Profile(hot_idle_seconds=0.1)
    ) as router:
        stage = Stage(router, model, disk_mount)
        stage.play(routed, kill_at)
        values = agents.metrics_of(router)
    same, tokens = agents.identical(kept, routed)
    assert same == tokens == AGENTS * (4 + 4 + 6 + 4)
    assert len(stage.played) == AGENTS * 4
    assert {one.tier for one in stage.played if one.tier} & {"warm", "cold"}
    assert values["kv_moved_bytes_total written"] > 0
    if kill_at is not None:
        assert stage.outage.killed_in
        assert stage.outage.errors
        assert values["kv_reopened_sessions_total"] > 0

"""Eight agents with a real model, memory for two: their KV moves between the tiers by itself.

    python scripts/agents.py [--trace agent_turns.csv] [--kill] [--json FILE]

SmolLM2-135M-Instruct answers the turns of eight agents. Who speaks when, how much is new in
a turn and how long its answer is, comes from a trace of coding agents, or is drawn from
what such traces publish (gaps after a tool 9 s at the median and 74 s at p90, after a user's
message 127 and 1540 s, 700 new tokens a turn on a prefix of 100 000); tokens are scaled to
the context, gaps by --speed. The first run keeps all KV in memory. In the second one
`KVRouter` has hot memory for two of the sessions and the daemon RAM for four (`--warm`).
The tokens must be the same. With --kill the daemon is killed with SIGKILL in the middle of
an answer and mounted again seconds later.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from kvfs.torch import HotPool, KVRouter
from scripts.demo import (
    TEXTS,
    DemoError,
    Mount,
    console,
    fresh_mount,
    load_model,
    progress,
    work_directory,
)

AGENTS, HOT_AGENTS, WARM_AGENTS = 8, 2, 4
SLAB_BYTES = 64 << 10  # 85 tokens: sessions here are short
OUTAGE_SECONDS = 3.0
# In the agents' time, which --speed divides; a longer gap would only make the run longer.
LONGEST_GAP_SECONDS, START_WINDOW_SECONDS = 300.0, 300.0
# The default's idle times, divided likewise. A group of ten would be more than there are.
PROFILE = """
hot_idle_seconds = {hot}
warm_idle_seconds = {warm}
warm_group = 1
"""
WARM_FILL, WARM_SEGMENT_BYTES = 0.85, 64 << 10
SEED = 1

Kind = Literal["first", "tool", "user"]
Tier = Literal["hot", "warm", "cold"]


# What the agents do


@dataclass(frozen=True)
class Turn:
    """One request: what comes after `gap_seconds` of idleness, and how long the answer is.

    `keep` is the share of the earlier tokens that the prompt still begins with: less than 1
    where the agent has shortened its context.
    """

    kind: Kind
    gap_seconds: float
    new_tokens: int
    answer_tokens: int
    keep: float = 1.0


Script = list[Turn]


def scripts_from(trace: Path, turns: int) -> list[Script]:
    """Parts of the main streams of randomly chosen sessions, `turns` requests each."""
    streams: dict[str, list[dict[str, str]]] = defaultdict(list)
    with trace.open() as file:
        for row in csv.DictReader(file):
            if row["stream"] == "main":
                streams[row["session"]].append(row)
    long_enough = [rows for rows in streams.values() if len(rows) >= turns]
    if len(long_enough) < AGENTS:
        raise DemoError(f"{trace} has fewer than {AGENTS} sessions of {turns} turns")
    draw = np.random.default_rng(SEED)
    chosen = draw.choice(len(long_enough), AGENTS, replace=False)
    return [_script_of(_part(long_enough[at], turns, draw)) for at in chosen]


def _part(
    rows: list[dict[str, str]], turns: int, draw: np.random.Generator
) -> list[dict[str, str]]:
    start = int(draw.integers(len(rows) - turns + 1))
    return rows[start : start + turns]


def _script_of(rows: list[dict[str, str]]) -> Script:
    first = rows[0]
    script = [Turn("first", 0.0, int(first["in_tok"]), int(first["out_tok"]))]
    for before, row in pairwise(rows):
        prompt, shared, earlier = (
            int(row["in_tok"]),
            int(row["prefix_match_tok"]),
            int(before["in_tok"]),
        )
        shortened = shared < 0.9 * earlier
        known = shared if shortened else earlier + int(before["out_tok"])
        script.append(
            Turn(
                "tool" if row["kind"] == "tool" else "user",
                float(row["think_s"] or 0),
                max(1, prompt - known),
                int(row["out_tok"]),
                keep=shared / earlier if shortened else 1.0,
            )
        )
    return script


def drawn_scripts(turns: int) -> list[Script]:
    """Turns drawn from lognormal distributions with the published medians and tails."""
    draw = np.random.default_rng(SEED)

    def lognormal(middle: float, p90: float) -> float:
        return middle * math.exp(draw.standard_normal() * math.log(p90 / middle) / 1.2816)

    def later() -> Turn:
        new, answer = int(lognormal(500, 4000)) + 1, int(lognormal(210, 900)) + 1
        if draw.random() < 0.87:
            return Turn("tool", lognormal(9, 74), new, answer)
        return Turn("user", lognormal(127, 1540), new, answer)

    return [
        [
            Turn("first", 0.0, int(lognormal(100_000, 160_000)), int(lognormal(210, 900)) + 1),
            *(later() for _ in range(turns - 1)),
        ]
        for _ in range(AGENTS)
    ]


def scaled(script: Script, context: int, speed: float) -> Script:
    """The same in `context` tokens at most, with gaps divided by `speed`."""
    answers = [min(32, max(4, turn.answer_tokens // 25)) for turn in script]
    length = peak = 0.0
    for turn in script:
        length = length * turn.keep + turn.new_tokens
        peak = max(peak, length)
    # Each turn says at least one token.
    room = context - sum(answers) - len(script)
    if room <= 0:
        raise DemoError(f"--context {context} is too short for {len(script)} turns: give more")
    factor = room / peak
    return [
        Turn(
            turn.kind,
            min(turn.gap_seconds, LONGEST_GAP_SECONDS) / speed,
            max(1, int(turn.new_tokens * factor)),
            answer,
            turn.keep,
        )
        for turn, answer in zip(script, answers, strict=True)
    ]


# An agent at work


class FirstToken(BaseStreamer):
    """Notes when an answer's first token was there, and tells of it."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.at = 0.0
        self._then = then

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each token."""
        if value.dim() == 1 and not self.at:
            self.at = time.perf_counter()
            if self._then is not None:
                self._then()

    def end(self) -> None:
        """The answer is complete."""


@dataclass
class Agent:
    """What an agent has said and been told: token ids. `words` is where its texts come from;
    its first turn is due `starts_after` seconds."""

    name: str
    script: Script
    words: list[int]
    starts_after: float
    ids: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    _read: int = 0

    @property
    def turn(self) -> Turn | None:
        """What comes next; None at the end."""
        return self.script[len(self.answers)] if len(self.answers) < len(self.script) else None

    def prompt(self) -> list[int]:
        """The ids that the next answer is made for; asked twice it is the same."""
        turn = self.script[len(self.answers)]
        new = (self.words[(self._read + at) % len(self.words)] for at in range(turn.new_tokens))
        return [*self.ids[: int(len(self.ids) * turn.keep)], *new]

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        """The turn is over."""
        self._read += self.script[len(self.answers)].new_tokens
        self.ids = [*prompt, *answer]
        self.answers.append(answer)


def make_agents(
    scripts: Sequence[Script], tokenizer: PreTrainedTokenizerBase, speed: float
) -> list[Agent]:
    """One for each script; each reads the same texts from another place on."""
    text = "\n".join(path.read_text() for path in sorted(TEXTS.glob("*.txt")))
    words: list[int] = tokenizer.encode(text, add_special_tokens=False)
    starts = np.random.default_rng(SEED).uniform(0, START_WINDOW_SECONDS / speed, len(scripts))
    return [
        Agent(f"agent-{number}", script, words, start, _read=number * len(words) // AGENTS)
        for number, (script, start) in enumerate(zip(scripts, starts, strict=True))
    ]


def answer(
    model: PreTrainedModel, prompt: list[int], tokens: int, cache: Any, first: FirstToken
) -> list[int]:
    """The greedy answer of `tokens` tokens; the cache may hold a prefix of the prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        do_sample=False,
        repetition_penalty=1.1,
        streamer=first,
    )
    made: list[int] = output[0, len(prompt) :].tolist()
    return made


def crop_for(prompt: list[int], said: list[int], cache: Any) -> None:
    """Leave in the cache what the prompt begins with, of what was `said` before it.

    What a turn that failed has left in the cache goes too: computed in other pieces, its
    numbers need not be the same.
    """
    pairs = enumerate(zip(said[:-1], prompt[:-1], strict=False))
    shorter = min(len(said), len(prompt)) - 1
    known = next((at for at, (a, b) in pairs if a != b), max(0, shorter))
    excess = cache.get_seq_length() - known
    if excess > 0:
        cache.crop(-excess)


# The two runs


def play_in_memory(agents: list[Agent], model: PreTrainedModel) -> list[float]:
    """The baseline, whose caches stay in memory. For the last prompt of each agent: seconds to
    its first token when all of it is computed anew."""
    recomputed = []
    with progress("all in memory", sum(len(agent.script) for agent in agents)) as advance:
        for agent in agents:
            cache = DynamicCache(config=model.config)
            while (turn := agent.turn) is not None:
                prompt = agent.prompt()
                crop_for(prompt, agent.ids, cache)
                agent.answered(
                    prompt, answer(model, prompt, turn.answer_tokens, cache, FirstToken())
                )
                advance()
            started, first = time.perf_counter(), FirstToken()
            answer(model, prompt, 1, DynamicCache(config=model.config), first)
            recomputed.append(first.at - started)
    return recomputed


@dataclass(frozen=True)
class Played:
    """One turn of the second run: the slowest tier that held part of the session (None for a
    new one), and milliseconds from the request to the first token."""

    agent: str
    tier: Tier | None
    first_token_ms: float


@dataclass
class Outage:
    """What was seen of the daemon's death."""

    killed_in: str = ""
    errors: list[str] = field(default_factory=list)
    slowest_error_ms: float = 0.0


class Stage:
    """The second run: agents that share a router, each turn when it is due."""

    def __init__(self, router: KVRouter, model: PreTrainedModel, mount: Mount) -> None:
        self.played: list[Played] = []
        self.outage = Outage()
        self._router, self._model, self._mount = router, model, mount
        self._timers: list[threading.Timer] = []

    def play(self, agents: list[Agent], kill_at: int | None) -> None:
        """All turns of all agents; the daemon is killed in the turn of that number."""
        now = time.monotonic()
        due = [(now + agent.starts_after, agent.name, agent) for agent in agents]
        heapq.heapify(due)
        with progress("with the router", sum(len(agent.script) for agent in agents)) as advance:
            while due:
                at, _, agent = heapq.heappop(due)
                time.sleep(max(0.0, at - time.monotonic()))
                kill = len(self.played) == kill_at and not self.outage.killed_in
                if self._turn(agent, kill):
                    advance()
                    gap = self._gap(agent)
                else:
                    gap = OUTAGE_SECONDS / 4
                if agent.turn is not None:
                    heapq.heappush(due, (time.monotonic() + gap, agent.name, agent))
        for timer in self._timers:
            timer.join()

    def _turn(self, agent: Agent, kill: bool) -> bool:
        """Whether it went well; else it is to be done again."""
        turn, prompt = agent.script[len(agent.answers)], agent.prompt()
        first = FirstToken(self._kill if kill else None)
        turns_before = _turns_by_tier(self._router)
        started = time.perf_counter()
        if kill:
            self.outage.killed_in = f"turn {len(agent.answers) + 1} of {agent.name}"
        try:
            with self._router.session(agent.name) as cache:
                crop_for(prompt, agent.ids, cache)
                made = answer(self._model, prompt, turn.answer_tokens, cache, first)
                cache.end_round()
        except OSError as error:
            if not self.outage.killed_in:
                raise
            self.outage.errors.append(f"{agent.name}: {error}")
            milliseconds = (time.perf_counter() - started) * 1000
            self.outage.slowest_error_ms = max(self.outage.slowest_error_ms, milliseconds)
            return False
        agent.answered(prompt, made)
        tiers = [
            tier
            for tier, count in _turns_by_tier(self._router).items()
            if count > turns_before[tier]
        ]
        milliseconds = (first.at - started) * 1000
        self.played.append(Played(agent.name, tiers[0] if tiers else None, milliseconds))
        return True

    def _gap(self, agent: Agent) -> float:
        """Tell the router of a tool that runs now; seconds until the next turn is due."""
        following = agent.turn
        if following is None:
            return 0.0
        if following.kind == "tool":
            with suppress(OSError):
                self._router.pause(agent.name)
            # As in an agent's process: the tool ends while another agent's turn may run.
            timer = threading.Timer(following.gap_seconds, self._tool_ended, [agent.name])
            timer.start()
            self._timers.append(timer)
        return following.gap_seconds

    def _tool_ended(self, name: str) -> None:
        with suppress(OSError):
            self._router.resume(name)

    def _kill(self) -> None:
        """The daemon dies now and is mounted again after a while."""
        self._mount.kill()
        timer = threading.Timer(OUTAGE_SECONDS, self._mount.mount)
        timer.start()
        self._timers.append(timer)


def metrics_of(router: KVRouter) -> dict[str, float]:
    """Values by name and labels, as they are written."""
    return {
        "".join([sample.name, *(f" {value}" for value in sample.labels.values())]): sample.value
        for family in text_string_to_metric_families(router.metrics())
        for sample in family.samples
    }


def _turns_by_tier(router: KVRouter) -> dict[Tier, float]:
    values = metrics_of(router)
    tiers: tuple[Tier, ...] = ("hot", "warm", "cold")
    return {tier: values[f"kv_turns_total {tier}"] for tier in tiers}


# What comes out


@dataclass(frozen=True)
class Row:
    """Turns by the slowest tier that held part of their session."""

    found: str
    turns: int
    mib_found: float | None
    first_token_ms_median: float | None
    first_token_ms_worst: float | None


@dataclass(frozen=True)
class Report:
    """The whole, as --json writes it. Bytes in MiB."""

    identical_tokens: int
    tokens: int
    rows: list[Row]
    session_mib: float
    hot_budget_mib: float
    warm_mib: float
    hot_hit_rate: float
    brought_in_warm_mib: float
    brought_in_by_mount_mib: float
    written_mib: float
    waited_seconds: float
    evict_ms_mean: float
    daemon_faults: int
    outage: Outage | None

    @property
    def same(self) -> bool:
        """Whether all tokens are those of the run in memory."""
        return self.identical_tokens == self.tokens


def rows_of(played: list[Played], recomputed: list[float], values: dict[str, float]) -> list[Row]:
    """By tier, and what computing anew takes."""
    rows = []
    for tier in ("hot", "warm", "cold"):
        times = [one.first_token_ms for one in played if one.tier == tier]
        found = values[f"kv_found_bytes_total {tier}"] / 2**20
        rows.append(_row(tier, found, times))
    rows.append(_row("new session", None, [one.first_token_ms for one in played if not one.tier]))
    rows.append(_row("recomputed (last turns)", None, [1000 * seconds for seconds in recomputed]))
    return rows


def _row(found: str, mib: float | None, times: list[float]) -> Row:
    return Row(
        found, len(times), mib, median(times) if times else None, max(times) if times else None
    )


def show(report: Report) -> None:
    """The table, and what was moved."""
    table = Table(title="turns by the slowest tier that held part of the session")
    table.add_column("found")
    for heading in ("turns", "KV found, MiB", "first token, median", "worst"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(
            row.found,
            str(row.turns),
            *(
                "-" if value is None else f"{value:.0f}{unit}"
                for value, unit in (
                    (row.mib_found, ""),
                    (row.first_token_ms_median, " ms"),
                    (row.first_token_ms_worst, " ms"),
                )
            ),
        )
    console.print(table)
    console.print(
        f"the longest session {report.session_mib:.1f} MiB, hot budget "
        f"{report.hot_budget_mib:.0f} MiB, warm {report.warm_mib:.0f} MiB"
    )
    console.print(
        f"brought in {report.brought_in_warm_mib:.0f} MiB from warm memory and "
        f"{report.brought_in_by_mount_mib:.0f} MiB through the mount, written "
        f"{report.written_mib:.0f} MiB; forwards waited {report.waited_seconds:.1f} s; "
        f"a move out of hot memory took {report.evict_ms_mean:.1f} ms"
    )
    console.print(f"hot hit rate {report.hot_hit_rate:.2f} of the bytes found")
    if report.outage is not None:
        console.print(
            f"daemon killed in {report.outage.killed_in}: {len(report.outage.errors)} turns "
            f"failed, the slowest after {report.outage.slowest_error_ms:.0f} ms, and were done "
            f"again; the first: {report.outage.errors[0]}",
            markup=False,
        )
    console.print(f"identical tokens: {report.identical_tokens} of {report.tokens}")


def identical(baseline: list[Agent], routed: list[Agent]) -> tuple[int, int]:
    """Equal tokens at equal places, and all tokens, of the answers."""
    pairs = [
        pair
        for one, other in zip(baseline, routed, strict=True)
        for expected, got in zip(one.answers, other.answers, strict=True)
        for pair in zip(expected, got, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def run(directory: Path, options: argparse.Namespace) -> Report:
    """Both runs in `directory`."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    if options.trace is not None:
        scripts = scripts_from(options.trace, options.turns)
    else:
        scripts = drawn_scripts(options.turns)
    scripts = [scaled(script, options.context, options.speed) for script in scripts]
    with console.status("loading the model"):
        model, tokenizer = load_model()
    baseline, routed = (make_agents(scripts, tokenizer, options.speed) for _ in range(2))
    recomputed = play_in_memory(baseline, model)

    layers = model.config.num_hidden_layers
    layer_bytes = whole_slabs(options.context * row_bytes(model))
    session_bytes = layers * layer_bytes
    # And a layer put together for attention, twice: one computes while the other is fetched.
    hot_bytes = HOT_AGENTS * session_bytes + 2 * layer_bytes
    # In warm memory an append takes at least a segment; and it is filled to a level only.
    appends_bytes = options.turns * layers * WARM_SEGMENT_BYTES
    warm_bytes = int(WARM_AGENTS * (session_bytes + appends_bytes) / WARM_FILL)
    pool = HotPool(hot_bytes, SLAB_BYTES)
    profile = directory / "agents.toml"
    profile.write_text(PROFILE.format(hot=20 / options.speed, warm=300 / options.speed))
    with (
        fresh_mount(directory, "--warm", str(warm_bytes), "--profile", str(profile)) as mount,
        KVRouter(mount.point, model, pool=pool, profile=str(profile)) as router,
    ):
        stage = Stage(router, model, mount)
        turns = sum(map(len, scripts))
        stage.play(routed, kill_at=turns // 2 if options.kill else None)
        values = metrics_of(router)
    same, tokens = identical(baseline, routed)
    return Report(
        same,
        tokens,
        rows_of(stage.played, recomputed, values),
        session_bytes / 2**20,
        hot_bytes / 2**20,
        warm_bytes / 2**20,
        hot_hit_rate=values["kv_hot_hit_rate"],
        brought_in_warm_mib=values["kv_moved_bytes_total warm"] / 2**20,
        brought_in_by_mount_mib=values["kv_moved_bytes_total mount"] / 2**20,
        written_mib=values["kv_moved_bytes_total written"] / 2**20,
        waited_seconds=values["kv_wait_seconds_total"],
        evict_ms_mean=values["kv_warm_evict_latency_ms_sum"]
        / max(1.0, values["kv_warm_evict_latency_ms_count"]),
        daemon_faults=int(values["kv_daemon_faults_total"]),
        outage=stage.outage if options.kill else None,
    )


def row_bytes(model: PreTrainedModel) -> int:
    """What one token takes in one layer."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_key_value_heads * head_dim * model.dtype.itemsize)


def whole_slabs(nbytes: int) -> int:
    """Rounded up to slabs."""
    return -(-nbytes // SLAB_BYTES) * SLAB_BYTES


def main() -> int:
    """Exit code 0 if the tokens are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="turns of coding agents: a CSV file")
    parser.add_argument("--turns", type=int, default=6, help="of each agent")
    parser.add_argument("--context", type=int, default=768, help="tokens of a session at its end")
    parser.add_argument("--speed", type=float, default=6.0, help="gaps are divided by it")
    parser.add_argument("--kill", action="store_true", help="SIGKILL the daemon in the middle")
    parser.add_argument("--dir", type=Path, help="put the image and the mountpoint below DIR")
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    options = parser.parse_args()
    # Ends the program as an exception does, so that the mount is cleared.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("agents: terminated"))
    try:
        with work_directory(options.dir, keep=False) as directory:
            report = run(directory, options)
    except (DemoError, OSError) as error:
        console.print(f"agents: {error}", style="red", markup=False, highlight=False)
        return 1
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0 if report.same else 1


if __name__ == "__main__":
    sys.exit(main())

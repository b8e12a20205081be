"""What prediction brings in before it is asked for, on real agents' turns; no bytes are moved.

    python scripts/predict_eval.py --trace agent_turns.csv [--hours 24] [--json FILE]

Each stream of the trace is a session of KVFS. The sessions of the trace start at random within
the hours (seed 1), and the planner of the daemon runs in simulated time: it is told of uses
and hints, brings sessions in over a device of --bandwidth MB/s and sends idle ones down. A turn
is *away* when its session was idle for longer than 5 minutes. Of these the table tells how many
found their session in memory: kept there, or brought in, whole or on its way; and how much of
the waiting for the device that saved. Wrong is what was brought in and not used.

What the planner may know: nothing; the gaps between turns; which sessions are used together;
hints of tools, some seconds before the request; that a user is writing (turn_expected=15).
To compare: longer idle times, which cost memory too.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from simulated_tier import SimulatedTier, drive

from kvfs.tiers.budget import Bandwidth, Budget
from kvfs.tiers.hints import parse
from kvfs.tiers.planner import Planner
from kvfs.tiers.predict import PredictOptions, Predictor

IDLE_SECONDS = 300.0
GROUP = 10
HOT = b'hot_stats={"bytes": 0}'  # with it the planner learns how large the session is


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds from the start of the session; `tokens` of the prompt are read, so many more
    are there at its end."""

    begins: float
    ends: float
    tokens: int
    tokens_after: int
    kind: str
    calls_tool: bool


Session = list[list[Turn]]  # its streams


@dataclass(frozen=True, slots=True)
class Variant:
    """What the planner knows."""

    name: str
    idle_seconds: float = IDLE_SECONDS
    least_sureness: float = 2.0  # more than sure: no guess
    tool_seconds: float | None = None  # from a tool's end to the request
    writing_seconds: float | None = None  # from a user's first letter to the request


@dataclass(slots=True)
class Result:
    """Turns, bytes, and byte-seconds of warm memory. `brought`: by a guess."""

    name: str
    turns: int = 0
    away: int = 0
    kept: int = 0
    whole: int = 0
    partly: int = 0
    wait_seconds: float = 0.0
    saved_seconds: float = 0.0
    bring_ins: int = 0
    wrong: int = 0
    bytes_brought: int = 0
    bytes_wasted: int = 0
    warm_byte_seconds: float = 0.0
    right_by_reason: dict[str, int] = field(default_factory=dict)
    wrong_by_reason: dict[str, int] = field(default_factory=dict)


def read_sessions(path: Path) -> list[Session]:
    """In the order of the file."""
    sessions: dict[str, dict[str, list[Turn]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            begins, prompt = float(row["t_s"]), int(row["in_tok"])
            turn = Turn(
                begins,
                begins + float(row["api_s"] or 0),
                prompt,
                prompt + int(row["out_tok"] or 0),
                row["kind"],
                row["stop"] == "tool_use",
            )
            sessions.setdefault(row["session"], {}).setdefault(row["stream"], []).append(turn)
    return [list(streams.values()) for streams in sessions.values()]


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """`what`: begins, ends, or a hint."""

    time: float
    number: int
    session: int
    what: str
    tokens: int = 0


def events_of(sessions: list[Session], hours: float, variant: Variant) -> list[Event]:
    """Of all streams, which are numbered."""
    starts = np.random.default_rng(1).uniform(0, hours * 3600, len(sessions))
    found: list[Event] = []
    stream = 0
    for start, streams in zip(starts, sessions, strict=True):
        for turns in streams:
            stream += 1
            for time, what, tokens in _stream_events(turns, variant):
                found.append(Event(start + time, len(found), stream, what, tokens))
    return sorted(found)


def _stream_events(turns: list[Turn], variant: Variant) -> Iterator[tuple[float, str, int]]:
    ended = -math.inf
    for number, turn in enumerate(turns):
        if variant.tool_seconds is not None and turn.kind == "tool":
            yield max(turn.begins - variant.tool_seconds, ended), "tool_done", 0
        if variant.writing_seconds is not None and turn.kind == "user":
            begun = max(turn.begins - variant.writing_seconds, ended)
            yield begun, f"turn_expected={turn.begins - begun}", 0
        yield turn.begins, "begins", turn.tokens
        # The file's times are whole seconds: a request may seem to begin before the last ended.
        following = turns[number + 1].begins if number + 1 < len(turns) else turn.ends
        ended = max(turn.begins, min(turn.ends, following))
        yield ended, "ends", turn.tokens_after
        if variant.tool_seconds is not None and turn.calls_tool:
            yield ended, "tool_started", 0


def simulate(
    sessions: list[Session], variant: Variant, hours: float, token_bytes: int, bandwidth: float
) -> Result:
    tier = SimulatedTier(bandwidth)
    options = PredictOptions(variant.idle_seconds, least_sureness=variant.least_sureness)
    planner = Planner(
        tier, Predictor(options), Budget(Bandwidth(bandwidth)), GROUP, drive, lambda: False,
        lambda: tier.demanded, lambda: tier.now,
    )  # fmt: skip
    result = Result(variant.name)
    last_use: dict[int, float] = {}
    tick = 0.0
    for event in events_of(sessions, hours, variant):
        while tick < event.time:
            tier.goes_on(tick)
            planner.tick(tick)
            tick += 1.0
        tier.goes_on(event.time)
        match event.what:
            case "begins":
                _count(result, tier, event, event.time - last_use.get(event.session, event.time))
                tier.demand(event.session, event.tokens * token_bytes)
                planner.saw_use(event.session, event.time)
            case "ends":
                tier.grew(event.session, event.tokens * token_bytes)
                planner.saw_use(event.session, event.time)
                planner.hint(event.session, parse(HOT), event.time, tier.size(event.session))
                last_use[event.session] = event.time
            case hint:
                planner.hint(
                    event.session, parse(hint.encode()), event.time, tier.size(event.session)
                )
    while tier.up and tick < event.time + 2 * variant.idle_seconds:
        tier.goes_on(tick)
        planner.tick(tick)
        tick += 1.0
    outcomes = planner.outcomes
    result.warm_byte_seconds = tier.byte_seconds
    result.bytes_brought, result.bytes_wasted = (
        outcomes.right_bytes + outcomes.wrong_bytes,
        outcomes.wrong_bytes,
    )
    result.right_by_reason = {reason.value: n for reason, n in outcomes.right.items() if n}
    result.wrong_by_reason = {reason.value: n for reason, n in outcomes.wrong.items() if n}
    result.wrong = sum(outcomes.wrong.values())
    result.bring_ins = result.wrong + sum(outcomes.right.values())
    return result


def _count(result: Result, tier: SimulatedTier, event: Event, gap: float) -> None:
    result.turns += 1
    if gap <= IDLE_SECONDS:
        return
    result.away += 1
    wait = tier.seconds_to_read(event.session)
    result.wait_seconds += wait
    up = tier.up.get(event.session)
    if up is None:
        return
    result.saved_seconds += wait - min(wait, max(0.0, up.whole_at - event.time))
    if not up.by_guess:
        result.kept += 1
    elif up.whole_at <= event.time:
        result.whole += 1
    else:
        result.partly += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=24, help="sessions start within these")
    parser.add_argument("--token-bytes", type=int, default=131072, help="128 KiB: an 8B model")
    parser.add_argument("--bandwidth", type=float, default=3000, metavar="MB/s")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    sessions = read_sessions(arguments.trace)
    results = [
        simulate(
            sessions, variant, arguments.hours, arguments.token_bytes, arguments.bandwidth * 1e6
        )
        for variant in VARIANTS
    ]
    report(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2))


VARIANTS = [
    Variant("nothing"),
    Variant("nothing, idle time 330 s", idle_seconds=330),
    Variant("nothing, idle time 420 s", idle_seconds=420),
    Variant("nothing, idle time 600 s", idle_seconds=600),
    Variant("gaps and together, 15 % sure", least_sureness=0.15),
    Variant("gaps and together, 25 % sure", least_sureness=0.25),
    Variant("gaps and together, 50 % sure", least_sureness=0.5),
    Variant("tools, 0.2 s before", least_sureness=0.9, tool_seconds=0.2),
    Variant("tools, 2 s before", least_sureness=0.9, tool_seconds=2),
    Variant("tools 0.2 s, writing 15 s", 300, 0.9, 0.2, 15),
    Variant("all of it, 50 % sure", 300, 0.5, 0.2, 15),
    Variant("all of it, idle time 330 s", 330, 0.5, 0.2, 15),
]


def report(results: list[Result]) -> None:
    first = results[0]
    table = Table(title=f"{first.turns} turns, {first.away} of them away", box=None)
    columns = (
        "known", "kept %", "whole %", "on its way %", "wait saved %", "wrong %", "GB brought",
        "GB wasted", "warm GB·h",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "known" else "right")
    for result in results:
        away = max(result.away, 1)
        table.add_row(
            result.name,
            f"{100 * result.kept / away:.1f}",
            f"{100 * result.whole / away:.1f}",
            f"{100 * result.partly / away:.1f}",
            f"{100 * result.saved_seconds / max(result.wait_seconds, 1e-9):.1f}",
            f"{100 * result.wrong / max(result.bring_ins, 1):.0f}",
            f"{result.bytes_brought / 1e9:.0f}",
            f"{result.bytes_wasted / 1e9:.0f}",
            f"{result.warm_byte_seconds / 3.6e12:.0f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

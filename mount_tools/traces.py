"""Traces of real use, read into requests of 512-token blocks.

Two forms. Request lists: a JSON object a line with `hash_ids`, one id a block, equal for equal
prefixes, and maybe `timestamp` in ms (Mooncake's). Turns: CSV with `session`, `stream`,
`t_s` from the session's start, `in_tok`, `prefix_match_tok` (tokens shared with the stream's
previous request), and maybe `stop` and `api_s`, from which hints are made. Sessions have no
common clock: they start at random within a window.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvfs.engine.policy import Hint
from kvfs.tiers.replay import HintGiven, Ids, Trace
from mount_tools.common import CommandError

BLOCK_TOKENS = 512
_PLACEMENT_SEED = 1
_STOPS = {"tool_use": Hint.TOOL_RUNNING, "end_turn": Hint.WAITING}
_TURN_COLUMNS = ("session", "stream", "t_s", "in_tok", "prefix_match_tok")


def read_trace(path: Path, window_hours: float) -> Trace:
    """Either form. Raises CommandError for what is neither."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            trace = _read_requests(path, file) if is_json else _read_turns(path, file, window_hours)
    except UnicodeDecodeError:
        raise CommandError(f"{path} is no trace: it is not text") from None
    except csv.Error as failure:
        raise CommandError(f"{path} is no trace: {failure}") from None
    if not trace.accesses:
        raise CommandError(f"{path} has no request of a whole block of {BLOCK_TOKENS} tokens")
    return trace


def _wrong(path: Path, line: int, what: str) -> CommandError:
    return CommandError(f"{path}, line {line}: {what}")


# -- request lists


def _read_requests(path: Path, lines: Iterator[str]) -> Trace:
    timed: list[tuple[float, Ids]] = []
    known: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            time_s, hash_ids = _parse_request(path, number, line)
            blocks = [known.setdefault(id_, len(known)) for id_ in dict.fromkeys(hash_ids)]
            timed.append((time_s, np.array(blocks[::-1], np.int32)))
    timed.sort(key=lambda request: request[0])
    return Trace([time_s for time_s, _ in timed], [blocks for _, blocks in timed], len(known))


def _parse_request(path: Path, number: int, line: str) -> tuple[float, list[int]]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise _wrong(path, number, "not a JSON object") from None
    hash_ids = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(hash_ids, list) or not all(type(id_) is int for id_ in hash_ids):
        raise _wrong(path, number, "hash_ids is not a list of whole numbers")
    # Without times the requests come one a second.
    time_ms = request.get("timestamp", number * 1000)
    if type(time_ms) not in (int, float) or not math.isfinite(time_ms):
        raise _wrong(path, number, "timestamp is not a number of ms")
    return time_ms / 1000, hash_ids


# -- turns


@dataclass(frozen=True, slots=True)
class _Turn:
    """`time_s` and `end_s` count from the start of the session."""

    session: str
    stream: str
    time_s: float
    end_s: float
    blocks: int
    shared_blocks: int
    stop: str


def _read_turns(path: Path, lines: Iterator[str], window_hours: float) -> Trace:
    turns = list(_parse_turns(path, lines))
    starts_s = _starts(turns, window_hours)
    prompts, blocks = _prompts(turns)
    times_s = [starts_s[turn.session] + turn.time_s for turn in turns]
    order = sorted(range(len(turns)), key=times_s.__getitem__)
    place = {number: place for place, number in enumerate(order)}
    hints = [
        HintGiven(starts_s[turns[number].session] + turns[number].end_s, place[number], hint)
        for number, hint in _hints(turns)
    ]
    return Trace(
        [times_s[number] for number in order],
        [prompts[number][::-1] for number in order],
        blocks,
        sorted(hints, key=lambda given: given.time_s),
    )


def _parse_turns(path: Path, lines: Iterator[str]) -> Iterator[_Turn]:
    reader = csv.DictReader(lines)
    missing = [name for name in _TURN_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise CommandError(
            f"{path} is no trace: neither lines of JSON with hash_ids "
            f"nor CSV with the columns {', '.join(_TURN_COLUMNS)}"
        )
    for row in reader:
        try:
            yield _parse_turn(row)
        except (ValueError, TypeError, OverflowError):
            raise _wrong(path, reader.line_num, "a number is missing, negative or none") from None


def _parse_turn(row: Mapping[str, Any]) -> _Turn:
    time_s, api_s = float(row["t_s"]), float(row.get("api_s") or 0)
    tokens, shared_tokens = int(row["in_tok"]), int(row["prefix_match_tok"])
    if not (math.isfinite(time_s + api_s) and min(time_s, api_s, tokens, shared_tokens) >= 0):
        raise ValueError(row)
    return _Turn(
        row["session"], row["stream"], time_s, time_s + api_s,
        tokens // BLOCK_TOKENS, shared_tokens // BLOCK_TOKENS, row.get("stop") or "",
    )  # fmt: skip


def _starts(turns: list[_Turn], window_hours: float) -> dict[str, float]:
    sessions = list(dict.fromkeys(turn.session for turn in turns))
    generator = np.random.default_rng(_PLACEMENT_SEED)
    starts_s = generator.uniform(0, window_hours * 3600, len(sessions))
    return dict(zip(sessions, starts_s.tolist(), strict=True))


def _prompts(turns: list[_Turn]) -> tuple[list[Ids], int]:
    """The blocks of each prompt, the first of the prompt first, and how many there are. A
    stream keeps those it shares with its previous request; the others are new."""
    prompts: list[Ids] = []
    streams: dict[tuple[str, str], Ids] = {}
    blocks = 0
    for turn in turns:
        stream = (turn.session, turn.stream)
        kept = streams.get(stream, np.zeros(0, np.int32))[: min(turn.shared_blocks, turn.blocks)]
        new = turn.blocks - kept.size
        streams[stream] = np.concatenate([kept, np.arange(blocks, blocks + new, dtype=np.int32)])
        prompts.append(streams[stream])
        blocks += new
    return prompts, blocks


def _hints(turns: list[_Turn]) -> Iterator[tuple[int, Hint]]:
    """Why each turn ended, unless the stream's next one came before its end; then that a stream
    is finished."""
    latest: dict[tuple[str, str], int] = {}
    for number, turn in enumerate(turns):
        before = latest.get((turn.session, turn.stream))
        if before is not None and turns[before].end_s < turn.time_s:
            yield from _stop_hint(turns, before)
        latest[turn.session, turn.stream] = number
    for number in latest.values():
        yield from _stop_hint(turns, number)
        yield number, Hint.FINISHED


def _stop_hint(turns: list[_Turn], number: int) -> Iterator[tuple[int, Hint]]:
    hint = _STOPS.get(turns[number].stop)
    if hint is not None:
        yield number, hint

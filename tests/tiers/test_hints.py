"""Hints: what is one, and what is none."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers.hints import HotStats, ToolDone, ToolStarted, TurnExpected, parse


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"tool_started", ToolStarted()),
        (b"tool_done\n", ToolDone()),
        (b"turn_expected=0", TurnExpected(0.0)),
        (b"turn_expected=12.5", TurnExpected(12.5)),
        (b'hot_stats={"bytes": 0}', HotStats(0)),
        (b'hot_stats={"bytes": 7, "hits": 5, "misses": 3}', HotStats(7, 5, 3)),
    ],
)
def test_a_hint(value: bytes, expected: object) -> None:
    assert parse(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "a hint is tool_started, "),
        (b"tool_began", "a hint is tool_started, "),
        (b"tool_done=1", "a hint is tool_started, "),
        (b"turn_expected", "a hint is tool_started, "),
        (b"turn_expected=", "turn_expected= is no number of seconds"),
        (b"turn_expected=soon", "turn_expected=soon is no number of seconds"),
        (b"turn_expected=-1", "turn_expected is from 0 to 2592000 seconds"),
        (b"turn_expected=nan", "turn_expected is from 0 to 2592000 seconds"),
        (b"turn_expected=inf", "turn_expected is from 0 to 2592000 seconds"),
        (b"hot_stats=", "hot_stats is no JSON"),
        (b"hot_stats=" + b"[" * 4000, "hot_stats is no JSON"),
        (b"hot_stats=[1]", "hot_stats is an object"),
        (b"hot_stats={}", "hot_stats is an object"),
        (b'hot_stats={"bytes": 1, "blocks": 2}', "hot_stats is an object"),
        (b'hot_stats={"bytes": -1}', "the figures of hot_stats are whole numbers"),
        (b'hot_stats={"bytes": true}', "the figures of hot_stats are whole numbers"),
        (b'hot_stats={"bytes": 1e3}', "the figures of hot_stats are whole numbers"),
        (b"x" * 4097, "a hint has at most 4096 bytes"),
    ],
)
def test_no_hint(value: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse(value)


@given(
    st.binary(max_size=60)
    | st.binary(max_size=40).map(lambda tail: b"turn_expected=" + tail)
    | st.text('{}[]":,0123456789bytesh ', max_size=40).map(lambda t: b"hot_stats=" + t.encode())
)
def test_any_bytes_are_a_hint_or_refused(value: bytes) -> None:
    with suppress(ValueError):
        parse(value)

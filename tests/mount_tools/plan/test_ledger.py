"""What fits, how long it takes, how long it lasts: by hand, and as properties."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.tiers.gittins import GittinsPolicy
from kvfs.tiers.replay import Replay, Trace
from mount_tools.plan.ledger import Tiers, endure, plan_session
from mount_tools.plan.machine import ring_of, weights_of
from mount_tools.plan.model import Layer, Model, plain_model
from mount_tools.plan.workload import measure
from mount_tools.traces import BLOCK_TOKENS, read_trace

MIB = 1024**2
GIB = 1024**3
LLAMA = plain_model(32, 8, 128, "bfloat16")  # 128 KiB a token
NOTHING = Tiers(None, None, None, None, None)
TIERS = Tiers(
    hot=40 * GIB, warm=100 * GIB, cold=1000 * GIB, warm_speed=10 * GIB, cold_speed=2 * GIB
)  # fmt: skip


def test_a_session_of_32768_tokens_takes_4_gib() -> None:
    plan = plan_session(LLAMA, 32768, TIERS, 8192.0)
    assert plan.stored_bytes == plan.needed_bytes == 4 * GIB
    assert plan.fit_hot == 9  # 40 GiB less two layers of 128 MiB
    assert plan.fit_warm == 25
    assert plan.fit_cold == 250
    assert plan.resume_warm_s == pytest.approx(0.4)
    assert plan.resume_cold_s == pytest.approx(2.0)
    assert plan.recompute_s == pytest.approx(4.0)
    assert plan.gain == pytest.approx(2.0)


def test_compression_makes_room_and_reads_less() -> None:
    plan = plan_session(LLAMA, 32768, replace(TIERS, ratio=2.0), None)
    assert plan.fit_cold == 500 and plan.fit_warm == 25
    assert plan.resume_cold_s == pytest.approx(1.0)
    assert plan.recompute_s is None and plan.gain is None


def test_what_is_not_known_is_not_made_up() -> None:
    plan = plan_session(LLAMA, 1000, NOTHING, None)
    assert (plan.fit_hot, plan.fit_warm, plan.fit_cold) == (None, None, None)
    assert (plan.resume_warm_s, plan.resume_cold_s) == (None, None)


def test_a_window_needs_less_hot_memory_and_as_much_of_the_ring() -> None:
    local = Model("", "", "bfloat16", tuple([Layer(2048, 1024)] * 5 + [Layer(2048)]))
    plan = plan_session(local, 100_000, TIERS, None)
    assert plan.stored_bytes == 6 * 100_000 * 4096
    assert plan.needed_bytes == (5 * 1024 + 100_000) * 4096


def test_a_load_by_hand() -> None:
    """8192 tokens a day of 128 KiB are 1 GiB; the ring takes 1000 of these."""
    told = endure(LLAMA, TIERS, 8192, write_amplification=2.0, rated_bytes=3650 * GIB)
    assert told.kv_bytes_a_day == told.stored_bytes_a_day == GIB
    assert told.days_until_reclaim == pytest.approx(1000)
    assert told.days_until_expiry == pytest.approx(700)
    assert told.device_bytes_a_year == pytest.approx(730 * GIB)
    assert told.years == pytest.approx(5)


def test_a_load_without_a_ring_or_a_rating() -> None:
    told = endure(LLAMA, NOTHING, 8192, 1.0, None)
    assert told.days_until_reclaim is None and told.years is None
    assert endure(LLAMA, TIERS, 0, 1.0, 1e12).days_until_reclaim is None


@settings(deadline=None)
@given(
    st.integers(1, 10**6), st.integers(0, 2**45), st.integers(0, 2**45), st.integers(0, 2**50),
    st.floats(0.5, 4),
)  # fmt: skip
def test_no_more_sessions_fit_than_their_bytes_do(
    tokens: int, hot: int, warm: int, cold: int, ratio: float
) -> None:
    plan = plan_session(LLAMA, tokens, Tiers(hot, warm, cold, 1e9, 1e9, ratio), None)
    assert plan.fit_hot is not None and plan.fit_warm is not None and plan.fit_cold is not None
    assert plan.fit_hot * plan.needed_bytes <= hot
    assert plan.fit_warm * plan.stored_bytes <= warm < (plan.fit_warm + 1) * plan.stored_bytes
    assert plan.fit_cold * plan.stored_bytes <= cold * ratio + 1


@pytest.mark.parametrize(
    ("size", "segment_mib"), [(64 * MIB, 1), (512 * MIB, 7), (4 * GIB, 63), (4 * 1024 * GIB, 64)]
)
def test_a_ring_has_the_segments_that_mkfs_gives_it(size: int, segment_mib: int) -> None:
    """Four of them, an eighth of one or 1 MiB at the end of each, and a 16th are held back."""
    segments = (size - MIB) // (segment_mib * MIB)
    usable = segment_mib * MIB - min(MIB, segment_mib * MIB // 8) - 4 * 4096
    assert ring_of(size).size == (segments - 4) * usable * 15 // 16


def test_weights_are_those_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_of(None) == weights_of(tmp_path) == 0
    for name, size in (("model-1.safetensors", 5), ("model-2.safetensors", 7), ("other.txt", 9)):
        (tmp_path / name).write_bytes(bytes(size))
    assert weights_of(tmp_path) == weights_of(tmp_path / "config.json") == 12


# -- a workload


def block_tiers(hot: int, warm: int, cold: int) -> Tiers:
    """Sizes in blocks."""
    size = int(LLAMA.bytes_a_token * BLOCK_TOKENS)
    return Tiers(hot * size, warm * size, cold * size, 10 * GIB, 2 * GIB)


def trace_of(*requests: list[int]) -> Trace:
    blocks = 1 + max(max(request) for request in requests)
    times = [3600.0 * number for number in range(len(requests))]
    return Trace(times, [np.array(request[::-1], np.int32) for request in requests], blocks)


def test_a_workload_by_hand() -> None:
    """Ten blocks, each asked for twice; a ring for all of them, memory for none."""
    trace = trace_of([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    told = measure(trace, LLAMA, block_tiers(0, 0, 10), tokens_a_second=512.0)
    assert (told.requests, told.hours) == (4, 3.0)
    assert (told.asked_tokens, told.kept_tokens) == (20 * 512, 10 * 512)
    assert told.reused_share == 0.5
    assert told.tokens_a_day == pytest.approx(10 * 512 * 8)
    assert told.prompt_p50 == told.prompt_p99 == 5 * 512
    assert (told.hot_share, told.warm_share) == (0.0, 0.0)
    assert (told.cold_share, told.computed_share) == (0.5, 0.5)
    # Ten blocks of 64 MiB at 2 GiB/s instead of ten seconds.
    assert told.saved_s == pytest.approx(10 - 10 * 64 / 2048)


def test_the_fastest_tier_that_holds_it_counts() -> None:
    trace = trace_of([0, 1], [0, 1], [2, 3, 4, 5], [0, 1])
    told = measure(trace, LLAMA, block_tiers(6, 6, 6), None)
    assert told.hot_share == pytest.approx(0.4)
    assert told.warm_share == told.cold_share == 0
    assert told.saved_s is None


def test_a_tier_of_unknown_size_is_left_out() -> None:
    trace = trace_of([0, 1], [0, 1])
    told = measure(trace, LLAMA, replace(block_tiers(0, 2, 0), cold=None, hot=None), None)
    assert told.hot_share is None and told.cold_share is None and told.computed_share is None
    assert told.warm_share == 0.5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True), min_size=2),
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)),
)
def test_shares_are_shares_and_never_more_than_is_used_again(
    requests: list[list[int]], sizes: tuple[int, int, int]
) -> None:
    names = {block: number for number, block in enumerate(sorted({b for r in requests for b in r}))}
    trace = trace_of(*([names[block] for block in request] for request in requests))
    told = measure(trace, LLAMA, block_tiers(*sizes), 1000.0)
    shares = [told.hot_share, told.warm_share, told.cold_share, told.computed_share]
    assert all(share is not None and -1e-9 <= share <= 1 + 1e-9 for share in shares)
    assert sum(share or 0.0 for share in shares) == pytest.approx(1)
    assert (told.computed_share or 0.0) >= 1 - told.reused_share - 1e-9


def test_a_request_list_is_replayed_with_the_default_policy(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    random = np.random.default_rng(1)
    lines = [
        {"timestamp": 1000 * n, "hash_ids": [0, *random.integers(1, 60, 8).tolist()]}
        for n in range(200)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(file, 24.0)
    told = measure(trace, LLAMA, block_tiers(0, 0, 20), None)
    assert told.cold_share == Replay(trace, GittinsPolicy(), 20).hit_ratio()
    assert 0 < (told.cold_share or 0) < told.reused_share

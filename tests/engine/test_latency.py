"""Quantiles of what was seen, against sorting it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvfs.engine.latency import Latencies


@given(st.lists(st.floats(1e-5, 30), min_size=1), st.sampled_from([0.5, 0.99, 1.0]))
def test_a_quantile_is_at_most_a_bucket_above_what_sorting_says(
    seconds: list[float], share: float
) -> None:
    latencies = Latencies()
    for one in seconds:
        latencies.saw(one)
    exact = sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
    assert exact <= latencies.quantile(share) <= exact * 2**0.25 * 1.0001
    assert math.isclose(latencies.total, sum(seconds))


def test_nothing_seen_is_zero_and_what_took_too_long_counts() -> None:
    latencies = Latencies()
    assert latencies.quantile(0.99) == 0.0
    latencies.saw(1000.0)
    assert latencies.quantile(0.99) > 30

"""Counts of holders: what a dict would say, whether they lie in the dict or in the arrays."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvfs.engine import pins
from kvfs.engine.pins import Pins


@pytest.mark.parametrize("recent_min", [0, 10, 1000])
def test_counts_are_those_of_a_dict(recent_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_RECENT_MIN", recent_min)
    random, held, expected = Random(recent_min), Pins(), Counter[int]()
    for _ in range(5000):
        ino = random.choice([1, 1 << 43, (1 << 63) - 2]) ^ random.randrange(200) << 1
        if random.random() < 0.6:
            held.add(ino)
            expected[ino] += 1
        else:
            count = random.randrange(1, 4)
            assert held.remove(ino, count) == (expected[ino] > count)
            expected[ino] = max(0, expected[ino] - count)
        assert (ino in held) == (expected[ino] > 0)
    assert len(held) == sum(count > 0 for count in expected.values())


def test_few_bytes_for_each() -> None:
    held = Pins()
    for ino in range(100_000):
        held.add(ino)
    in_arrays = held._inos.nbytes + held._counts.nbytes
    assert in_arrays <= 17 * len(held)
    assert len(held._recent) <= 4096

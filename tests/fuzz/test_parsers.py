"""Each parser of bytes from outside, for a moment: `make fuzz` takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.guard import memory_bounded
from tests.fuzz.targets import TARGETS, Target


@pytest.fixture(scope="module", autouse=True)
def bounded() -> Iterator[None]:
    with memory_bounded():
        yield


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_parser_gives_a_value_or_the_error_that_it_says(target: Target) -> None:
    @settings(
        max_examples=max(3, min(50, target.share // 500)), database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.randoms(use_true_random=False))
    def tried(random: Random) -> None:
        data = target.make(random)
        target.run(data)

    tried()

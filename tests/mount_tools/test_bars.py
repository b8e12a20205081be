"""Bars and rows of characters, against what they should stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mount_tools.bars import Spread, bar, column, columns, heat_share


@given(share=st.floats(-1, 2), width=st.integers(0, 40))
def test_a_bar_is_as_wide_as_it_may_be_and_never_falls(share: float, width: int) -> None:
    assert len(bar(share, width)) == width
    filled = len(bar(share, width).rstrip())
    assert filled <= len(bar(share + 0.1, width).rstrip())
    assert abs(filled - width * min(max(share, 0), 1)) <= 1


def test_columns_show_what_is_more_than_nothing() -> None:
    assert columns([0, 0.001, 0.5, 1]) == " ▁▄█"
    assert columns([0, 0]) == "  "
    assert columns([]) == ""
    assert (column(0), column(1e-9), column(1)) == (" ", "▁", "█")


@given(values=st.lists(st.integers(0, 100), min_size=1, max_size=60), cells=st.integers(1, 90))
def test_each_character_is_the_mean_of_what_it_stands_for(values: list[int], cells: int) -> None:
    count = len(values)
    spread = Spread(count, cells)
    expected = [
        np.mean(
            values[at * count // cells : max((at + 1) * count // cells, at * count // cells + 1)]
        )
        for at in range(cells)
    ]
    assert spread.means(np.array(values, float)) == pytest.approx(expected)


@given(count=st.integers(1, 60), cells=st.integers(1, 90))
def test_each_thing_has_a_character_that_stands_for_it(count: int, cells: int) -> None:
    spread = Spread(count, cells)
    for number in range(count):
        alone = np.zeros(count)
        alone[number] = 1
        means = spread.means(alone)
        assert means[spread.cell_of(number)] > 0
        assert not means[: spread.cell_of(number)].any()


def test_heat_is_shown_by_its_logarithm() -> None:
    assert heat_share(4, 4) == 1
    assert heat_share(0.4, 4) == pytest.approx(2 / 3)
    assert heat_share(1e-6, 4) == heat_share(0, 4) == heat_share(0, 0) == 0

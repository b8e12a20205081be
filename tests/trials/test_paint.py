"""A pattern tells whose bytes are where: what is another's, old, or elsewhere is seen."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.trials.paint import LINE, Lines, Painting, Stroke, difference, paint

MINE, OTHERS = 0x1234, 0x5678


@given(start=st.integers(0, 5000), cuts=st.lists(st.integers(0, 3000), max_size=5))
def test_parts_of_a_pattern_are_those_of_the_whole(start: int, cuts: list[int]) -> None:
    places = sorted({start, *(start + cut for cut in cuts)})
    parts = b"".join(paint(MINE, 7, begin, end) for begin, end in pairwise(places))
    assert parts == paint(MINE, 7, places[0], places[-1])


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("another's", paint(OTHERS, 1, 2 * LINE, 3 * LINE)),
        ("from elsewhere", paint(MINE, 1, 3 * LINE, 4 * LINE)),
        ("torn", paint(MINE, 1, 2 * LINE, 3 * LINE)[:32] + paint(MINE, 2, 160, 192)),
        ("of nobody", b"x" * LINE),
    ],
)
def test_a_line_that_is_not_the_files_is_seen(what: str, line: bytes) -> None:
    data = bytearray(paint(MINE, 1, 0, 5 * LINE))
    assert not len(Lines.of(data, 0).wrong([MINE]))
    data[2 * LINE : 3 * LINE] = line
    assert Lines.of(data, 0).wrong([MINE]).tolist() == [2], what


def test_zeros_are_right_where_there_may_be_holes() -> None:
    lines = Lines.of(bytes(3 * LINE), 0)
    assert not len(lines.wrong([MINE]))
    assert lines.wrong([MINE], holes=False).tolist() == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200), st.booleans()), max_size=12))
def test_a_painting_is_what_a_file_would_be(steps: list[tuple[int, int, bool]]) -> None:
    painting, model = Painting(), bytearray()
    for version, (start, length, is_cut) in enumerate(steps):
        if is_cut:
            painting = painting.cut(start)
            model = model[:start] + bytes(max(start - len(model), 0))
        else:
            stroke = Stroke(MINE, version, start, start + length)
            painting = painting.with_stroke(stroke)
            model += bytes(max(stroke.end - len(model), 0))
            model[start : stroke.end] = stroke.data
    assert painting.render() == model


def test_an_old_byte_is_told_from_a_new_one() -> None:
    old, new = paint(MINE, 1, 0, 4 * LINE), paint(MINE, 2, 0, 4 * LINE)
    told = difference(new[:LINE] + old[LINE:], new)
    assert told is not None and "version 1" in told and "version 2" in told

"""Intervals against an array that holds one cell for each byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvfs.engine.intervals import Intervals, Run

SIZE = 60

# (operation, start, length): the value of a run is (its number, the byte it begins with).
RANGES = st.tuples(
    st.sampled_from(["insert", "punch"]), st.integers(0, SIZE - 1), st.integers(1, 20)
)
Value = tuple[int, int]
Cells = list[Value | None]


def cut(value: Value, start: int, _end: int) -> Value:
    return value[0], value[1] + start


def cells_of(intervals: Intervals[Value]) -> Cells:
    cells: Cells = [None] * (SIZE + 20)
    for run in intervals:
        assert run.start < run.end, "an empty run"
        for at in range(run.start, run.end):
            assert cells[at] is None, "runs overlap"
            cells[at] = (run.value[0], run.value[1] + at - run.start)
    return cells


def changed(
    intervals: Intervals[Value], cells: Cells, change: tuple[str, int, int], n: int
) -> None:
    """Do it to both; what it says went and came must be the difference."""
    what, start, length = change
    before = set(intervals)
    if what == "insert":
        removed, added = intervals.insert(start, start + length, (n, 0))
    else:
        removed, added = intervals.punch(start, start + length)
    for at in range(start, start + length):
        cells[at] = (n, at - start) if what == "insert" else None
    assert set(removed) <= before
    assert before - set(removed) | set(added) == set(intervals)


@given(st.lists(RANGES, max_size=30), st.integers(0, SIZE), st.integers(0, 30))
def test_runs_are_what_an_array_would_hold(
    changes: list[tuple[str, int, int]], start: int, length: int
) -> None:
    intervals: Intervals[Value] = Intervals(cut)
    cells: Cells = [None] * (SIZE + 20)
    for number, change in enumerate(changes):
        changed(intervals, cells, change, number)
        assert cells_of(intervals) == cells
        assert list(intervals) == sorted(intervals, key=lambda run: run.start)
        assert intervals.end == max((i + 1 for i, cell in enumerate(cells) if cell), default=0)
        assert len(intervals) == len(list(intervals))
    window: Cells = [None] * len(cells)
    for run in intervals.overlapping(start, start + length):
        assert start <= run.start < run.end <= start + length
        for at in range(run.start, run.end):
            window[at] = (run.value[0], run.value[1] + at - run.start)
    end = min(start + length, len(cells))
    assert window[start:end] == cells[start:end]
    assert all(cell is None for cell in window[:start] + window[end:])


def test_a_punch_in_the_middle_leaves_both_ends() -> None:
    intervals: Intervals[Value] = Intervals(cut)
    intervals.insert(10, 20, (1, 0))
    removed, left = intervals.punch(13, 15)
    assert removed == [Run(10, 20, (1, 0))]
    assert left == [Run(10, 13, (1, 0)), Run(15, 20, (1, 5))]


def test_a_run_that_only_touches_is_left_alone() -> None:
    intervals: Intervals[Value] = Intervals(cut)
    intervals.insert(10, 20, (1, 0))
    assert intervals.punch(0, 10) == ([], [])
    assert intervals.punch(20, 30) == ([], [])
    assert list(intervals.overlapping(0, 10)) == []
    assert list(intervals.overlapping(20, 30)) == []

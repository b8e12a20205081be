"""Runs of tokens: sorted, disjoint, not empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Ranges = list[tuple[int, int]]
"""`(first, last + 1)` each."""


def total(ranges: Ranges) -> int:
    """How many tokens they hold."""
    return sum(end - first for first, end in ranges)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same tokens, sorted, with what touches joined and what is empty left out."""
    joined: Ranges = []
    for first, end in sorted(one for one in ranges if one[0] < one[1]):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


def without(ranges: Ranges, length: int) -> Ranges:
    """The tokens of 0..length-1 that are in none of them."""
    edges = [0, *(edge for one in ranges for edge in one), length]
    return [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2) if edges[i] < edges[i + 1]]


def after(ranges: Ranges, count: int) -> Ranges:
    """All but their first `count` tokens."""
    rest: Ranges = []
    for first, end in ranges:
        skipped = min(count, end - first)
        count -= skipped
        if first + skipped < end:
            rest.append((first + skipped, end))
    return rest


def runs(numbers: Sequence[int]) -> Ranges:
    """Rising numbers as runs of neighbours."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return [(numbers[0], numbers[-1] + 1)]
    return union((number, number + 1) for number in numbers)


def placed(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Each range with the place of its first token when they stand one behind the other."""
    at = 0
    for first, end in ranges:
        yield at, first, end
        at += end - first

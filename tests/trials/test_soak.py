"""What the soak says of a daemon that grows, and of one that does not."""

from __future__ import annotations

import pytest

from scripts.soak import Report, Sample, growth_faults
from scripts.trials.ring import MIB


def report(memory: list[int], descriptors: list[int]) -> Report:
    """A sample each ten seconds; memory in MiB."""
    rows = zip(memory, descriptors, strict=True)
    samples = [
        Sample(10.0 * number, used * MIB, 100 * MIB, opened, 13)
        for number, (used, opened) in enumerate(rows)
    ]
    return Report(samples)


@pytest.mark.parametrize(
    ("memory", "descriptors", "told"),
    [
        ([200] * 60, [12] * 60, []),
        ([10 * min(number, 20) for number in range(60)], [12] * 60, []),
        ([200 + 30 * (number % 2) for number in range(60)], [11, 13] * 30, []),
        (list(range(100, 220, 2)), [12] * 60, ["anonymous memory grew by 58 MiB"]),
        ([200] * 60, list(range(60)), ["descriptors grew by 29"]),
    ],
)  # fmt: skip
def test_what_grows_is_told_from_what_does_not(
    memory: list[int], descriptors: list[int], told: list[str]
) -> None:
    faults = growth_faults(report(memory, descriptors))
    assert [fault.removesuffix(" in the second half") for fault in faults] == told

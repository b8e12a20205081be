"""The device's writes cut everywhere (scripts/crash.py): each rest is a state that may be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.cuts import check_cut, cuts
from tests.crash.history import History
from tests.support.devices import Flushed, Written

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash.py"


@contextmanager
def recorded(seed: int, writes: int) -> Iterator[History]:
    history = History(seed)
    try:
        history.work(writes)
        yield history
    finally:
        history.teardown()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2], ids=["plain", "encrypted"])
def test_each_cut_leaves_a_prefix_with_all_that_was_confirmed(fuse: None, seed: int) -> None:
    """Some cuts of a history that writes its ring over several times."""
    few = ["--cuts", "100", "--every", "13", "--mounts", "1", "--seed", str(seed)]
    result = subprocess.run(
        [sys.executable, SCRIPT, *few], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "100 cuts, 1 of them through a mount" in result.stdout
    assert "none failed" in result.stdout


def test_a_seed_and_a_number_give_the_same_cut_again() -> None:
    """Also where the history is recorded for that cut alone."""

    def cut_at(number: int, writes: int) -> tuple[object, ...]:
        with recorded(5, writes) as history:
            (cut,) = cuts(history, 5, range(number, number + 1))
            fate, _ = cut.happens()
            states = [state.view() for state in cut.after_power_cut]
            return fate, cut.moment, cut.begun.address, len(cut.begun.data), states

    assert cut_at(201, 101) == cut_at(201, 130)


def test_a_device_that_flushes_nothing_is_found_out() -> None:
    """What is checked can fail: here what was confirmed is lost."""
    with recorded(2, 80) as history:
        for life in history.lives_of_devices:
            life.device.events[:] = [e for e in life.device.events if not isinstance(e, Flushed)]
        faults = 0
        for cut in cuts(history, 2, range(40, 160, 3)):
            try:
                check_cut(history, cut)
            except Exception:
                faults += 1
        assert faults > 5


def test_each_write_is_cut_at_both_borders_and_inside() -> None:
    with recorded(3, 30) as history:
        writes = [
            event
            for life in history.lives_of_devices
            for event in life.device.events
            if isinstance(event, Written)
        ]
        begun = [len(cut.begun.data) for cut in cuts(history, 3, range(3 * len(writes)))]
    for write, (before, inside, behind) in zip(
        writes, zip(begun[::3], begun[1::3], begun[2::3], strict=True), strict=True
    ):
        assert (before, behind) == (0, len(write.data)) and 0 < inside < behind

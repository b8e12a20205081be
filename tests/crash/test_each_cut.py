"""One short history, cut at each of its moments, with each write lost or torn by turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.machine import CrashMachine
from tests.support.devices import (
    SECTOR,
    Flushed,
    Survival,
    Written,
    everything_survives,
    nothing_survives,
)


@pytest.fixture
def machine() -> Iterator[CrashMachine]:
    machine = CrashMachine()
    machine.begins(segments=12, batch=256 * 1024)
    yield machine
    machine.teardown()


def short_history(machine: CrashMachine) -> None:
    """Something of everything: overwrites, names, a unit over several segments, sync,
    checkpoint, the end of a mount and a kill, and the begin of the next."""
    machine.append([0, 1], 6000, 3)
    machine.make_durable("sync", 0)
    machine.create(0, b"n" * 255, "file", b"-")
    machine.rename(0, 0, b"renamed", "replace", 0)
    machine.write(0, 4096, 5000, 7)
    machine.time_passes(5, 0)
    machine.change_attributes(0, (b"user.large", b"v" * 9000))
    machine.write(1, 0, 300_000, 3)
    machine.make_durable("checkpoint", 0)
    machine.fill(0, 1, 5)
    machine.time_passes(5, 0)
    machine.remove(0, 0)
    machine.time_passes(30, 0)
    machine.append([0, 1, 2], 4096, 9)
    machine.close_and_open(0)
    machine.write(0, 100, 20_000, 11)
    machine.make_durable("checkpoint", 0)
    machine.append([0, 1], 70_000, 5)
    machine.time_passes(5, 0)  # in the ring, not flushed, when the daemon is killed
    machine.killed(0)
    machine.truncate(0, 50, 0)
    machine.make_durable("sync", 0)


def losing(lost: Written) -> Survival:
    return lambda write: nothing_survives(write) if write is lost else everything_survives(write)


def torn_at(torn: Written, start: int, end: int) -> Survival:
    """All writes are whole, but one that lacks the bytes from `start` to `end`."""

    def survives(write: Written) -> Iterator[tuple[int, int]]:
        if write is not torn:
            yield from everything_survives(write)
        else:
            yield 0, start
            yield end, len(write.data)

    return survives


def only(kept: Written) -> Survival:
    return lambda write: everything_survives(write) if write is kept else nothing_survives(write)


def at_stake(machine: CrashMachine, moment: int) -> list[Written]:
    """The writes that no flush had covered."""
    events = machine.device.events[:moment]
    flushed = max((at for at, event in enumerate(events) if isinstance(event, Flushed)), default=0)
    return [event for event in events[flushed:] if isinstance(event, Written)]


def fates(writes: list[Written]) -> Iterator[Survival]:
    yield nothing_survives
    yield everything_survives
    for write in writes:
        yield losing(write)
        yield only(write)
        within = len(write.data) // 4 // SECTOR * SECTOR
        for start in (0, SECTOR, 2 * SECTOR, within, len(write.data) - SECTOR):
            if 0 <= start < len(write.data):
                yield torn_at(write, start, start + SECTOR)


def test_each_moment_and_each_fate_of_each_write_leaves_a_prefix(machine: CrashMachine) -> None:
    short_history(machine)
    events = machine.device.events
    moments = [at for at, event in enumerate(events) if isinstance(event, Flushed)]
    assert len(moments) > 8
    checked = 0
    for moment in [*moments, len(events)]:
        candidates = machine.candidates(moment)
        for survives in fates(at_stake(machine, moment)):
            image = machine.device.image_after(moment, survives)
            machine.check_image(image, candidates, max(machine.used_until(moment), default=0))
            checked += 1
    assert checked > 100


def test_a_cut_between_any_two_writes_leaves_a_prefix(machine: CrashMachine) -> None:
    """Also with the newest superblock lost."""
    short_history(machine)
    for moment in range(1, len(machine.device.events) + 1):
        for survives in (everything_survives, nothing_survives):
            image = machine.device.image_after(moment, survives)
            newest = max(machine.used_until(moment), default=0)
            machine.check_image(image, machine.candidates(moment), newest)

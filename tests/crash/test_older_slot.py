"""A ring that is kept nearly full and turns many times: nothing that either superblock
slot needs is ever overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.crash.machine import _FILE_MODE, MIB, CrashMachine, lose_newest_superblock
from tests.crash.model import ROOT
from tests.engine.audit import check_slots
from tests.support.devices import everything_survives, nothing_survives

ROUNDS = 90


@pytest.fixture
def machine() -> Iterator[CrashMachine]:
    machine = CrashMachine()
    machine.begins(segments=12, batch=256 * 1024)
    yield machine
    machine.teardown()


def one_step(machine: CrashMachine, random: Random) -> None:
    """Mostly whole files written anew, so that whole segments die."""
    name = b"file %d" % random.randrange(2)
    match random.randrange(8):
        case 0:
            machine.make_durable("checkpoint", 0)
        case 1 | 2:
            machine.make_durable("sync", 0)
        case _:
            if name in machine.tree.nodes[ROOT].entries:
                step = machine.store.unlink(ROOT, name)
                machine.do(step, lambda tree, _: tree.unlink(ROOT, name))
            ino = machine.make(ROOT, name, _FILE_MODE)
            if ino is not None:
                machine.write_to(ino, 0, random.randbytes(random.randrange(MIB // 2, MIB)), 0)


@pytest.mark.parametrize("seed", range(2))
def test_the_older_slot_alone_gives_all_that_was_confirmed(
    machine: CrashMachine, seed: int
) -> None:
    random = Random(seed)
    # So much stays that segments are needed again as soon as they may be.
    ino = machine.make(ROOT, b"stays", _FILE_MODE)
    for number in range(4):
        machine.write_to(ino or 0, number * MIB, random.randbytes(MIB), 0)
    for _ in range(ROUNDS):
        one_step(machine, random)
        machine.lives()
        check_slots(machine.store)
        moment = len(machine.device.events)
        survives = everything_survives if random.randrange(2) else nothing_survives
        image = machine.device.image_after(moment, survives)
        lose_newest_superblock(image)
        newest = max(machine.used_until(moment), default=0)
        machine.check_image(image, machine.candidates(moment), newest)
    assert machine.device.bytes_written > 2 * machine.device.size, "the ring has turned"

"""A device that fails and comes back, or does not, under arbitrary operations: with a shadow
nothing that was answered is ever missing, and nothing is called durable that is not."""

from __future__ import annotations

import errno
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from kvfs.engine.io import Step
from tests.crash.machine import (
    ENDS,
    MIB,
    OPTIONS,
    PICKS,
    SEEDS,
    DeferredCrashMachine,
    content,
)
from tests.crash.test_crash_rule import COMMON, LONG, SLOW
from tests.support.devices import random_survival
from tests.support.encrypted import ENCRYPTION

T = TypeVar("T")
_SHADOW = 3 * MIB


class FailoverMachine(DeferredCrashMachine):
    """The device refuses some calls or all, and may lose what no flush had covered. It is well
    again when that was noticed, not before: what nobody was told of no filesystem could know.
    When time passes while something is under way, it is away too, since it does not answer."""

    options = replace(OPTIONS, shadow=_SHADOW)

    def __init__(self) -> None:
        super().__init__()
        self.is_failing = False

    @property
    def is_away(self) -> bool:
        return self.store.failure is not None

    @property
    def may_fail(self) -> bool:
        return self.is_failing or self.is_away

    # -- it fails, and comes back

    @rule(
        kinds=st.sampled_from([("write",), ("flush",), ("read", "write", "flush")]),
        let_through=st.integers(0, 6),
        seed=SEEDS,
    )
    def device_fails(self, kinds: tuple[str, ...], let_through: int, seed: int) -> None:
        if self.is_failing:
            return
        self.is_failing = True
        left = [let_through]

        def fail(kind: str, _address: int, _length: int) -> None:
            if kind not in kinds:
                return
            left[0] -= 1
            if left[0] >= 0:
                return
            if left[0] == -1 and kinds != ("write",):
                self.device.lose_unflushed(random_survival(Random(seed)))
            raise OSError(errno.EIO, "the device is broken")

        self.device.fail = fail

    @rule(seed=SEEDS)
    def device_is_back(self, seed: int) -> None:
        if self.is_away:
            self.is_well()
            self.returns(seed)
            assert self.store.failover.counters.returns >= 1

    def is_well(self) -> None:
        self.is_failing = False
        self.device.fail = lambda kind, address, length: None

    def returns(self, seed: int) -> None:
        for _ in range(3):
            self.idle(seed)
            self.clock.now += 40
            self.store.look()
        self.idle(seed)
        assert not self.is_away

    @rule(seed=SEEDS)
    def it_looks(self, seed: int) -> None:
        self.clock.now += 2
        self.store.look()
        self.executor.random.seed(seed)
        for _ in range(seed % 20):
            self.executor.happen()

    @rule(size=st.integers(1, 400_000), seed=SEEDS)
    def write_into_the_shadow(self, size: int, seed: int) -> None:
        ino = self.a_file(seed)
        if ino is not None and self.is_away:
            self.write_to(ino, seed % MIB, content(seed, size), seed)
            self.answers_of_durability(seed)

    def answers_of_durability(self, seed: int) -> None:
        """It must not lie."""
        task = self.executor.begin(self.store.sync())
        assert task.done
        failure = task.completion.error
        assert isinstance(failure, OSError) and failure.errno == errno.EIO

    # -- what else happens then

    def do(self, step: Step[T], change: Any, seed: int = 0) -> T | None:
        """It may have no room then, or need what only the device has."""
        self.device.note("started", len(self.states))
        try:
            result = self.run(step, seed)
        except OSError as failure:
            if self.may_fail and failure.errno in (errno.EIO, errno.ENOSPC):
                return None
            return super().do(_raising(failure), change, seed)
        return super().do(_returning(result), change, seed)

    def tolerated(self, step: Step[Any], seed: int) -> None:
        try:
            self.run(step, seed)
        except OSError as failure:
            assert self.may_fail and failure.errno == errno.EIO

    @rule(which=st.sampled_from(["sync", "sync", "checkpoint"]), seed=SEEDS)
    def make_durable(self, which: str, seed: int) -> None:
        step = self.store.sync() if which == "sync" else self.store.checkpoint()
        self.tolerated(self.confirming(step), seed)

    @rule(seed=SEEDS)
    def clean(self, seed: int) -> None:
        self.tolerated(self.store.clean(), seed)

    @rule(seconds=st.sampled_from([5, 30, 400]), seed=SEEDS)
    def time_passes(self, seconds: int, seed: int) -> None:
        self.clock.now += seconds
        self.store.look()
        self.tolerated(self.store.tick(), seed)

    @rule(pick=PICKS, offset=st.integers(0, 10_000), size=st.integers(1, 99_000), seed=SEEDS)
    def read(self, pick: int, offset: int, size: int, seed: int) -> None:
        ino = self.a_file(pick)
        if ino is None:
            return
        expected = bytes(self.tree.nodes[ino].content)[offset : offset + size]
        try:
            assert bytes(self.run(self.store.read(ino, offset, size), seed)) == expected
        except OSError as failure:
            assert self.may_fail and failure.errno == errno.EIO

    @rule(seed=SEEDS, steps=st.integers(1, 30))
    def things_happen(self, seed: int, steps: int) -> None:
        self.executor.random.seed(seed)
        for _ in range(steps):
            self.executor.happen()

    @rule(pick=PICKS, name=st.just(b"fork"), seed=SEEDS)
    def fork(self, pick: int, name: bytes, seed: int) -> None:
        if not self.may_fail:
            super().fork(pick, name, seed)

    @rule(pick=PICKS, seed=SEEDS)
    def reclaim(self, pick: int, seed: int) -> None:
        if not self.may_fail:
            super().reclaim(pick, seed)

    # -- ends

    @rule(how=ENDS, back=st.integers(0, 10), seed=SEEDS)
    def end(self, how: str, back: int, seed: int) -> None:
        if not self.may_fail:
            super().end(how, back, seed)
        elif how == "power cut":
            self.is_well()
            self.power_cut(back, seed)
        else:
            if how == "closed":
                self.tolerated(self.store.close(), seed)
            self.stop(seed)
            self.is_well()
            self.open()
            self.expect(self.tree.view(), "after a device that failed")

    @rule(seed=SEEDS)
    def check_everything(self, seed: int) -> None:
        if self.may_fail:
            # Something is asked of it, so that the failure is seen.
            self.make(1, b"noticed", 0o100644)
            self.tolerated(self.store.checkpoint(), seed)
            self.is_well()
            if self.is_away:
                self.returns(seed)
        super().check_everything(seed)

    @invariant()
    def lives(self) -> None:
        if hasattr(self, "store"):
            assert self.store._appender.failure is None
            assert not self.store.failover.gave_up
            assert self.store.failover.used <= _SHADOW + _SHADOW // 16 + 4096
            self.forget_old_history()


def _raising(failure: OSError) -> Step[Any]:
    raise failure
    yield


def _returning(result: T) -> Step[T]:
    return result
    yield


class EncryptedFailoverMachine(FailoverMachine):
    encryption = ENCRYPTION


@SLOW
@pytest.mark.parametrize(
    ("machine", "histories"), [(FailoverMachine, 25), (EncryptedFailoverMachine, 10)]
)
def test_nothing_that_was_answered_is_lost_by_a_device_that_fails(
    machine: type[FailoverMachine], histories: int
) -> None:
    short = settings(max_examples=histories, stateful_step_count=40, **COMMON)
    run_state_machine_as_test(machine, settings=short)


@pytest.mark.crash_long
@pytest.mark.timeout(0)
def test_a_device_that_fails_in_many_histories() -> None:
    run_state_machine_as_test(FailoverMachine, settings=LONG)

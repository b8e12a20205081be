"""The crash rule, under arbitrary operations and arbitrary cuts (see machine.py)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.crash.machine import CrashMachine, DeferredCrashMachine
from tests.support.encrypted import ENCRYPTION

COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}
SHORT = settings(max_examples=100, stateful_step_count=40, **COMMON)
# Should it fail, there must be time to say by which history.
SLOW = pytest.mark.timeout(900)
LONG = settings(max_examples=1000, stateful_step_count=60, **COMMON)


@SLOW
def test_state_after_a_crash_is_a_prefix_that_contains_what_was_confirmed() -> None:
    run_state_machine_as_test(CrashMachine, settings=SHORT)


@SLOW
def test_state_after_a_crash_with_writes_in_flight_is_such_a_prefix() -> None:
    run_state_machine_as_test(DeferredCrashMachine, settings=SHORT)


class EncryptedMachine(CrashMachine):
    encryption = ENCRYPTION


class EncryptedDeferredMachine(DeferredCrashMachine):
    encryption = ENCRYPTION


@SLOW
@pytest.mark.parametrize("machine", [EncryptedMachine, EncryptedDeferredMachine])
def test_state_of_an_encrypted_ring_after_a_crash_is_such_a_prefix(
    machine: type[CrashMachine],
) -> None:
    run_state_machine_as_test(machine, settings=settings(SHORT, max_examples=30))


@pytest.mark.crash_long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "machine",
    [CrashMachine, DeferredCrashMachine, EncryptedMachine, EncryptedDeferredMachine],
)
def test_the_crash_rule_for_many_histories(machine: type[CrashMachine]) -> None:
    run_state_machine_as_test(machine, settings=LONG)

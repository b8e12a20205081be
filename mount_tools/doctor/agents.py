"""Agents that hold a mount: how fragmented their GPU memory is, as far as they tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mount_tools.doctor.check import Check, Question
from mount_tools.doctor.is_it_kv import endpoint_of, judge_allocator
from mount_tools.doctor.system import System
from mount_tools.processes import holders_of

_FRAGMENTATION = Question(
    "GPU",
    "fragmentation",
    "agents that tell it",
    "memory that torch's allocator keeps and has not given out is no KV",
)


def checks(system: System, mountpoint: Path) -> Iterator[Check]:
    holders = holders_of(mountpoint)
    found = False
    for holder in holders:
        _, endpoint = endpoint_of(system, [holder.pid])
        check = judge_allocator(_FRAGMENTATION.group, endpoint)
        if check is not None:
            found = True
            yield replace(check, name=f"fragmentation of {holder.command} {holder.pid}")
    if not found:
        told = f"none of the {len(holders)} processes that hold {mountpoint} tells it"
        yield _FRAGMENTATION.unknown(told, "kvfs doctor --pid PID --metrics-port PORT")

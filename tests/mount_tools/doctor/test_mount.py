"""A mount's own figures: each check found good, found bad, and not told."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mount_tools.doctor.check import Check, Status
from mount_tools.doctor.mount import judge

DAY = 24 * 3600
NOW = 1_800_000_000.0
GOOD: dict[str, Any] = json.loads("""{
  "source": "/dev/nvme1n1", "damage": null, "failure": null, "unrecovered": false,
  "superblock_lost": false,
  "errors": {"device": 0, "checksum": 0, "index": 0},
  "scrub": {"finished": 1799900000.0, "rotten": []},
  "space": {"total": 1000000, "free": 500000, "available": 600000},
  "warm": {"limit": 17179869184, "taken": 1000, "hits": 9000},
  "hot_hit_rate": 0.97,
  "latency": {"cold_read": {"count": 1000, "p50_ms": 0.1, "p99_ms": 0.4}}
}""")


def judged(changes: dict[str, Any] | None = None) -> dict[str, Check]:
    """Keys are paths with dots."""
    stats = copy.deepcopy(GOOD)
    for path, value in (changes or {}).items():
        *above, last = path.split(".")
        place = stats
        for name in above:
            place = place[name]
        place[last] = value
    return {check.name: check for check in judge(Path("/mnt/kv"), stats, NOW)}


def test_a_good_mount_has_no_trouble() -> None:
    assert {check.status for check in judged().values()} == {Status.OK}


@pytest.mark.parametrize(
    ("name", "changes", "status"),
    [
        ("damage", {"damage": "a frame is not whole"}, "error"),
        ("damage", {"failure": "the device failed"}, "error"),
        ("damage", {"unrecovered": True}, "warning"),
        ("damage", {"superblock_lost": True}, "warning"),
        ("errors", {"errors.checksum": 1}, "warning"),
        ("scrub", {"scrub.rotten": [{"address": 1}]}, "error"),
        ("scrub", {"scrub.finished": NOW - 15 * DAY}, "warning"),
        ("scrub", {"scrub.finished": None}, "advice"),
        ("free space", {"space.free": 10, "space.available": 99_000}, "warning"),
        ("free space", {"space.free": 10, "space.available": 100_000}, "ok"),
        ("warm memory", {"warm.limit": 2**29}, "advice"),
        ("warm hits", {"warm.hits": 900, "latency.cold_read.count": 1000}, "advice"),
        ("warm hits", {"warm.hits": 0, "latency.cold_read.count": 999}, "unknown"),
        ("hot hits", {"hot_hit_rate": 0.5}, "advice"),
        ("hot hits", {"hot_hit_rate": None}, "unknown"),
        ("cold reads", {"latency.cold_read.p99_ms": 5.0}, "advice"),
        ("cold reads", {"latency.cold_read.count": 0}, "unknown"),
    ],
)
def test_what_a_mount_tells_is_judged(name: str, changes: dict[str, Any], status: str) -> None:
    check = judged(changes)[name]
    assert check.status.value == status
    assert status in ("ok", "unknown") or check.command

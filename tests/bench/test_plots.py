"""Rows as pictures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.plots import draw, share_of_goal
from scripts.bench.rows import Series, bound_row, cost_row, speed_row

PNG = b"\x89PNG"
PEERS = [Series("2 readers", [3.0]), Series("1 reader", [2.0]), Series("1 000 readers", [4.0])]


def speed(id: str, share: float = 0.5, measured: float = 30) -> dict[str, Any]:
    ours, limit = Series("KVFS", [measured]), Series("raw", [40])
    return asdict(speed_row(id, "restore", share, ours, limit, peers=PEERS))


def test_what_meets_its_goal_reaches_1_whichever_way_the_goal_points() -> None:
    cost = cost_row("4", "a layer", 2, Series("KVFS", [3]), Series("raw", [1]), unit="ms")
    bound = bound_row("10", "mount", [0.5], "s", at_most=1)
    assert share_of_goal(speed("1")) == pytest.approx(0.75 / 0.5)
    assert share_of_goal(asdict(cost)) == pytest.approx(2 / 3)
    assert share_of_goal(asdict(bound)) == pytest.approx(2)


def test_a_measured_nothing_can_be_drawn(tmp_path: Path) -> None:
    draw([speed("1a", measured=0)], tmp_path)
    assert (tmp_path / "overview.png").read_bytes().startswith(PNG)


def test_a_picture_for_each_that_has_rows_and_for_no_other(tmp_path: Path) -> None:
    draw([speed("1a"), speed("14a")], tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"overview.png", "restore_peers.png", "scaling.png"}
    amplification = bound_row("9a", "sessions: bytes", [1.2], "x", at_most=1.3)
    draw([asdict(amplification), speed("11a")], tmp_path)
    more = {path.name for path in tmp_path.iterdir()} - found
    assert more == {"write_amplification.png", "metadata.png"}
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(PNG)
        assert path.stat().st_size < 100_000


def test_a_point_without_a_number_is_refused(tmp_path: Path) -> None:
    row = speed("14a") | {"peers": {"many readers": 1.0}}
    with pytest.raises(SystemExit, match="many readers"):
        draw([row], tmp_path)

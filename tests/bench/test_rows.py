"""What a row says of its rounds, and what of it is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.report import Report
from scripts.bench.rows import Series, bound_row, cost_row, fastest, speed_row
from scripts.bench.scaling import bend

LIMIT = Series("raw", [100.0, 200.0, 400.0])


def test_a_ratio_is_the_median_of_the_ratios_not_the_ratio_of_the_medians() -> None:
    row = speed_row("1a", "work", 0.9, Series("ours", [90.0, 100.0, 380.0]), LIMIT)
    assert (row.measured, row.limit, row.ratio, row.rounds) == (100.0, 200.0, 0.9, 3)
    assert row.goal == ">= 0.9 x raw"
    assert row.met is True


@pytest.mark.parametrize(("share", "met"), [(0.5, True), (0.51, False), (None, None)])
def test_a_speed_has_to_reach_its_share(share: float | None, met: bool | None) -> None:
    ours = Series("ours", [50.0, 100.0, 200.0])
    assert speed_row("1a", "work", share, ours, LIMIT).met is met


@pytest.mark.parametrize(("factor", "met"), [(2.0, True), (1.99, False), (None, None)])
def test_a_cost_may_reach_its_factor(factor: float | None, met: bool | None) -> None:
    ours = Series("ours", [200.0, 400.0, 800.0])
    assert cost_row("1a", "work", factor, ours, LIMIT, unit="ms").met is met


def test_a_bound_is_held_against_the_median() -> None:
    assert bound_row("1a", "work", [1.0, 2.0, 9.0], "s", at_most=2.0).met is True
    assert bound_row("1a", "work", [1.0, 2.0, 9.0], "s", at_most=1.9).met is False
    assert bound_row("1a", "work", [1.0, 2.0, 9.0], "s", at_least=2.1).met is False


def test_p99_is_on_the_bad_side() -> None:
    values = Series("ours", [float(value) for value in range(101)])
    limit = Series("raw", [1.0] * 101)
    assert speed_row("1a", "work", None, values, limit).p99 == 1.0
    assert cost_row("1a", "work", None, values, limit, unit="ms").p99 == 99.0


def test_the_fastest_peer_is_that_of_the_highest_median() -> None:
    steady, spiky = Series("steady", [5.0, 5.0, 5.0]), Series("spiky", [1.0, 4.0, 90.0])
    assert fastest([spiky, steady]).values == steady.values


def test_a_bend_is_where_it_first_falls_under_the_best_before() -> None:
    raw = [Series(f"raw, {name}", [100.0]) for name in ("one", "two", "four")]
    rising = [Series("one", [10.0]), Series("two", [20.0]), Series("four", [19.0])]
    falling = [Series("one", [10.0]), Series("two", [20.0]), Series("four", [16.0])]
    assert bend(rising, raw) == "does not bend"
    assert bend(falling, raw) == "bends at four: 0.80 of two (raw: 1.00)"


def test_a_row_measured_again_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "build/bench.json"
    peer = Series("a peer", [1.0, 3.0, 2.0])
    for id, number, factor in (("4a", 4, 1.0), ("14a", 14, 1.0), ("4a", 4, 2.0)):
        report = Report.load(path)
        ours = Series("ours", [value * factor for value in LIMIT.values])
        report.add(
            number,
            [speed_row(id, "work", 2.0, ours, LIMIT, peers=[peer])],
            "python -m scripts.bench",
        )
        report.save(path)
    document = json.loads(path.read_text())
    assert [(row["id"], row["ratio"], row["met"]) for row in document["rows"]] == [
        ("4a", 2.0, True),
        ("14a", 1.0, False),
    ]
    assert document["rows"][0]["peers"] == {"a peer": 2.0}
    assert document["machine"]["cpus"] > 0

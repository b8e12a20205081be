"""Each profile at the work that it is made for, for seconds: see scripts/scenarios.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.tiers.profiles import NAMES

SCRIPT = Path(__file__).parents[2] / "scripts" / "scenarios.py"


@pytest.mark.parametrize("scenario", NAMES)
def test_a_scenario_with_its_profile(scenario: str, fuse: None, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, SCRIPT, scenario, "--short", "--dir", tmp_path, "--json", file]
    subprocess.run(command, check=True)
    result = json.loads(file.read_text())
    simulated, mounted = result["simulated"], result["mounted"]
    found = simulated["kept"] + simulated["brought"]
    assert found > simulated["returns"] * {"gov": 0.4, "ecommerce": 0.7, "iot": 0.999}[scenario]
    assert mounted["wrong"] == []
    assert mounted["requests"] > 100
    assert mounted["files_compared_at_the_end"] >= mounted["processes"]
    if scenario == "iot":
        assert simulated["requests"] / simulated["seconds"] > 19_000
        assert simulated["shards_used"] == simulated["sessions"], "each device has its own"

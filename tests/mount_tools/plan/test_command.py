"""`kvfs plan` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mount_tools.plan.machine import ring_of
from tests.mount_tools.plan.test_model import LLAMA_3_1_8B
from tests.support.command import refused
from tests.support.mounter import Mounter, kvfs
from tests.support.users import kvfs_as_nobody

GIB = 1024**3
NUMBERS = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")
MACHINE = ("--hot", "40G", "--warm", "100G", "--ring", "1T", "--bandwidth", "2G")


def planned(*arguments: str | Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(kvfs("plan", *arguments, "--json").stdout)
    return document


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_1_8B))
    return file


def test_a_model_and_its_numbers_give_the_same_plan(config: Path) -> None:
    by_file, by_numbers = planned(config, *MACHINE), planned(*NUMBERS, *MACHINE)
    assert by_file["model"]["bytes_a_token"] == by_numbers["model"]["bytes_a_token"] == 131072
    assert by_file["tiers"] == by_numbers["tiers"]
    lengths = [session["tokens"] for session in by_file["sessions"]]
    assert lengths == [4096, 32768, 102400]
    assert by_file["sessions"][1]["stored_bytes"] == 4 * GIB
    assert by_file["sessions"][1]["resume_cold_s"] == pytest.approx(2.0)
    assert by_file["sessions"][1]["fit_hot"] == 9
    assert by_file["load"] is None and by_file["workload"] is None


def test_a_load_and_a_rating(config: Path) -> None:
    load = planned(
        config, *MACHINE, "--tokens-a-day", "8192", "--tbw", "1", "--write-amplification", "2"
    )["load"]  # fmt: skip
    assert load["kv_bytes_a_day"] == GIB
    assert load["device_bytes_a_year"] == 730 * GIB
    assert load["years"] == pytest.approx(1e12 / (730 * GIB))


def test_what_people_read(config: Path) -> None:
    output = kvfs(
        "plan", config, *MACHINE, "--prefill-rate", "8192", "--tokens-a-day", "1e6"
    ).stdout
    assert "GQA, 32 layers with KV, bfloat16" in output
    assert "128.0 KiB (131072 bytes)" in output
    assert "2.0 x" in output
    assert "until reclaim" in output


def test_a_trace_of_turns(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "turns.csv"
    rows = [
        f"s{n},main,{60 * turn},{2048 * (turn + 1)},{2048 * turn}"
        for n in range(9)
        for turn in range(5)
    ]
    file.write_text("\n".join(["session,stream,t_s,in_tok,prefix_match_tok", *rows]))
    document = planned(config, *MACHINE, "--prefill-rate", "8000", "--trace", file)
    workload = document["workload"]
    assert workload["requests"] == 45
    assert workload["kept_tokens"] == 9 * 5 * 2048
    assert workload["computed_share"] == pytest.approx(1 / 3)
    assert workload["saved_s"] > 0
    assert document["load"]["tokens_a_day"] == workload["tokens_a_day"]


def test_a_mount_is_the_cold_tier(mounted: Mounter, config: Path) -> None:
    stats = mounted.stats()
    tiers = planned(config, "--on", mounted.mountpoint)["tiers"]
    assert tiers["cold"]["bytes"] == stats["space"]["total"]
    assert ring_of(mounted.image.stat().st_size).size == stats["space"]["total"]
    assert tiers["warm"]["bytes"] == pytest.approx(0.85 * stats["warm"]["limit"])


def test_a_device_that_was_written_is_measured_and_an_empty_one_is_not(
    mounted: Mounter, config: Path, tmp_path: Path
) -> None:
    empty = planned(config, "--on", mounted.image)["bytes_a_second"]["cold"]
    assert empty["value"] is None and "never written" in empty["source"]
    written = tmp_path / "written.img"
    written.write_bytes(b"KVFS" * (16 * 1024**2))
    speed = planned(config, "--on", written)["bytes_a_second"]["cold"]
    assert speed["value"] > 0 and "measured" in speed["source"]


def test_nothing_is_changed_and_a_user_may_plan(config: Path, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents[:-2]):
        directory.chmod(0o755)
    before = sorted(tmp_path.rglob("*"))
    result = kvfs_as_nobody("plan", config, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["model"]["bytes_a_token"] == 131072
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "name a MODEL"),
        (("--layers", "3"), 2, "all of --layers --kv-heads --head-dim"),
        ((*NUMBERS, "--dtype", "float12"), 2, "'float12' is not known"),
        ((*NUMBERS, "--ring", "1T", "--on", "/mnt"), 2, "--ring is a device to be bought"),
        ((*NUMBERS, "--on", "/missing"), 1, "/missing does not exist"),
        ((*NUMBERS, "--on", "/proc"), 1, "/proc is neither a mounted KVFS nor a block device"),
        (("/missing/config.json",), 1, "does not exist: give a model's config.json"),
        ((*NUMBERS, "--trace", "/proc/version"), 1, "is no trace"),
        (("/proc/version",), 1, "it is not JSON"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], status: int, message: str) -> None:
    assert message in refused("plan", *arguments, status=status)


def test_a_model_and_numbers_are_one_too_many(config: Path) -> None:
    assert "either MODEL or" in refused("plan", str(config), *NUMBERS, status=2)

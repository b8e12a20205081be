"""Rules and dashboard: by the tools of Prometheus and Grafana, and against what KVFS shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvfs.tiers import migrate
from mount_tools.monitoring import DASHBOARD, FOLDER, RULES
from tests.support.mounter import Mounter, kvfs

TESTS = Path(__file__).with_name("alerts_test.yml")
# Names that operators of agents know, in spite of their unit.
KNOWN_BY_NAME = {"kv_cold_read_p99_ms", "kv_warm_evict_latency_ms", "kv_cold_read_latency_ms"}
ROWS = [
    "Now", "Tiers", "Heat", "Rates", "Latencies", "Errors", "Ring", "Prefetch", "Agents",
]  # fmt: skip
_METRIC = re.compile(r"\bkvf?s?_\w+")


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus' own checker."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing: it is in the package prometheus; or make monitoring")
    return found


@pytest.fixture(scope="module")
def of_a_mount(fuse: None) -> Iterator[str]:
    """The metrics of a mount that something was written to."""
    mounter = Mounter()
    try:
        mounter.mount()
        session = mounter.mountpoint / "agent"
        session.mkdir()
        (session / "layer.000").write_bytes(bytes(100_000))
        yield (mounter.mountpoint / ".kvfs" / "metrics").read_text()
    finally:
        mounter.close()


@pytest.fixture(scope="module")
def of_a_router() -> str:
    """The metrics of an adapter's router."""
    pytest.importorskip("torch")
    from kvfs.torch.memory import DeviceMemory
    from kvfs.torch.metrics import Hot, RouterMetrics

    return RouterMetrics(lambda: Hot(1, 2, 3, 4), lambda: DeviceMemory(1, 2)).text()


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def rules() -> dict[str, tuple[str, str | None]]:
    """Expression and time of each alert."""
    parts = RULES.read_text().split("- alert: ")[1:]
    found = {}
    for part in parts:
        (expression,) = re.findall(r"expr: (.*)", part)
        times = re.findall(r"\bfor: (.*)", part)
        found[part.split("\n")[0]] = (expression, times[0] if times else None)
    return found


def shown_names(text: str) -> set[str]:
    found = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        found.add(name)
        if kind == "histogram":
            found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    return found


def run(*command: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, input=given)


# -- what is there


def test_the_folder_is_told() -> None:
    assert kvfs("monitoring").stdout == f"{FOLDER}\n"
    assert sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".py") == [
        *(["__pycache__"] if (FOLDER / "__pycache__").exists() else []),
        "alerts.yml",
        "dashboard.json",
    ]


def test_every_metric_that_rules_and_dashboard_name_is_shown(
    of_a_mount: str, of_a_router: str
) -> None:
    shown = shown_names(of_a_mount) | shown_names(of_a_router)
    expressions = [*dashboard_expressions(), *(expression for expression, _ in rules().values())]
    assert len(expressions) > 60
    for expression in expressions:
        named = set(_METRIC.findall(expression))
        assert named and named <= shown, expression


def test_bounds_of_the_rules_are_those_at_which_kvfs_acts() -> None:
    pytest.importorskip("transformers")
    from kvfs.torch import router

    times = {"30s": 30.0, "2m": 120.0}
    for alert, pct, seconds in (
        ("KvfsDeviceMemoryFull", router._DEVICE_FULL_PCT, router._DEVICE_FULL_SECONDS),
        ("KvfsWarmMemoryFull", migrate._STRAINED_PCT, migrate._STRAINED_SECONDS),
    ):
        expression, time = rules()[alert]
        assert expression.endswith(f" > {pct}")
        assert time is not None and times[time] == seconds


# -- Prometheus' tools


def test_promtool_finds_nothing_to_say_about_the_rules(promtool: str) -> None:
    result = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(rules())} rules found" in result.stdout


def test_each_alert_fires_when_it_should_and_not_else(promtool: str) -> None:
    result = run(promtool, "test", "rules", TESTS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert set(re.findall(r"alertname: (\w+)", TESTS.read_text())) == set(rules())


def test_a_rule_with_another_bound_fails_its_tests(promtool: str, tmp_path: Path) -> None:
    """The tests of the rules can fail."""
    changes = [
        ("> 92", "> 91"), ("for: 30s", "for: 10s"), ("> 88", "> 87"), ("for: 2m", "for: 1m"),
        ("> 0.005", "> 0.007"), ("for: 1m\n", "for: 0s\n"), ("< 0.95", "< 0.9"),
        ("> 0.001", "> 0.002"), ('{kind="checksum"}', ""), ("0.99", "0.5"),
    ]  # fmt: skip
    for old, new in changes:
        assert old in RULES.read_text()
        changed = tmp_path / "alerts.yml"
        changed.write_text(RULES.read_text().replace(old, new))
        tests = tmp_path / "test.yml"
        tests.write_text(re.sub(r"- \S+alerts\.yml", f"- {changed}", TESTS.read_text()))
        assert run(promtool, "test", "rules", tests).returncode == 1, (old, new)


def test_promtool_finds_nothing_to_say_about_the_metrics(
    promtool: str, of_a_mount: str, of_a_router: str
) -> None:
    for text in (of_a_mount, of_a_router):
        result = run(promtool, "check", "metrics", given=text)
        for line in result.stderr.splitlines():
            name, _, told = line.partition(" ")
            assert told == "metric names should not contain abbreviated units", line
            assert name.removesuffix("_created") in KNOWN_BY_NAME


def test_promtool_reads_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    file = tmp_path / "queries.yml"
    queries = [
        {"record": f"kvfs:query:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(dashboard_expressions())
    ]
    # JSON is YAML.
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": queries}]}))
    result = run(promtool, "check", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr


# -- Grafana's


def lost(document: object, known: object, path: str = "") -> list[str]:
    """What of a document its schema does not know."""
    if isinstance(document, dict) and isinstance(known, dict):
        return [
            found
            for key, value in document.items()
            for found in (
                lost(value, known[key], f"{path}/{key}") if key in known else [path + key]
            )
        ]
    if isinstance(document, list) and isinstance(known, list) and len(document) == len(known):
        pairs = enumerate(zip(document, known, strict=True))
        return [found for at, (a, b) in pairs for found in lost(a, b, f"{path}[{at}]")]
    return [] if document == known else [path]


def through_grafanas_schema(document: dict[str, Any]) -> Any:
    """Grafana's own model of a dashboard and its panels: what that does not know is gone."""
    pytest.importorskip("grafana_foundation_sdk", reason="it needs Python 3.11")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(document)))


def test_the_dashboard_is_what_grafana_takes() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert lost(document, through_grafanas_schema(document)) == []


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ([], "panelz", []),
        (["panels", 1], "titel", "a"),
        (["panels", 1, "options"], "colourMode", "value"),
        (["panels", 8, "fieldConfig", "defaults", "custom"], "fillOpacty", 1),
        (["panels", 8, "targets", 0], "expression", "up"),
    ],
)
def test_what_grafana_does_not_know_is_found(
    where: list[str | int], key: str, value: object
) -> None:
    """The check can fail."""
    document = json.loads(DASHBOARD.read_text())
    inner: Any = document
    for step in where:
        inner = inner[step]
    inner[key] = value
    assert len(lost(document, through_grafanas_schema(document))) == 1


def test_the_dashboard_shows_what_it_should_and_says_what_that_is() -> None:
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == ROWS
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_no_panel_lies_upon_another() -> None:
    for one, other in combinations((panel["gridPos"] for panel in panels()), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y

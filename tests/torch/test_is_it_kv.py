"""`kvfs doctor --pid` on a process that has sessions open by the adapter: this one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.mount_tools.doctor.test_endpoint import served
from tests.support.mounter import kvfs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

torch = pytest.importorskip("torch")

from kvfs.torch import HotPool, KVFSCache, KVRouter  # noqa: E402
from kvfs.torch.metrics import Allocator, Hot, RouterMetrics  # noqa: E402
from mount_tools.doctor.endpoint import parse_samples  # noqa: E402


@pytest.fixture
def ids() -> Any:
    return torch.arange(300).remainder(250)[None]


def report(*arguments: str) -> dict[str, Any]:
    result = kvfs("doctor", "--pid", str(os.getpid()), "--json", *arguments, check=False)
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture
def cache(kv_directory: Path, model: PreTrainedModel, ids: Any) -> Iterator[KVFSCache]:
    with KVFSCache.open(kv_directory, "agent-1", model) as opened:
        with torch.no_grad():
            model(ids, cache=opened, use_cache=True)
        opened.end_round()
        yield opened


def test_open_sessions_bound_what_can_be_kv(cache: KVFSCache, kv_directory: Path) -> None:
    document = report()
    opened = [each for each in document["sessions"] if each["open"]]
    assert [Path(each["path"]) for each in opened] == [kv_directory / "agent-1"]
    assert opened[0]["tokens"] == 300
    assert document["verdict"].startswith("no, as far as it is in KVFS: the sessions")


def test_a_router_tells_what_is_hot(kv_directory: Path, model: PreTrainedModel, ids: Any) -> None:
    with (
        KVRouter(kv_directory, model, pool=HotPool(64 << 20)) as router,
        router.session("agent-1") as cache,
        torch.no_grad(),
    ):
        model(ids, cache=cache, use_cache=True)
        hot = parse_samples(router.metrics())["kv_hot_bytes"]
        with served(router.metrics()) as port:
            document = report("--metrics-port", str(port))
    assert hot > 0
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["KV pool"]["status"] == "ok"
    assert "of 64.0 MiB" in checks["KV pool"]["found"]
    assert document["verdict"].endswith("is KV")


def test_the_allocator_is_told_where_there_is_one() -> None:
    hot = Hot(used_bytes=1, budget_bytes=2, hot_sessions=0, idle_sessions=0)
    told = RouterMetrics(lambda: hot, allocator=lambda: Allocator(6, 10)).text()
    assert parse_samples(told)["kv_torch_allocated_bytes"] == 6
    assert parse_samples(told)["kv_torch_reserved_bytes"] == 10
    assert "kv_torch" not in RouterMetrics(lambda: hot).text()

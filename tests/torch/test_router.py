"""Many sessions under one budget give the tokens of caches that never leave memory."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import DynamicCache, PreTrainedModel

from kvfs.tiers.profiles import Profile
from kvfs.torch import DeviceMemory, HotPool, KVFSCache, KVRouter, SessionBusyError
from tests.support.mounter import Mounter, kvfs

Prompt = Callable[..., torch.Tensor]
SLAB_BYTES = 4096
BLOCK_BYTES = 8 * SLAB_BYTES
"""A block of 16 tokens in all 8 layers."""
DEADLINE_SECONDS = 20


def fill(model: PreTrainedModel, cache: object, ids: torch.Tensor) -> torch.Tensor:
    """Run `ids`, shape [1, n], and return their logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache).logits
    return logits


def turn(router: KVRouter, name: str, ids: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """One round of a session."""
    with router.session(name) as cache:
        logits = fill(model, cache, ids)
        cache.end_round()
    return logits


def metrics(router: KVRouter) -> dict[tuple[str, ...], float]:
    """Value by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(router.metrics())
        for sample in family.samples
    }


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


@pytest.fixture
def make_router(kv_directory: Path, model: PreTrainedModel) -> Iterator[Callable[..., KVRouter]]:
    """`make_router(blocks=400, **options)`: hot memory for so many; closed at the end."""
    made: list[KVRouter] = []

    def make(blocks: int = 400, **options: Any) -> KVRouter:
        pool = HotPool(blocks * BLOCK_BYTES, slab_bytes=SLAB_BYTES)
        made.append(KVRouter(kv_directory, model, pool=pool, **options))
        return made[-1]

    yield make
    for router in made:
        router.close()


def test_sessions_over_budget_give_the_same_logits(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    """Eight agents in random order, memory for about two."""
    router = make_router(25)
    kept = {f"agent-{number}": DynamicCache() for number in range(8)}
    draw = random.Random(0)
    for step in range(60):
        name = draw.choice(list(kept))
        ids = prompt(draw.randint(1, 30), seed=step)
        assert torch.equal(turn(router, name, ids, model), fill(model, kept[name], ids))
    counted = metrics(router)
    assert counted["kv_hot_bytes",] <= counted["kv_hot_budget_bytes",]
    assert counted["kv_turns_total", "hot"] > 0
    assert counted["kv_turns_total", "cold"] + counted["kv_turns_total", "warm"] > 0
    assert 0 < counted["kv_hot_hit_rate",] < 1
    assert counted["kv_warm_evict_latency_ms_count",] > 0
    assert counted["kv_daemon_faults_total",] == 0


def test_the_coldest_goes_down_first(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    """Used often beats used last, and what is in use stays."""
    router = make_router(24)
    for round in range(4):
        turn(router, "often", prompt(24, seed=round), model)
    turn(router, "once", prompt(96), model)
    turn(router, "once more", prompt(96), model)
    turn(router, "new", prompt(96), model)
    with router.session("often") as often, router.session("once") as once:
        assert often.resident_bytes == 6 * BLOCK_BYTES
        assert once.resident_bytes < 6 * BLOCK_BYTES


def test_room_is_made_until_a_tenth_is_free(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    router = make_router(30)
    for number in range(12):
        turn(router, f"agent-{number}", prompt(70, seed=number), model)
        counted = metrics(router)
        assert counted["kv_hot_bytes",] <= counted["kv_hot_budget_bytes",]
    assert counted["kv_sessions", "hot"] >= 2


def test_an_idle_session_goes_down_by_itself(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    router = make_router(profile=Profile(hot_idle_seconds=0.05))
    turn(router, "agent", prompt(50), model)
    eventually(lambda: metrics(router)["kv_sessions", "idle"] == 1)
    assert metrics(router)["kv_hot_bytes",] == 0
    reference = DynamicCache()
    fill(model, reference, prompt(50))
    with router.session("agent") as cache:
        assert cache.resident_bytes == 0
        ids = prompt(5, seed=1)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
        time.sleep(0.2)
        assert cache.resident_bytes == 4 * BLOCK_BYTES, "a session in use stays"


def test_a_session_is_used_by_one_at_a_time(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    router = make_router()
    with router.session("agent"):
        with pytest.raises(SessionBusyError, match="session agent is in use"):
            turn(router, "agent", prompt(5), model)
        with pytest.raises(SessionBusyError, match="session agent is in use"):
            router.close()
    turn(router, "agent", prompt(5), model)
    router.close()
    router.close()
    with pytest.raises(ValueError, match=r"the router of .* is closed"):
        turn(router, "agent", prompt(5), model)


def test_a_pause_that_is_longer_than_the_idle_time_puts_the_session_down(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    router = make_router(profile=Profile(hot_idle_seconds=30.0))
    turn(router, "agent", prompt(50), model)
    for expected, left in ((None, 4), (9.0, 4), (127.0, 0)):
        router.pause("agent", expected)
        with router.session("agent") as cache:
            assert cache.resident_bytes == left * BLOCK_BYTES
    router.pause("agent", 1540.0)


def test_the_end_of_a_tool_brings_the_session_back(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    router = make_router()
    turn(router, "agent", prompt(50), model)
    router.pause("agent", 60.0)
    assert metrics(router)["kv_hot_bytes",] == 0
    router.resume("agent")
    reference = DynamicCache()
    fill(model, reference, prompt(50))
    ids = prompt(5, seed=1)
    assert torch.equal(turn(router, "agent", ids, model), fill(model, reference, ids))
    for call in (router.pause, router.resume):
        with pytest.raises(FileNotFoundError):
            call("nobody")


def test_a_session_of_an_earlier_process_is_resumed(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    first = make_router()
    turn(first, "agent", prompt(50), model)
    first.close()
    second = make_router()
    second.resume("agent")
    with second.session("agent") as cache:
        assert cache.tokens == prompt(50)[0].tolist()
        assert cache.rounds == [50]


def test_agents_in_threads_of_their_own(
    make_router: Callable[..., KVRouter], model: PreTrainedModel, prompt: Prompt
) -> None:
    """Turns, pauses and idle sessions that go down, all at once, with memory for two of six."""
    router = make_router(30, profile=Profile(hot_idle_seconds=0.02))
    wrong: list[str] = []

    def live(number: int) -> None:
        name, draw, kept = f"agent-{number}", random.Random(number), DynamicCache()
        try:
            for step in range(12):
                ids = prompt(draw.randint(1, 25), seed=1000 * number + step)
                if not torch.equal(turn(router, name, ids, model), fill(model, kept, ids)):
                    wrong.append(f"{name}: step {step} differs")
                if draw.random() < 0.5:
                    router.pause(name, draw.choice([None, 0.01, 60.0]))
                    time.sleep(draw.random() * 0.05)
                    router.resume(name)
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")

    agents = [threading.Thread(target=live, args=(number,)) for number in range(6)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join(60)
        assert not agent.is_alive(), "a hang"
    assert wrong == []


def test_only_so_many_sessions_stay_open(
    make_router: Callable[..., KVRouter],
    model: PreTrainedModel,
    prompt: Prompt,
    kv_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvfs.torch.router._OPEN_SESSIONS", 3)
    router = make_router()
    for number in range(6):
        turn(router, f"agent-{number}", prompt(5, seed=number), model)
    counted = metrics(router)
    assert counted["kv_sessions", "hot"] + counted["kv_sessions", "idle"] == 3
    # What was closed may be opened elsewhere, what is open may not.
    KVFSCache.open(kv_directory, "agent-0", model).close()
    with pytest.raises(SessionBusyError):
        KVFSCache.open(kv_directory, "agent-5", model)
    with router.session("agent-0") as cache:
        assert cache.tokens == prompt(5, seed=0)[0].tolist()


def test_hints_are_written_where_the_daemon_knows_them(
    make_router: Callable[..., KVRouter],
    model: PreTrainedModel,
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = make_router()
    turn(router, "agent", prompt(5), model)
    told: list[tuple[str, bytes]] = []
    hot = b'hot_stats={"bytes": %d, "hits": 0, "misses": 0}'
    real = os.setxattr

    def note(path: Path, name: str, value: bytes) -> None:
        told.append((name, value))
        real(path, name, value)

    monkeypatch.setattr("kvfs.torch.router.os.setxattr", note)
    router.pause("agent")
    router.pause("agent", 400)
    router.resume("agent")
    assert told == [
        ("user.kvfs.hint", b"tool_started"),
        ("user.kvfs.hint", hot % BLOCK_BYTES),
        ("user.kvfs.hint", b"tool_started"),
        ("user.kvfs.hint", hot % BLOCK_BYTES),
        ("user.kvfs.hint", b"turn_expected=400"),
        ("user.kvfs.hint", hot % 0),
        ("user.kvfs.demote", b"1"),
        ("user.kvfs.hint", b"tool_done"),
        ("user.kvfs.prefetch", b"1"),
    ]


def test_the_router_goes_on_when_the_daemon_is_back(
    mounter: Mounter, model: PreTrainedModel, prompt: Prompt
) -> None:
    """SIGKILL: an error for each agent that needs the mount, and no token lost after."""
    mounter.mount()
    reference = {name: DynamicCache() for name in ("first", "second")}
    with KVRouter(mounter.mountpoint, model, profile=Profile(hot_idle_seconds=0.05)) as router:
        for name, kept in reference.items():
            turn(router, name, prompt(40), model)
            fill(model, kept, prompt(40))
        turn(router, "not used again", prompt(40), model)
        eventually(lambda: metrics(router)["kv_sessions", "idle"] == 3)
        mounter.kill()
        for name in reference:
            with pytest.raises(OSError, match=r"not connected|abort"):
                turn(router, name, prompt(5, seed=1), model)
        assert metrics(router)["kv_daemon_faults_total",] >= 2
        kvfs("umount", "--force", mounter.mountpoint)
        for name in (*reference, "third"):
            with pytest.raises(OSError, match="no KVFS is mounted there any more"):
                turn(router, name, prompt(5, seed=1), model)
        mounter.mount()
        for name, kept in reference.items():
            ids = prompt(5, seed=1)
            assert torch.equal(turn(router, name, ids, model), fill(model, kept, ids))
        assert metrics(router)["kv_reopened_sessions_total",] == 2


def test_a_turn_that_the_death_of_the_daemon_broke_is_done_again(
    mounter: Mounter, model: PreTrainedModel, prompt: Prompt
) -> None:
    mounter.mount()
    kept = DynamicCache()
    with KVRouter(mounter.mountpoint, model) as router:
        turn(router, "agent", prompt(40), model)
        dead = pytest.raises(OSError, match=r"not connected|abort")
        with dead, router.session("agent") as cache:
            fill(model, cache, prompt(5, seed=1))
            mounter.kill()
            cache.end_round()
        with suppress(OSError):
            turn(router, "agent", prompt(5, seed=2), model)
        mounter.mount()
        with router.session("agent") as cache:
            cache.crop(40 - cache.get_seq_length())
        ids = prompt(5, seed=3)
        fill(model, kept, prompt(40))
        assert torch.equal(turn(router, "agent", ids, model), fill(model, kept, ids))


@dataclass
class Device:
    """The host's memory as a device, of which the pool and `others` use some."""

    pool: HotPool
    others: int = 0
    total: int = 60 * BLOCK_BYTES

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.pool.allocated_bytes + self.others, self.total)


@pytest.fixture
def quick_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.torch.router._DEVICE_FULL_SECONDS", 0.05)
    monkeypatch.setattr("kvfs.torch.router._LOOK_SECONDS", 0.01)


@pytest.mark.usefixtures("quick_alarm")
def test_a_device_that_stays_too_full_has_kv_go_down(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    device = Device(HotPool(50 * BLOCK_BYTES, slab_bytes=SLAB_BYTES))
    kept = {name: DynamicCache() for name in ("cold", "warmer")}
    profile = Profile(hot_idle_seconds=3600)
    with KVRouter(
        kv_directory, model, pool=device.pool, profile=profile, memory=device.memory
    ) as router:
        for name, cache in kept.items():
            for round in range(3):
                ids = prompt(24, seed=round)
                assert torch.equal(turn(router, name, ids, model), fill(model, cache, ids))
        hot = metrics(router)["kv_hot_bytes",]
        assert hot > 0 and device.memory().used_pct < 92
        device.others = 52 * BLOCK_BYTES
        eventually(lambda: device.memory().used_pct <= 92)
        counted = metrics(router)
        assert counted["kv_hot_bytes",] < hot
        assert counted["kv_warm_evict_latency_ms_count",] > 0
        assert counted["kv_device_memory_bytes",] == 60 * BLOCK_BYTES
        assert counted["kv_device_memory_used_bytes",] <= 0.92 * 60 * BLOCK_BYTES
        device.others = 0
        for name, cache in kept.items():
            ids = prompt(5, seed=9)
            assert torch.equal(turn(router, name, ids, model), fill(model, cache, ids))
        eventually(lambda: len(_told_of_memory(caplog)) == 2)
    assert _told_of_memory(caplog) == ["WARNING", "INFO"], "once, and once that it is over"


@pytest.mark.usefixtures("quick_alarm")
def test_a_full_device_first_loses_what_holds_no_kv(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    device = Device(HotPool(50 * BLOCK_BYTES, slab_bytes=SLAB_BYTES))
    with KVRouter(kv_directory, model, pool=device.pool, memory=device.memory) as router:
        turn(router, "agent", prompt(24), model)
        hot, before = device.pool.used_bytes, device.pool.allocated_bytes
        device.total = before * 100 // 94
        assert 0 < hot < device.total * 90 // 100, "it also has workspaces"
        eventually(lambda: device.memory().used_pct <= 92)
        assert device.pool.used_bytes == hot
        with router.session("agent") as cache:
            assert cache.tokens == prompt(24)[0].tolist()


def _told_of_memory(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if "92 %" in record.message]

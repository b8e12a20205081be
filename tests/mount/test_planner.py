"""Sessions go down when they are idle and come up when they are foretold, on a real mount."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounter import Mounter

MIB = 1024**2
HINT = "user.kvfs.hint"


@pytest.fixture(scope="module")
def quick(fuse: None) -> Iterator[Mounter]:
    """A mount whose sessions go down after 2 s."""
    mounter = Mounter()
    profile = mounter.directory / "quick.toml"
    profile.write_text("warm_idle_seconds = 2\n")
    mounter.mount("--profile", str(profile))
    yield mounter
    mounter.close()


def make_session(root: Path, name: str, layers: int = 3) -> Path:
    (root / name).mkdir()
    for layer in range(layers):
        (root / name / f"layer.{layer:03}").write_bytes(content(name, layer))
    return root / name


def content(name: str, layer: int) -> bytes:
    return f"{name} {layer} ".encode() * (MIB // 8)


def tier(path: Path) -> str:
    return os.getxattr(path, "user.kvfs.tier").decode()


def wait_until(is_so: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def outcomes(mounter: Mounter) -> dict[str, Any]:
    stats: dict[str, Any] = mounter.stats()["prefetch"]
    return stats


def test_an_idle_session_goes_down_and_a_hint_brings_it_up(quick: Mounter) -> None:
    session = make_session(quick.mountpoint, "agent-7")
    assert tier(session) == "warm"
    wait_until(lambda: tier(session) == "cold")
    before = outcomes(quick)
    os.setxattr(session, HINT, b"tool_done")
    wait_until(lambda: tier(session) == "warm")
    for layer in range(3):
        fd = os.open(session / f"layer.{layer:03}", os.O_RDONLY | os.O_DIRECT)
        assert os.pread(fd, 8 * MIB, 0) == content("agent-7", layer)
        os.close(fd)
    found = outcomes(quick)
    assert found["right"]["tool_done"] == before["right"]["tool_done"] + 1
    size = sum(len(content("agent-7", layer)) for layer in range(3))
    assert found["right_bytes"] == before["right_bytes"] + size
    metrics = (quick.mountpoint / ".kvfs" / "metrics").read_text()
    assert 'kvfs_prefetched_sessions_total{outcome="right",reason="tool_done"}' in metrics


def test_a_turn_that_was_announced_finds_its_session(quick: Mounter) -> None:
    session = make_session(quick.mountpoint, "agent-8")
    os.setxattr(session, HINT, b"turn_expected=6")
    wait_until(lambda: tier(session) == "cold", 5)
    wait_until(lambda: tier(session) == "warm")


def test_a_session_that_is_used_stays(quick: Mounter) -> None:
    used, idle = (make_session(quick.mountpoint, name, 1) for name in ("used", "idle"))
    fd = os.open(used / "layer.000", os.O_RDWR | os.O_DIRECT)
    try:

        def idle_is_down() -> bool:
            os.pread(fd, 4096, 0)
            return tier(idle) == "cold"

        wait_until(idle_is_down)
        assert tier(used) == "warm"
    finally:
        os.close(fd)


def test_who_opens_a_cold_session_and_pauses_finds_it_in_memory(quick: Mounter) -> None:
    session = make_session(quick.mountpoint, "agent-9")
    wait_until(lambda: tier(session) == "cold")
    fd = os.open(session / "layer.000", os.O_RDONLY)
    try:
        wait_until(lambda: tier(session) == "warm")
    finally:
        os.close(fd)


def test_who_looks_at_small_files_brings_nothing_in(quick: Mounter) -> None:
    session = make_session(quick.mountpoint, "agent-10")
    (session / "session.json").write_text("{}")
    wait_until(lambda: tier(session) == "cold")
    (session / "session.json").read_text()
    time.sleep(2.5)
    assert tier(session / "layer.000") == "cold"


@pytest.mark.parametrize("value", [b"", b"soon", b"turn_expected=-1", b"hot_stats=[]"])
def test_what_is_no_hint_is_refused(quick: Mounter, value: bytes) -> None:
    session = quick.mountpoint / "refused"
    session.mkdir(exist_ok=True)
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(session, HINT, value)


def test_a_hint_is_about_a_session(quick: Mounter) -> None:
    root = quick.mountpoint
    session = make_session(root, "agent", 1)
    os.setxattr(session / "layer.000", HINT, b'hot_stats={"bytes": 4096}')
    (root / "file").write_bytes(b"of a pool")
    for place in (root, root / "file"):
        with pytest.raises(OSError, match="Invalid argument"):
            os.setxattr(place, HINT, b"tool_done")
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(session, HINT)
    assert os.listxattr(session) == []


def test_devices_have_shards_of_their_own(mounter: Mounter) -> None:
    mounter.mount("--profile", "iot")
    (mounter.mountpoint / "sensor-000123").mkdir()
    (mounter.mountpoint / "sensor-000123" / "command").write_bytes(b"on")
    (mounter.mountpoint / "gate").mkdir()
    os.setxattr(mounter.mountpoint / "gate", "user.kvfs.device_id", b"262149")
    (mounter.mountpoint / "gate" / "command").write_bytes(b"off")
    warm = mounter.warm_directory.glob("*/*/*/*.kvmap")
    assert {path.parent.name for path in warm} == {"123", "5"}

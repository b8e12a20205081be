"""`kvfs doctor` as it is typed, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mount_tools.doctor.check import Status
from tests.mount_tools.doctor.test_endpoint import VLLM
from tests.support.command import refused
from tests.support.mounter import Mounter, kvfs
from tests.support.users import kvfs_as_nobody

KEYS = {"group", "name", "status", "found", "wanted", "why", "command"}
SETTINGS = ("/proc/sys/vm", "/proc/sys/fs/fuse", "/sys/kernel/mm/transparent_hugepage")


def examined(*arguments: str | Path) -> tuple[dict[str, Any], int]:
    result = kvfs("doctor", *arguments, "--json", check=False)
    assert result.stderr == ""
    return json.loads(result.stdout), result.returncode


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document["checks"]}


def settings() -> dict[str, bytes]:
    """What could be set and can be read, but for counters."""
    found = {}
    for top in SETTINGS:
        for file in Path(top).rglob("*"):
            if file.is_file() and "stat" not in str(file):
                try:
                    found[str(file)] = file.read_bytes()
                except OSError:
                    continue
    return found


def test_an_image_on_this_machine_and_nothing_is_changed(tmp_path: Path) -> None:
    image = tmp_path / "ring.img"
    image.write_bytes(bytes(4096))
    before = settings()
    document, status = examined(image)
    assert settings() == before
    assert image.read_bytes() == bytes(4096)
    checks = document["checks"]
    assert all(set(check) == KEYS and check["wanted"] and check["why"] for check in checks)
    troubles = [check for check in checks if Status(check["status"]).is_trouble]
    assert status == bool(troubles)
    assert {"kernel", "FUSE", "memory", "PCIe", "GPU", "software"} <= {c["group"] for c in checks}
    assert by_name(document)["version"]["found"] == os.uname().release
    assert "GB/s" in by_name(document)["bandwidth of a copy"]["found"]


def test_a_mount_is_looked_at_with_its_device(mounted: Mounter) -> None:
    document, _ = examined(mounted.mountpoint)
    checks = by_name(document)
    assert checks["daemon"]["found"] == f"process {mounted.pid} answers"
    assert checks["damage"]["status"] == checks["errors"]["status"] == "ok"
    assert checks["scrub"]["status"] == "advice"
    assert checks["fragmentation"]["status"] == "unknown"
    assert f"size of {mounted.warm_directory}" in checks
    told = kvfs("doctor", mounted.mountpoint, check=False).stdout
    assert f"mount {mounted.mountpoint}" in told
    assert f"change: kvfs scrub {mounted.mountpoint}" in told
    assert told.rstrip().endswith("nothing was changed")

    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        document, status = examined(mounted.mountpoint / "below")
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    assert status == 1
    assert by_name(document)["daemon"]["status"] == "error"
    assert "does not answer" in by_name(document)["daemon"]["found"]

    mounted.kill()
    document, status = examined(mounted.mountpoint)
    assert status == 1
    assert "its daemon has ended" in by_name(document)["daemon"]["found"]


def test_a_user_is_told_what_a_user_may_see(mounted: Mounter) -> None:
    result = kvfs_as_nobody("doctor", "--json")
    assert result.stderr == ""
    checks = json.loads(result.stdout)["checks"]
    assert checks and {check["group"] for check in checks} >= {"kernel", "FUSE", "memory"}


def test_a_loop_device_is_followed_to_its_image(loop_device: Path) -> None:
    checks = by_name(examined(loop_device)[0])
    assert "filesystem of the image" in checks


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("/missing",), 1, "/missing does not exist"),
        (("/proc",), 1, "/proc is neither a mounted KVFS nor a block device or image"),
        (("--pid", "4194304"), 1, "there is no process 4194304"),
        (("--pid", "0"), 2, "Invalid value for '--pid'"),
        (("/mnt", "--pid", "1"), 2, "name either a mount or device, or --pid"),
        (("--metrics-port", "8000"), 2, "--metrics-port goes with --pid"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], status: int, message: str) -> None:
    assert message in refused("doctor", *arguments, status=status)


# -- a process

_ENGINE = """
import sys, http.server
held = [open(path) for path in sys.argv[4:]]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[3].encode())
    def log_message(self, *arguments): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def engine(metrics: str, *held: Path) -> Iterator[tuple[int, int]]:
    """Pid and port of a process that tells metrics and holds files open."""
    command = [sys.executable, "-c", _ENGINE, "--no-port", "0", metrics, *map(str, held)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def test_an_engine_whose_pool_is_full(mounted: Mounter) -> None:
    session = mounted.mountpoint / "agent-1"
    session.mkdir()
    (session / "layer.000").write_bytes(b"k" * 1024**2)
    (mounted.mountpoint / "agent-2").mkdir()
    (mounted.mountpoint / "agent-2" / "layer.000").write_bytes(b"k" * 4096)
    with engine(VLLM, session / "layer.000") as (pid, port):
        document, status = examined("--pid", str(pid))
        assert status == 0
        assert by_name(document)["KV pool"]["status"] == "unknown"
        assert f"it listens on {port}" in by_name(document)["KV pool"]["found"]
        assert document["verdict"].startswith("no, as far as it is in KVFS: the sessions")

        document, status = examined("--pid", str(pid), "--metrics-port", str(port))
        checks = by_name(document)
        assert status == 1
        assert checks["KV pool"]["status"] == "warning"
        assert checks["KV pool"]["found"].startswith("97%")
        assert checks["requests"]["found"] == "3 running, 0 waiting"
        assert [Path(each["path"]).name for each in document["sessions"]] == ["agent-1", "agent-2"]
        assert [each["open"] for each in document["sessions"]] == [True, False]
        told = kvfs("doctor", "--pid", str(pid)).stdout
        assert "is it KV? no" in told and "agent-2" in told


def test_the_allocator_tells_fragmentation() -> None:
    metrics = "kv_torch_allocated_bytes 6e9\nkv_torch_reserved_bytes 10e9\nkv_hot_bytes 1e12\n"
    with engine(metrics) as (pid, port):
        document, status = examined("--pid", str(pid), "--metrics-port", str(port))
    allocator = by_name(document)["torch's allocator"]
    assert status == 1 and allocator["status"] == "warning"
    assert allocator["found"] == "5.6 GiB allocated, 9.3 GiB reserved: 40% unused"
    assert document["verdict"].startswith("yes: 931.3 GiB")


def test_a_process_of_another_user(mounted: Mounter) -> None:
    result = kvfs_as_nobody("doctor", "--pid", str(os.getpid()))
    assert result.returncode == 0, result.stderr
    assert "another user's process: run as root" in result.stdout


def test_a_process_on_a_mount_that_hangs(mounted: Mounter) -> None:
    (mounted.mountpoint / "layer.000").write_bytes(b"k")
    with engine("", mounted.mountpoint / "layer.000") as (pid, _):
        os.kill(mounted.pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            document, _ = examined("--pid", str(pid))
            assert time.monotonic() - begun < 60
        finally:
            os.kill(mounted.pid, signal.SIGCONT)
    assert document["sessions"] == []
    assert by_name(document)["KVFS"]["found"].endswith("1 files open on mounts, of 1 sessions")

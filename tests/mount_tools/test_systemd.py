"""The unit template: systemd finds nothing to say about it, and its command line works."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest

import mount_tools
from kvfs.mount.mounts import find_mount
from tests.support.mounter import KVFS, Mounter
from tests.support.ports import free_port
from tests.support.supervisor import supervised

UNIT = Path(mount_tools.__file__).with_name("systemd") / "kvfs@.service"
COMMAND = "/usr/local/bin/kvfs"


def test_systemd_accepts_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(COMMAND, str(KVFS)))
    result = subprocess.run(
        ["systemd-analyze", "verify", copy], check=False, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_its_command_line_mounts_and_a_stop_saves(mounter: Mounter) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert line.startswith(f"{COMMAND} mount --foreground ")
    line = line.replace(COMMAND, str(KVFS)).replace("%f", str(mounter.mountpoint))
    port = free_port()
    configuration = {
        "KVFS_DEVICE": str(mounter.image),
        "KVFS_OPTIONS": f"-o noexec --warm-dir {mounter.warm_directory} --metrics-port {port}",
    }
    command = ["/bin/sh", "-c", f"exec {line}"]
    with supervised(command, mounter.directory, configuration) as daemon:
        (mounter.mountpoint / "kept").write_text("kept")
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b"kvfs_operations_total" in answer.read()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
    assert not find_mount(mounter.mountpoint)
    mounter.mount()
    assert mounter.stats()["counters"]["recovered_operations"] == 0
    assert (mounter.mountpoint / "kept").read_text() == "kept"

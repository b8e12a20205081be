"""`kvfs mount` and `kvfs umount`: round trips, refusals, dead and hanging daemons."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.engine.format import DATA_START
from kvfs.mount.mounts import find_mount, mounts
from tests.support.command import error_line
from tests.support.mounter import KVFS, Mounter, kvfs

MIB = 1024**2


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


# -- round trips


def test_files_survive_unmount_and_mount(mounted: Mounter) -> None:
    data = os.urandom(3 * MIB + 5)
    (mounted.mountpoint / "session").mkdir()
    (mounted.mountpoint / "session" / "layer.000").write_bytes(data)
    mounted.umount()
    assert mounted.has_ended
    assert list(mounted.mountpoint.iterdir()) == []
    mounted.mount()
    assert (mounted.mountpoint / "session" / "layer.000").read_bytes() == data


def test_what_was_mounted_is_told(mounter: Mounter) -> None:
    (line,) = mounter.mount().stdout.splitlines()
    assert line.startswith(f"mounted {mounter.image} on {mounter.mountpoint}: ")
    assert line.endswith(f" free; log {mounter.log}")
    assert mounter.umount().stdout == f"unmounted {mounter.mountpoint}\n"


def test_relative_paths_and_links_are_followed(mounter: Mounter) -> None:
    (mounter.directory / "link").symlink_to("mnt")
    kvfs("mount", "link", "ring.img", "--log", "log", cwd=mounter.directory)
    assert find_mount(mounter.mountpoint)
    assert (mounter.directory / "log").exists()
    kvfs("umount", "link", cwd=mounter.directory)
    assert not find_mount(mounter.mountpoint)


def test_a_read_only_mount_shows_and_refuses(mounted: Mounter) -> None:
    mounted.umount()
    assert " read-only: " in mounted.mount("-o", "ro").stdout
    assert (mounted.mountpoint / "kept").read_text() == "kept"
    with pytest.raises(OSError, match="Read-only file system"):
        (mounted.mountpoint / "new").touch()
    mounted.umount()


def test_a_block_device_serves_as_ring(loop_device: Path, mounter: Mounter) -> None:
    mounter.image = loop_device
    kvfs("mkfs", loop_device)
    mounter.mount()
    data = os.urandom(5 * MIB)
    (mounter.mountpoint / "file").write_bytes(data)
    line = error_line(kvfs("mkfs", loop_device, "--force", check=False))
    assert "is in use" in line
    mounter.umount()
    mounter.mount()
    assert (mounter.mountpoint / "file").read_bytes() == data
    mounter.umount()


# -- refusals


def test_a_mountpoint_must_be_an_empty_directory(mounter: Mounter) -> None:
    missing, file, full = (mounter.directory / name for name in ("missing", "file", "full"))
    file.touch()
    full.mkdir()
    (full / "x").touch()

    def line_for(mountpoint: Path) -> str:
        return error_line(
            kvfs("mount", mountpoint, mounter.image, "--log", mounter.log, check=False)
        )

    assert line_for(missing) == f"{missing} does not exist; make it with: mkdir -p {missing}"
    assert "is not a directory; the mountpoint comes first" in line_for(file)
    assert "is not empty" in line_for(full)
    assert (full / "x").exists()


def test_a_device_that_is_no_ring_is_refused_with_what_to_do(mounter: Mounter) -> None:
    missing, garbage, small = (mounter.directory / name for name in ("missing", "garbage", "small"))
    garbage.write_bytes(os.urandom(16 * MIB))
    small.write_bytes(b"x" * 100)

    def line_for(device: Path) -> str:
        return error_line(
            kvfs("mount", mounter.mountpoint, device, "--log", mounter.log, check=False)
        )

    assert line_for(missing) == f"{missing} does not exist; make it with: kvfs mkfs {missing}"
    assert line_for(garbage).endswith(f"format it with: kvfs mkfs {garbage} --force")
    assert line_for(small).endswith(f"make one with: kvfs mkfs {small}")
    assert "neither a block device nor an image file" in line_for(mounter.directory)
    assert not find_mount(mounter.mountpoint)


def test_a_second_mount_is_refused_and_harms_nothing(mounted: Mounter) -> None:
    other = mounted.directory / "other"
    other.mkdir()
    same_device = error_line(kvfs("mount", other, mounted.image, "--log", mounted.log, check=False))
    assert "is in use by another KVFS process" in same_device
    same_place = error_line(mounted.mount(check=False))
    assert f"has {mounted.image} mounted already" in same_place
    assert (mounted.mountpoint / "kept").read_text() == "kept"


def test_a_log_that_cannot_be_written_is_named(mounter: Mounter) -> None:
    log = mounter.directory
    line = error_line(kvfs("mount", mounter.mountpoint, mounter.image, "--log", log, check=False))
    assert line == f"the log {log} cannot be written (Is a directory); choose one with --log FILE"


# -- a daemon that dies or hangs


def test_a_killed_daemon_is_cleared_by_the_next_mount_and_nothing_is_lost(
    mounted: Mounter,
) -> None:
    (mounted.mountpoint / "answered").write_text("answered")
    mounted.kill()
    line = error_line(kvfs("stat", mounted.mountpoint, check=False))
    assert "its daemon has ended; mount it again with: kvfs mount" in line
    cleared, recovered, _ = mounted.mount().stdout.splitlines()
    assert cleared.startswith(f"cleared {mounted.mountpoint}")
    assert recovered.startswith("recovered ")
    assert (mounted.mountpoint / "kept").read_text() == "kept"
    assert (mounted.mountpoint / "answered").read_text() == "answered"


def test_a_dead_mount_can_be_unmounted(mounted: Mounter) -> None:
    mounted.kill()
    assert mounted.umount().stdout.startswith(f"cleared {mounted.mountpoint}")
    assert not find_mount(mounted.mountpoint)


def test_a_damaged_ring_is_mounted_read_only_and_says_so(mounted: Mounter) -> None:
    for name in ("first", "second"):
        with (mounted.mountpoint / name).open("wb") as file:
            file.write(os.urandom(MIB))
            file.flush()
            os.fsync(file.fileno())
    mounted.kill()
    with mounted.image.open("r+b") as image:
        image.seek(DATA_START)
        image.write(b"\0" * 4096)
    result = mounted.mount()
    assert "is damaged" in result.stderr
    assert " read-only: " in result.stdout


def test_a_hanging_daemon_can_be_detached(mounted: Mounter) -> None:
    os.kill(mounted.pid, signal.SIGSTOP)
    line = error_line(mounted.umount(check=False))
    assert line.endswith(f"detach it with: kvfs umount --force {mounted.mountpoint}")
    assert "does not answer" in error_line(mounted.mount(check=False))
    assert kvfs("umount", "--force", mounted.mountpoint).stdout.startswith("detached ")
    assert not find_mount(mounted.mountpoint)
    os.kill(mounted.pid, signal.SIGCONT)
    wait_until(lambda: mounted.has_ended)


# -- unmount


def test_processes_that_hold_the_mount_are_named(mounted: Mounter) -> None:
    kept = mounted.mountpoint / "kept"
    with kept.open() as file, subprocess.Popen(["sleep", "60"], stdin=file) as holder:
        line = error_line(mounted.umount(check=False))
        holder.kill()
    assert line.startswith(f"{mounted.mountpoint} is in use: ")
    assert f"sleep (pid {holder.pid}) has {kept}" in line
    assert f"(pid {os.getpid()})" in line
    assert kept.read_text() == "kept"
    mounted.umount()


@pytest.mark.parametrize(
    "program",
    [
        "import os, sys; os.chdir(sys.argv[1])",
        "import mmap, sys; f = open(sys.argv[1] + '/kept'); "
        "m = mmap.mmap(f.fileno(), 4, access=mmap.ACCESS_READ); f.close()",
    ],
    ids=["as its directory", "mapped"],
)
def test_a_process_without_an_open_file_is_named_too(mounted: Mounter, program: str) -> None:
    waits = f"{program}; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", waits, str(mounted.mountpoint)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        line = error_line(mounted.umount(check=False))
        holder.kill()
    assert f"(pid {holder.pid}) has {mounted.mountpoint}" in line


def test_what_is_not_mounted_cannot_be_unmounted(tmp_path: Path) -> None:
    line = error_line(kvfs("umount", tmp_path, check=False))
    assert line == f"no KVFS is mounted on {tmp_path}"


# -- in the foreground


@pytest.fixture
def supervised(mounter: Mounter) -> Iterator[subprocess.Popen[str]]:
    """`kvfs mount --foreground`, ready as a supervisor is told."""
    address = mounter.directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(address))
        notify.settimeout(20)
        command = [
            KVFS, "mount", mounter.mountpoint, mounter.image, "--foreground",
            "--warm-dir", mounter.warm_directory,
        ]  # fmt: skip
        environment = os.environ | {"NOTIFY_SOCKET": str(address)}
        with subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            assert notify.recv(100) == b"READY=1"
            yield process
            process.kill()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_is_told_and_can_stop_it(
    mounter: Mounter, supervised: subprocess.Popen[str], stop: signal.Signals
) -> None:
    (mounter.mountpoint / "kept").write_text("kept")
    assert mounter.stats()["pid"] == supervised.pid
    supervised.send_signal(stop)
    _, log = supervised.communicate(timeout=60)
    assert supervised.returncode == 0
    assert "Traceback" not in log
    assert not find_mount(mounter.mountpoint)
    mounter.mount()
    assert mounter.stats()["counters"]["recovered_operations"] == 0
    assert (mounter.mountpoint / "kept").read_text() == "kept"


def test_a_failure_in_the_foreground_is_one_line(mounter: Mounter) -> None:
    garbage = mounter.directory / "garbage"
    garbage.write_bytes(os.urandom(16 * MIB))
    line = error_line(kvfs("mount", mounter.mountpoint, garbage, "--foreground", check=False))
    assert line.endswith(f"kvfs mkfs {garbage} --force")


def test_a_log_left_in_another_warm_directory_is_not_given_up_in_silence(
    mounter: Mounter, tmp_path: Path
) -> None:
    mounter.mount()
    (mounter.mountpoint / "f").write_bytes(b"answered")
    mounter.kill()
    refused = mounter.mount("--warm-dir", str(tmp_path), check=False)
    assert refused.returncode == 1
    assert str(mounter.warm_directory) in refused.stderr
    assert "--warm-dir" in refused.stderr
    mounter.mount()
    assert (mounter.mountpoint / "f").read_bytes() == b"answered"


def test_any_name_of_an_image_can_be_mounted(tmp_path: Path, fuse: None) -> None:
    image, mountpoint = tmp_path / "a ring, with\\odd, 'name.img", tmp_path / "mnt"
    mountpoint.mkdir()
    kvfs("mkfs", image, "--size", "64M")
    kvfs("mount", mountpoint, image)
    try:
        (mountpoint / "f").write_bytes(b"x")
        mount = find_mount(mountpoint)
        assert mount is not None
        assert mount.source == str(image)
    finally:
        kvfs("umount", mountpoint)


def test_a_copy_of_a_mounted_image_does_not_take_what_the_other_answered(
    mounter: Mounter, tmp_path: Path
) -> None:
    copy, mountpoint = tmp_path / "copy.img", tmp_path / "mnt"
    mountpoint.mkdir()
    subprocess.run(["cp", "--sparse=always", mounter.image, copy], check=True)
    mounter.mount()
    (mounter.mountpoint / "f").write_bytes(b"answered")
    arguments = ["mount", mountpoint, copy, "--log", tmp_path / "log"]
    refused = kvfs(*arguments, "--warm-dir", mounter.warm_directory, check=False)
    assert refused.returncode == 1
    assert "copy" in error_line(refused)
    mounter.kill()
    mounter.mount()
    assert (mounter.mountpoint / "f").read_bytes() == b"answered"


def test_a_log_directory_that_was_tidied_away_is_made_again(mounter: Mounter) -> None:
    mounter.mount()
    for user in mounter.warm_directory.iterdir():
        shutil.rmtree(user)
    for number in range(20):
        (mounter.mountpoint / f"f{number}").write_bytes(os.urandom(MIB))
    mounter.umount()
    mounter.mount()
    assert len(list(mounter.mountpoint.iterdir())) == 20


def test_two_mounts_on_one_directory_at_once_do_not_stack(
    make_mounter: Callable[..., Mounter], tmp_path: Path
) -> None:
    first, second = make_mounter("64M"), make_mounter("64M")
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    commands = [
        subprocess.Popen(
            [KVFS, "mount", mountpoint, m.image, "--warm-dir", m.warm_directory, "--log", m.log],
            stderr=subprocess.PIPE,
        )
        for m in (first, second)
    ]
    try:
        for command in commands:
            command.communicate(timeout=60)
        assert sorted(command.returncode for command in commands) == [0, 1]
        assert sum(mount.mountpoint == mountpoint for mount in mounts()) == 1
    finally:
        kvfs("umount", mountpoint, check=False)


def test_too_little_memory_for_the_operation_log_is_said_at_once(mounter: Mounter) -> None:
    refused = mounter.mount("--warm", "1M", check=False)
    assert refused.returncode == 1
    assert "32 MiB" in error_line(refused)
    assert "--warm" in error_line(refused)


def test_a_read_only_mount_says_what_it_does_not_show(mounter: Mounter) -> None:
    mounter.mount()
    (mounter.mountpoint / "f").write_bytes(b"answered")
    mounter.kill()
    assert "not shown" in mounter.mount("-o", "ro").stderr
    mounter.umount()
    assert "not shown" not in mounter.mount().stderr
    assert (mounter.mountpoint / "f").read_bytes() == b"answered"


def test_a_warm_directory_that_others_may_write_is_refused(mounter: Mounter) -> None:
    planted = mounter.warm_directory / f"kvfs-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    refused = mounter.mount(check=False)
    assert refused.returncode == 1
    assert str(planted) in error_line(refused)
    planted.rmdir()
    mounter.mount()
    assert planted.stat().st_mode & 0o777 == 0o700

"""`kvfs mount` and `kvfs umount`: round trips, refusals, dead and hanging daemons."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.engine.format import DATA_START
from kvfs.mount.mounts import find_mount, mounts
from kvfs.torch.mounts import KVFS_TYPE, mount_of
from tests.support.command import error_line
from tests.support.images import digest
from tests.support.mounter import KVFS, Mounter, kvfs
from tests.support.supervisor import supervised

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
    line, policy = mounter.mount().stdout.splitlines()
    assert "the policy gittins names them" in policy
    assert line.startswith(f"mounted {mounter.image} on {mounter.mountpoint}: ")
    assert line.endswith(f" free; log {mounter.log}")
    assert mounter.umount().stdout == f"unmounted {mounter.mountpoint}\n"
    _, policy = mounter.mount("--no-reclaim").stdout.splitlines()
    assert "nothing is reclaimed" in policy


def test_relative_paths_and_links_are_followed(mounter: Mounter) -> None:
    (mounter.directory / "link").symlink_to("mnt")
    kvfs("mount", "link", "ring.img", "--log", "log", cwd=mounter.directory)
    assert find_mount(mounter.mountpoint)
    assert (mounter.directory / "log").exists()
    kvfs("umount", "link", cwd=mounter.directory)
    assert not find_mount(mounter.mountpoint)


def test_a_mountpoint_may_have_any_name(mounter: Mounter) -> None:
    """The table of mounts, which every command and every other mount reads, has it then."""
    odd = Path(os.fsdecode(os.fsencode(mounter.directory) + b"/\xff\x0c\r\n x"))
    odd.mkdir()
    kvfs("mount", odd, mounter.image, "--log", mounter.log)
    try:
        assert find_mount(odd)
        assert mount_of(odd).fstype == KVFS_TYPE
        refused = kvfs("mount", odd, mounter.image, check=False)
        assert refused.returncode == 1 and "mounted already" in refused.stderr
    finally:
        kvfs("umount", odd)
    assert not find_mount(odd)


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda top: (top / "new").touch(),
    "mkdir": lambda top: (top / "new").mkdir(),
    "symlink": lambda top: (top / "new").symlink_to("kept"),
    "link": lambda top: (top / "new").hardlink_to(top / "kept"),
    "write": lambda top: (top / "kept").open("r+b"),
    "truncate": lambda top: os.truncate(top / "kept", 0),
    "rename": lambda top: (top / "kept").rename(top / "new"),
    "unlink": lambda top: (top / "kept").unlink(),
    "chmod": lambda top: (top / "kept").chmod(0o777),
    "chown": lambda top: os.chown(top / "kept", 1, 1),
    "utime": lambda top: os.utime(top / "kept", (1, 1)),
    "setxattr": lambda top: os.setxattr(top / "kept", "user.a", b"b"),
    "removexattr": lambda top: os.removexattr(top / "kept", "user.kvfs.codec"),
    "chmod of the root": lambda top: top.chmod(0o777),
}


@pytest.mark.parametrize("killed", [False, True], ids=["after an unmount", "after a crash"])
def test_a_read_only_mount_shows_refuses_and_changes_no_byte_of_the_image(
    mounted: Mounter, killed: bool
) -> None:
    kept = mounted.mountpoint / "kept"
    os.setxattr(kept, "user.kvfs.codec", b"none")
    with kept.open() as file:
        os.fsync(file.fileno())
    if killed:
        mounted.kill()
    else:
        mounted.umount()
    before = digest(mounted.image)
    assert " read-only: " in mounted.mount("-o", "ro").stdout
    assert kept.read_text() == "kept"
    for name, change in CHANGES.items():
        with pytest.raises(OSError, match="Read-only file system"):
            change(mounted.mountpoint)
            pytest.fail(name)
    mounted.umount()
    assert digest(mounted.image) == before


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


# -- a daemon that dies or hangs


def test_a_killed_daemon_is_cleared_by_the_next_mount_and_nothing_is_lost(
    mounted: Mounter,
) -> None:
    (mounted.mountpoint / "answered").write_text("answered")
    mounted.kill()
    line = error_line(kvfs("stat", mounted.mountpoint, check=False))
    assert "its daemon has ended; mount it again with: kvfs mount" in line
    cleared, recovered, *_ = mounted.mount().stdout.splitlines()
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


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_is_told_and_can_stop_it(mounter: Mounter, stop: signal.Signals) -> None:
    command = [
        KVFS, "mount", mounter.mountpoint, mounter.image, "--foreground",
        "--warm-dir", mounter.warm_directory,
    ]  # fmt: skip
    with supervised(command, mounter.directory) as daemon:
        (mounter.mountpoint / "kept").write_text("kept")
        assert mounter.stats()["pid"] == daemon.pid
        daemon.send_signal(stop)
        _, log = daemon.communicate(timeout=60)
    assert daemon.returncode == 0
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


def test_a_read_only_mount_says_what_it_does_not_show(mounter: Mounter) -> None:
    mounter.mount()
    (mounter.mountpoint / "f").write_bytes(b"answered")
    mounter.kill()
    assert "not shown" in mounter.mount("-o", "ro").stderr
    mounter.umount()
    assert "not shown" not in mounter.mount().stderr
    assert (mounter.mountpoint / "f").read_bytes() == b"answered"

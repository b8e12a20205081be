"""`/.kvfs/` on a real mount: what it shows, to whom, and that nothing in it can be changed."""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.mounter import Mounter
from tests.support.sessions import sync

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 1024 * 1024
OWNERS = ["config.toml", "metrics", "segments", "stats.json"]
FILES = sorted([*OWNERS, "log", "sessions"])


@pytest.fixture
def control(kv_mount: Path) -> Path:
    return kv_mount / ".kvfs"


def errno_of(call: Callable[..., object], *arguments: object) -> int | None:
    """None if it succeeds."""
    try:
        call(*arguments)
    except OSError as failure:
        return failure.errno
    return None


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and, where it has one, kind."""
    return {
        (sample.name, sample.labels.get("kind", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- what is there


def test_it_is_reached_by_name_and_not_listed(control: Path) -> None:
    assert os.listdir(control.parent) == []
    assert sorted(os.listdir(control)) == FILES
    with os.scandir(control) as entries:
        listed = {entry.name: entry.inode() for entry in entries}
    assert listed == {name: (control / name).stat().st_ino for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_made_when_it_is_opened_and_has_no_size_before(control: Path, name: str) -> None:
    status = (control / name).stat()
    assert stat.S_ISREG(status.st_mode)
    assert status.st_size == 0
    assert subprocess.run(["cat", control / name], check=True, capture_output=True).stdout == (
        (control / name).read_bytes()
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_in_parts_too(control: Path, name: str) -> None:
    with (control / name).open("rb", buffering=0) as file:
        parts = []
        while part := file.read(7):
            parts.append(part)
        assert os.pread(file.fileno(), 10_000_000, 0) == b"".join(parts)


def test_what_is_not_there_is_enoent(control: Path) -> None:
    assert errno_of((control / "nothing").read_bytes) == errno.ENOENT


def test_an_open_file_is_a_snapshot_and_the_next_one_is_new(control: Path) -> None:
    def operations() -> int:
        return int(json.loads((control / "stats.json").read_text())["counters"]["operations"])

    with (control / "stats.json").open() as file:
        before = operations()
        (control.parent / "f").touch()
        assert json.load(file)["counters"]["operations"] == before
    assert operations() > before


# -- the files


def test_stats_tell_of_the_mount(control: Path, mounter: Mounter) -> None:
    stats = json.loads((control / "stats.json").read_text())
    assert stats["pid"] == mounter.pid
    assert stats["mountpoint"] == str(mounter.mountpoint)
    assert stats["source"] == str(mounter.image)
    assert stats["space"]["total"] > stats["space"]["free"] > 0


def test_segments_tell_how_the_ring_is_filled(control: Path) -> None:
    def told() -> dict[str, Any]:
        document: dict[str, Any] = json.loads((control / "segments").read_text())
        return document

    fresh = told()
    file = control.parent / "f"
    file.write_bytes(os.urandom(40 * MIB))
    sync(control.parent)
    stats, segments = json.loads((control / "stats.json").read_text()), told()
    live_pct = segments.pop("live_pct")
    assert segments["count"] == stats["segments"] == len(live_pct)
    assert segments["size"] == stats["segment_size"]
    assert segments["free"] == stats["free_segments"] == live_pct.count(-1)
    assert fresh["free"] - segments["free"] >= 40 * MIB // segments["size"] - 1
    assert 0 < segments["head_offset"] <= segments["size"]
    assert live_pct[segments["head"]] >= 0
    assert segments["next"] != segments["head"] != segments["victim"]
    live = sum(pct for pct in live_pct if pct > 0) / 100 * segments["size"]
    rounded_up = segments["size"] / 100 * sum(pct > 0 for pct in live_pct)
    assert live - rounded_up <= stats["space"]["live"] <= live
    live_before = sum(max(0, pct) for pct in live_pct)
    file.unlink()
    end = time.monotonic() + 60
    while sum(max(0, pct) for pct in told()["live_pct"]) > live_before // 2:
        assert time.monotonic() < end, "what was removed is still live"
        sync(control.parent)
        time.sleep(0.1)


def test_sessions_tell_their_heat_and_what_is_warm_of_them_at_once(control: Path) -> None:
    for name in ("one", "two"):
        (control.parent / name).mkdir()
        (control.parent / name / "layer.000").write_bytes(os.urandom(MIB))

    def told() -> dict[str, dict[str, Any]]:
        lines = map(json.loads, (control / "sessions").read_text().splitlines())
        return {line["path"]: line for line in lines}

    found = told()
    assert list(found) == ["two", "one"]
    assert found["two"]["heat"] > found["one"]["heat"] > 0
    for name, line in found.items():
        assert line["heat"] == pytest.approx(
            float(os.getxattr(control.parent / name, "user.kvfs.heat")), rel=1e-4
        )
        assert line["warm"] >= MIB
    os.setxattr(control.parent / "one", "user.kvfs.demote", b"1")
    assert told()["one"]["warm"] == 0
    assert told()["two"]["warm"] >= MIB


def test_very_many_sessions_are_all_listed_the_last_used_first(control: Path) -> None:
    names = [f"session {number}" for number in range(300)]
    for name in names:
        (control.parent / name).mkdir()
        (control.parent / name / "layer.000").touch()
    lines = [json.loads(line) for line in (control / "sessions").read_text().splitlines()]
    assert [line["path"] for line in lines] == names[::-1]


def test_what_is_read_is_counted(control: Path) -> None:
    file = control.parent / "f"
    file.write_bytes(os.urandom(MIB))
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)

    def read() -> dict[str, int]:
        os.preadv(fd, [mmap.mmap(-1, MIB)], 0)
        counters: dict[str, int] = json.loads((control / "stats.json").read_text())["counters"]
        return counters

    warm = read()
    assert (warm["payload_read"], warm["device_read"]) == (MIB, 0)
    os.setxattr(file, "user.kvfs.demote", b"1")
    cold = read()
    os.close(fd)
    assert cold["payload_read"] == 2 * MIB
    assert cold["device_read"] >= MIB


def test_metrics_have_every_number_of_the_stats(control: Path) -> None:
    (control.parent / "f").write_bytes(os.urandom(1000))
    with (control.parent / "f").open() as file:
        os.fsync(file.fileno())
    text = (control / "metrics").read_text()
    stats = json.loads((control / "stats.json").read_text())
    shown = samples(text)
    for name, value in stats["counters"].items():
        is_size = name.endswith(("_written", "_read")) or name in ("carried", "reclaimed")
        unit = "_bytes" if is_size else ""
        assert shown[f"kvfs_{name}{unit}_total", ""] == value, name
    for kind, value in stats["errors"].items():
        assert shown["kvfs_read_errors_total", kind] == value
    for name, value in stats["space"].items():
        unit = "" if name == "inodes" else "_bytes"
        assert shown[f"kvfs_space_{name}{unit}", ""] == value
    for name in ("segments", "free_segments", "epoch"):
        assert shown[f"kvfs_{name}", ""] == stats[name]
    assert shown["kvfs_segment_size_bytes", ""] == stats["segment_size"]
    assert shown["kvfs_unsaved_bytes", ""] == stats["unsaved"]
    assert shown["kvfs_operations_total", ""] > 0
    assert shown["kvfs_damage", ""] == shown["kvfs_read_only", ""] == 0


def test_every_metric_has_a_type_and_help(control: Path) -> None:
    families = list(text_string_to_metric_families((control / "metrics").read_text()))
    assert len(families) > 15
    for family in families:
        assert family.name.startswith(("kvfs_", "kv_"))
        assert family.type in ("gauge", "counter", "histogram")
        assert family.documentation


def test_a_read_only_mount_says_so_in_its_metrics(mounter: Mounter) -> None:
    mounter.mount("-o", "ro")
    shown = samples((mounter.mountpoint / ".kvfs" / "metrics").read_text())
    assert shown["kvfs_read_only", ""] == 1


def test_the_configuration_in_force_is_told(mounter: Mounter) -> None:
    mounter.mount("--deadline", "7", "--checkpoint", "60", "--warm", "64M", "-o", "noexec,ro")
    config = tomllib.loads((mounter.mountpoint / ".kvfs" / "config.toml").read_text())
    assert config["mountpoint"] == str(mounter.mountpoint)
    assert config["source"] == str(mounter.image)
    assert config["warm_directory"] == str(mounter.warm_directory)
    assert config["warm_size"] == 64 * 1024**2
    assert config["deadline_seconds"] == 7
    assert config["options"] == ["noexec", "ro"]
    assert config["store"]["checkpoint_seconds"] == 60


def test_the_limit_that_was_not_given_is_told_too(control: Path) -> None:
    assert tomllib.loads((control / "config.toml").read_text())["warm_size"] > 0


# -- who may read it


def test_another_user_may_look_and_not_read(mounter: Mounter) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    mounter.mount("-o", "allow_other")
    mounter.directory.chmod(0o755)
    mounter.mountpoint.chmod(0o755)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            control = mounter.mountpoint / ".kvfs"
            assert sorted(os.listdir(control)) == FILES
            for name in OWNERS:
                assert errno_of((control / name).read_bytes) == errno.EACCES
            assert (control / "sessions").read_bytes() == b""
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# -- nothing can be changed, also by root

DIRECTORY_CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda control: os.open(control / "new", os.O_CREAT | os.O_WRONLY),
    "mkdir": lambda control: (control / "new").mkdir(),
    "mknod": lambda control: os.mknod(control / "new"),
    "symlink": lambda control: (control / "new").symlink_to("x"),
    "link into": lambda control: (control / "new").hardlink_to(control.parent / "f"),
    "rename into": lambda control: (control.parent / "f").rename(control / "new"),
    "rename": lambda control: control.rename(control.parent / "other"),
    "replace": lambda control: (control.parent / "d").rename(control),
    "rmdir": lambda control: control.rmdir(),
    "chmod": lambda control: control.chmod(0o777),
    "chown": lambda control: os.chown(control, 1, 1),
    "utime": lambda control: os.utime(control),
    "setxattr": lambda control: os.setxattr(control, "user.a", b"b"),
    "removexattr": lambda control: os.removexattr(control, "user.kvfs.codec"),
}

FILE_CHANGES: dict[str, Callable[[Path], object]] = {
    "unlink": lambda file: file.unlink(),
    "rename": lambda file: file.rename(file.parent / "other"),
    "rename out": lambda file: file.rename(file.parent.parent / "other"),
    "replace": lambda file: (file.parent.parent / "f").rename(file),
    "link out": lambda file: (file.parent.parent / "other").hardlink_to(file),
    "chmod": lambda file: file.chmod(0o777),
    "chown": lambda file: os.chown(file, 1, 1),
    "utime": lambda file: os.utime(file, (1, 1)),
    "truncate": lambda file: os.truncate(file, 0),
    "setxattr": lambda file: os.setxattr(file, "user.a", b"b"),
    "set a setting": lambda file: os.setxattr(file, "user.kvfs.codec", b"none"),
    "removexattr": lambda file: os.removexattr(file, "user.a"),
}


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("the kernel refuses others before the daemon does")


def test_the_directory_cannot_be_changed(control: Path, as_root: None) -> None:
    (control.parent / "f").touch()
    (control.parent / "d").mkdir()
    found = {name: errno_of(change, control) for name, change in DIRECTORY_CHANGES.items()}
    assert found == dict.fromkeys(DIRECTORY_CHANGES, errno.EPERM)
    assert sorted(os.listdir(control)) == FILES
    assert sorted(os.listdir(control.parent)) == ["d", "f"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_cannot_be_changed(control: Path, name: str, as_root: None) -> None:
    (control.parent / "f").touch()
    file = control / name
    found = {what: errno_of(change, file) for what, change in FILE_CHANGES.items()}
    assert found == dict.fromkeys(FILE_CHANGES, errno.EPERM)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_CREAT):
        assert errno_of(os.open, file, flags) == errno.EACCES
    file.read_bytes()
    assert os.listdir(control.parent) == ["f"]


def test_xattrs_are_none(control: Path) -> None:
    for path in (control, control / "metrics"):
        assert os.listxattr(path) == []
        assert errno_of(os.getxattr, path, "user.kvfs.codec") == errno.ENODATA

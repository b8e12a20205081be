"""Names that would forge a line, steer a terminal or fit no encoding, in all that is told."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvfs.engine.device import FileDevice
from kvfs.engine.format import ROOT_INODE
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store
from kvfs.engine.units import Victim
from kvfs.mount.mounts import find_mount
from kvfs.tiers.warm import WarmTier
from mount_tools import main
from mount_tools.common import printable
from mount_tools.logs import LineFormatter
from tests.support.mounter import COMMAND_SECONDS, KVFS, Mounter, kvfs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 1024 * 1024
HOSTILE = os.fsdecode(
    b"a\nkvfs: forged\r\x1b[2J\x1b]0;t\x07\x00"[:-1]
    + "\u202e\u2028\x85\x0c".encode()
    + b"\xff\xfe\"'\\n $(id) {} %s"
)


def told(*arguments: str | os.PathLike[str], status: int = 0) -> list[str]:
    """The lines of both outputs: plain, whatever names are in them. In this process, since there
    are many; a mount has one of its own."""
    if arguments[0] == "mount":
        command = [KVFS, *arguments]
        result = subprocess.run(command, check=False, capture_output=True, timeout=COMMAND_SECONDS)
        text, ended = (result.stdout + result.stderr).decode(), result.returncode
    else:
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with (
            redirect_stdout(output),
            redirect_stderr(output),
            mock.patch.object(sys, "argv", ["kvfs", *map(os.fspath, arguments)]),
        ):
            ended = main.run(main.app, "kvfs")
        output.seek(0)
        text = output.read()
    assert ended == status, text
    assert all(c == "\n" or c.isprintable() for c in text)
    assert not any(line.startswith("kvfs: forged") for line in text.split("\n"))
    return text.removesuffix("\n").split("\n")


def make_session(path: Path) -> Path:
    path.mkdir()
    (path / "session.json").write_text(json.dumps({"fingerprint": {"dtype": HOSTILE}}))
    (path / HOSTILE).write_bytes(b"x")
    (path / "layer.000").write_bytes(b"x" * 100)
    os.setxattr(path, "user.kvfs.model", b"m\n\x1b[2J\xffkvfs: forged")
    return path


@given(st.text() | st.binary().map(os.fsdecode))
def test_what_is_printed_is_one_plain_line_and_no_two_names_look_the_same(name: str) -> None:
    shown = printable(name)
    assert shown.isprintable()
    plain = "".join(c if c.isprintable() and c != "\\" else "?" for c in name)
    assert len(shown) >= len(plain)
    back = shown.encode("latin-1", "backslashreplace").decode("unicode_escape")
    assert back == name


def test_every_verb_tells_names_as_plain_text(kv_mount: Path) -> None:
    session = make_session(kv_mount / HOSTILE)
    quoted = printable(HOSTILE)
    head, line = told("ls", kv_mount)
    assert head.startswith("session") and line.startswith(quoted)
    facts = told("stat", session)
    assert f"{session.parent}/{quoted}" in facts[0]
    assert sum(line.startswith(quoted) for line in facts) == 1
    assert any("m\\n\\x1b[2J" in line for line in facts)
    assert quoted in told("stat", session / HOSTILE, "--extents")[0]
    (made,) = told("fork", session, HOSTILE + "2")
    assert made == f"{kv_mount}/{quoted}2"
    missing = kv_mount / ("missing " + HOSTILE)
    for verb in ("ls", "stat"):
        assert told(verb, missing, status=1) == [
            f"kvfs: {kv_mount}/missing {quoted} does not exist"
        ]
    assert quoted in told("fork", session, HOSTILE + "2", status=1)[0]
    assert quoted in told("umount", missing, status=1)[0]
    listed = json.loads(kvfs("ls", kv_mount, "--json").stdout)
    assert [session["name"] for session in listed] == [HOSTILE, HOSTILE + "2"]
    assert json.loads(kvfs("stat", session, "--json").stdout)["files"][0]["name"] == HOSTILE


def test_a_description_that_is_none_is_passed_over(kv_mount: Path) -> None:
    (kv_mount / "private").write_text('{"rounds": [1], "fingerprint": {"dtype": "secret"}}')
    makers: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to(kv_mount / "private"),
        "directory": Path.mkdir,
        "long": lambda path: path.write_bytes(b" " * 64 * MIB + b"{}"),
        "deep": lambda path: path.write_bytes(b"[" * 100_000),
        "no text": lambda path: path.write_bytes(b"\xff{}"),
        "other": lambda path: path.write_bytes(b'{"rounds": 7, "fingerprint": ["dtype"]}'),
    }
    for name, make in makers.items():
        (kv_mount / name).mkdir()
        make(kv_mount / name / "session.json")
        facts = told("stat", kv_mount / name)
        assert not any(fact.startswith(("rounds", "model's")) for fact in facts)
    assert len(told("ls", kv_mount)) == 1 + len(makers)


def test_a_ring_and_a_mountpoint_may_have_any_name(mounter: Mounter) -> None:
    quoted = printable(HOSTILE)
    mounter.mountpoint, mounter.image = (mounter.directory / f"{w}{HOSTILE}" for w in ("m", "i"))
    mounter.mountpoint.mkdir()
    mounter.log = mounter.directory / HOSTILE
    told("mkfs", mounter.image, "--size", "16M")
    assert quoted in told("mkfs", mounter.image, status=1)[0]
    lines = told(
        "mount", mounter.mountpoint, mounter.image, "--warm-dir", mounter.warm_directory,
        "--log", mounter.log,
    )  # fmt: skip
    assert f"i{quoted} on {mounter.directory}/m{quoted}" in lines[0]
    mounter.adopt()
    mount = find_mount(mounter.mountpoint)
    assert mount is not None and mount.source == str(mounter.image)
    control = mounter.mountpoint / ".kvfs"
    assert json.loads((control / "stats.json").read_bytes())["source"] == str(mounter.image)
    assert list(text_string_to_metric_families((control / "metrics").read_text()))
    config = tomllib.loads((control / "config.toml").read_text())
    assert config["mountpoint"].encode() == os.fspath(mounter.mountpoint).encode(errors="replace")
    told("stat", mounter.mountpoint)
    assert quoted in told("ls", mounter.mountpoint)[0]
    assert quoted in told("fsck", mounter.image, status=8)[0]
    assert f"m{quoted}" in told("umount", mounter.mountpoint)[0]
    assert quoted in told("fsck", mounter.image)[0]
    for line in mounter.log.read_bytes().decode().removesuffix("\n").split("\n"):
        assert line.isprintable() and line[:2] == "20", line


def test_a_reclaimed_session_is_one_line_in_the_log_of_the_daemon_and_in_that_of_the_ring(
    mounter: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the daemon's parts without the daemon: it protects what was used a minute ago."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("kvfs.engine.reclaim")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # pytest would keep the name as it is, and xdist cannot send it.
    monkeypatch.setattr(logger, "propagate", False)
    try:
        reclaim(mounter.image, tmp_path, os.fsencode(HOSTILE))
    finally:
        logger.removeHandler(handler)
    (line,) = stream.getvalue().removesuffix("\n").split("\n")
    assert line.isprintable() and line.startswith(f"INFO reclaimed {printable(HOSTILE)} (")
    mounter.mount()
    _, line = told("log", mounter.mountpoint)
    assert f" {printable(HOSTILE)}  " in line
    assert json.loads(kvfs("log", mounter.mountpoint, "--json").stdout)[0]["path"] == HOSTILE
    assert len((mounter.mountpoint / ".kvfs" / "log").read_bytes().split(b"\n")) == 2


def reclaim(image: Path, directory: Path, name: bytes) -> None:
    device, executor = FileDevice(image), InlineExecutor()
    store = Store.open(device, "ring", executor, WarmTier(directory / "warm", 64 * MIB, executor))
    session = run(store.create(ROOT_INODE, name, 0o040700, 0, 0)).inode.ino
    run(store.create(session, b"session.json", 0o100600, 0, 0))
    run(store.checkpoint())
    later_ns = time.time_ns() + 3600 * 10**9
    assert run(
        store.reclaimer.remove(Victim(session, run(store.units.unit(session))), "x", later_ns)
    )
    run(store.close())
    device.close()


def test_an_exception_does_not_look_like_a_record() -> None:
    try:
        raise ValueError("a\n2026-01-01 00:00:00,000 INFO kvfs: forged\x1b[2J")
    except ValueError as fault:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "of %s", ("a\nb",), None)
        record.exc_info = (ValueError, fault, fault.__traceback__)
    first, *others = LineFormatter("%(asctime)s %(message)s").format(record).split("\n")
    assert first.endswith(r" of a\nb")
    assert others and all(line.startswith("  ") and line.isprintable() for line in others)

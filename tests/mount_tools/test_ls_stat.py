"""`kvfs ls` and `kvfs stat`: sessions, layers and the mount as a user sees them."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvfs.engine.ring import Geometry
from kvfs.mount.mounts import Mount
from mount_tools import ls as ls_module
from mount_tools.common import CommandError
from mount_tools.main import app
from mount_tools.segments import read_segments
from tests.conftest import MounterMaker
from tests.support.command import error_line
from tests.support.mounter import Mounter, kvfs
from tests.support.users import kvfs_as_nobody

TOKENS = 3000
ROW = (2, 3, 64)
ROW_BYTES = 2 * 2 * 3 * 64
MODEL = "SmolLM2 [tiny] 2x3x64 bfloat16 #1"


def values() -> np.ndarray:
    """What every layer holds: float32 that bfloat16 represents exactly."""
    random = np.random.default_rng(7).normal(size=(TOKENS, *ROW)).astype(np.float32)
    return (random.view(np.uint32) & 0xFFFF0000).view(np.float32)


def make_session(directory: Path, layers: int) -> None:
    """Layer files of bfloat16 as the adapter writes them."""
    directory.mkdir(parents=True)
    halves = (values().view(np.uint32) >> 16).astype(np.uint16)
    for number in range(layers):
        with (directory / f"layer.{number:03}").open("wb") as file:
            os.setxattr(file.fileno(), "user.kvfs.codec", b"planes")
            os.setxattr(file.fileno(), "user.kvfs.dtype", b"bfloat16")
            os.setxattr(file.fileno(), "user.kvfs.shape", b"2,3,64")
            file.write(halves.tobytes())
    (directory / "tokens").write_bytes(bytes(4 * TOKENS))
    fingerprint = {"layers": layers, "kv_heads": 3, "head_dim": 64, "dtype": "bfloat16"}
    description = {"version": 1, "fingerprint": fingerprint, "rounds": [1000, TOKENS]}
    (directory / "session.json").write_text(json.dumps(description))
    os.setxattr(directory, "user.kvfs.model", MODEL.encode())


@pytest.fixture(scope="module")
def mounter(fuse: None) -> Iterator[Mounter]:
    """Two sessions, one deep in the tree; a directory that is none; a raw layer file."""
    made = Mounter("256M")
    try:
        made.mount()
        make_session(made.mountpoint / "agent-1", 2)
        make_session(made.mountpoint / "team" / "deep" / "agent-2", 1)
        (made.mountpoint / "team" / "notes").mkdir()
        (made.mountpoint / "team" / "notes" / "file").write_bytes(b"plain bytes")
        (made.mountpoint / "loop").symlink_to(".")
        # One fsync commits all that was answered before it.
        fd = os.open(made.mountpoint / "team" / "notes" / "file", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        yield made
    finally:
        made.close()


def facts(output: str) -> dict[str, str]:
    lines = (line.split("  ", 1) for line in output.splitlines() if "  " in line)
    return {name.strip(): value.strip() for name, value in lines}


# -- ls


def test_sessions_are_listed_at_any_depth(mounter: Mounter) -> None:
    listed = json.loads(kvfs("ls", mounter.mountpoint, "--json").stdout)
    assert [session["name"] for session in listed] == ["agent-1", "team/deep/agent-2"]
    first, second = listed
    assert (first["tokens"], first["layers"]) == (TOKENS, 2)
    assert (second["tokens"], second["layers"]) == (TOKENS, 1)
    assert first["model"] == MODEL
    assert first["path"] == str(mounter.mountpoint / "agent-1")
    assert first["size"] > 2 * TOKENS * ROW_BYTES
    assert first["ratio"] == pytest.approx(first["size"] / first["stored"], abs=0.001)
    assert first["ratio"] > 1.3
    assert first["last_use"] == pytest.approx(os.stat(first["path"]).st_mtime, abs=60)


def test_the_table_is_plain_where_it_is_no_terminal(mounter: Mounter) -> None:
    header, first, second = kvfs("ls", mounter.mountpoint).stdout.splitlines()
    assert header.split() == [
        "session", "tokens", "layers", "size", "stored", "ratio", "tier", "heat", "last", "use",
        "model",
    ]  # fmt: skip
    assert first.startswith("agent-1 ")
    assert first.endswith(MODEL)
    assert second.startswith("team/deep/agent-2 ")


def test_a_part_of_the_tree_is_listed(mounter: Mounter) -> None:
    output = kvfs("ls", mounter.mountpoint / "team" / "deep", "--json").stdout
    assert [session["name"] for session in json.loads(output)] == ["agent-2"]
    notes = mounter.mountpoint / "team" / "notes"
    assert kvfs("ls", notes).stdout == f"no sessions in {notes}\n"
    assert json.loads(kvfs("ls", notes, "--json").stdout) == []


def test_without_a_mountpoint_the_only_one_is_taken(
    mounter: Mounter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = Mount(mounter.mountpoint, str(mounter.image), "0:0")
    monkeypatch.setattr(ls_module, "mounts", lambda: [mount])
    ls_module.ls(None, json_output=True)
    assert len(json.loads(capsys.readouterr().out)) == 2
    monkeypatch.setattr(ls_module, "mounts", lambda: [mount, mount])
    with pytest.raises(CommandError, match="several KVFS are mounted, name one"):
        ls_module.ls(None)
    monkeypatch.setattr(ls_module, "mounts", list)
    with pytest.raises(CommandError, match="no KVFS is mounted"):
        ls_module.ls(None)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--sort", "stored"), ["agent-1", "team/deep/agent-2"]),
        (("--sort", "stored", "--reverse"), ["team/deep/agent-2", "agent-1"]),
        (("--sort", "last-use"), ["team/deep/agent-2", "agent-1"]),
        (("--reverse",), ["team/deep/agent-2", "agent-1"]),
        (("--name", "team/*"), ["team/deep/agent-2"]),
        (("--model", "SMOL", "--tier", "warm"), ["agent-1", "team/deep/agent-2"]),
        (("--model", "llama"), []),
        (("--tier", "cold"), []),
        (("--older", "1h"), []),
        (("--older", "0s"), ["agent-1", "team/deep/agent-2"]),
        (("--pinned",), ["agent-1"]),
    ],
)
def test_sessions_are_sorted_and_filtered(
    mounter: Mounter,
    arguments: tuple[str, ...],
    names: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pinned = mounter.mountpoint / "agent-1"
    os.setxattr(pinned, "user.kvfs.pin", b"1")
    try:
        command = ["ls", str(mounter.mountpoint), "--json", *arguments]
        app(command, standalone_mode=False)
    finally:
        os.removexattr(pinned, "user.kvfs.pin")
    listed = json.loads(capsys.readouterr().out)
    assert [session["name"] for session in listed] == names
    assert [session["pinned"] for session in listed] == [name == "agent-1" for name in names]


def test_that_none_is_wanted_is_told_from_there_being_none(mounter: Mounter) -> None:
    output = kvfs("ls", mounter.mountpoint, "--older", "7d").stdout
    assert output == f"none of the 2 sessions in {mounter.mountpoint}\n"


def test_heat_is_that_of_the_mount(mounter: Mounter) -> None:
    used = mounter.mountpoint / "team" / "deep" / "agent-2"
    fd = os.open(used / "layer.000", os.O_RDONLY | os.O_DIRECT)
    os.preadv(fd, [mmap.mmap(-1, 4096)], 0)
    os.close(fd)
    hottest, other = json.loads(kvfs("ls", mounter.mountpoint, "--json", "--sort", "heat").stdout)
    assert hottest["name"] == "team/deep/agent-2"
    assert hottest["heat"] > other["heat"] > 0
    assert hottest["heat"] == pytest.approx(float(os.getxattr(used, "user.kvfs.heat")))


def test_names_of_any_bytes_are_listed(kv_mount_bytes: Path) -> None:
    assert kvfs("ls", kv_mount_bytes).stdout.splitlines()[1].startswith("a\\udcff\\nb ")


@pytest.fixture
def kv_mount_bytes(mounter: Mounter) -> Iterator[Path]:
    """A directory with a session whose name is neither UTF-8 nor one line."""
    top = mounter.mountpoint / "bytes"
    session = top / os.fsdecode(b"a\xff\nb")
    session.mkdir(parents=True)
    (session / "layer.000").touch()
    yield top
    (session / "layer.000").unlink()
    session.rmdir()
    top.rmdir()


def test_sessions_are_listed_beyond_the_longest_path(mounter: Mounter) -> None:
    top = mounter.mountpoint / "deep"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    names = ["d" * 250] * 20 + ["session"]
    for name in names:
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    layer = os.open("layer.000", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    os.write(layer, b"12345")
    os.close(layer)
    os.close(fd)
    try:
        result = kvfs("ls", top, "--json")
        (session,) = json.loads(result.stdout)
        assert session["name"] == "/".join(names)
        assert session["size"] == 5
        assert result.stderr == ""
    finally:
        subprocess.run(["rm", "-r", top], check=True)


def test_a_mount_below_is_another_ring(mounter: Mounter, make_mounter: MounterMaker) -> None:
    inner = make_mounter("64M")
    inner.mountpoint = mounter.mountpoint / "agent-1" / "inner"
    inner.mountpoint.mkdir()
    inner.mount()
    (inner.mountpoint / "layer.000").touch()
    os.kill(inner.pid, signal.SIGSTOP)
    try:
        listed = json.loads(kvfs("ls", mounter.mountpoint, "--json").stdout)
    finally:
        os.kill(inner.pid, signal.SIGCONT)
    assert [session["name"] for session in listed] == ["agent-1", "team/deep/agent-2"]
    inner.umount()
    inner.mountpoint.rmdir()


# -- other users


@pytest.fixture
def shared(make_mounter: MounterMaker) -> Mounter:
    """A mount that others may enter; one of its two sessions is closed to them."""
    made = make_mounter("64M")
    made.mount("-o", "allow_other")
    made.directory.chmod(0o755)
    made.mountpoint.chmod(0o755)
    for name, mode in (("open", 0o755), ("closed", 0o700)):
        make_session(made.mountpoint / name, 1)
        (made.mountpoint / name).chmod(mode)
    return made


def test_another_user_sees_what_is_open_to_it(mounter: Mounter, shared: Mounter) -> None:
    def names(result: subprocess.CompletedProcess[str]) -> list[str]:
        assert result.returncode == 0, result
        return [session["name"] for session in json.loads(result.stdout)]

    assert names(kvfs_as_nobody("ls", shared.mountpoint, "--json")) == ["open"]
    assert names(kvfs("ls", shared.mountpoint, "--json")) == ["closed", "open"]
    # `mounter` is mounted too, and is root's alone; others may be there as well.
    result = kvfs_as_nobody("ls")
    assert str(mounter.mountpoint) not in result.stdout + result.stderr
    assert "open" in result.stdout or str(shared.mountpoint) in result.stderr


def test_another_users_mount_is_refused_in_one_line(mounter: Mounter) -> None:
    mounter.directory.chmod(0o755)
    for verb in ("ls", "stat"):
        line = error_line(kvfs_as_nobody(verb, mounter.mountpoint))
        assert line == f"{mounter.mountpoint} belongs to another user; run as its owner"


# -- stat


def test_a_mount_tells_its_state(mounter: Mounter) -> None:
    document = json.loads(kvfs("stat", mounter.mountpoint, "--json").stdout)
    assert document["pid"] == mounter.pid
    assert document["mountpoint"] == str(mounter.mountpoint)
    assert document["source"] == str(mounter.image)
    assert {"uuid", "space", "counters", "errors"} <= document.keys()
    shown = facts(kvfs("stat", mounter.mountpoint).stdout)
    assert shown["pid"] == str(mounter.pid)
    assert shown["space.total"].endswith(" MiB")
    assert shown["damage"] == "-"


def test_a_session_is_summed_up(mounter: Mounter) -> None:
    session = mounter.mountpoint / "agent-1"
    summary, table = kvfs("stat", session).stdout.split("\n\n")
    shown = facts(summary)
    assert shown["model"] == MODEL
    assert shown["tokens"] == str(TOKENS)
    assert shown["rounds"] == "2"
    assert shown["model's kv_heads"] == "3"
    assert [line.split()[0] for line in table.splitlines()] == [
        "file",
        "layer.000",
        "layer.001",
        "session.json",
        "tokens",
    ]
    document = json.loads(kvfs("stat", session, "--json").stdout)
    assert document["kind"] == "session"
    assert len(document["files"]) == 4
    assert document["description"]["rounds"] == [1000, TOKENS]


def test_a_layer_is_decoded(mounter: Mounter) -> None:
    layer = mounter.mountpoint / "agent-1" / "layer.000"
    document = json.loads(kvfs("stat", layer, "--json").stdout)
    assert document["size"] == TOKENS * ROW_BYTES
    assert document["stored"] == os.stat(layer).st_blocks * 512
    assert (document["dtype"], document["shape"], document["tokens"]) == (
        "bfloat16",
        [*ROW],
        TOKENS,
    )
    assert list(document["codecs"]) == ["planes"]
    assert document["first_values"]["first K"] == values()[0, 0, 0, :6].tolist()
    assert document["first_values"]["first V"] == values()[0, 1, 0, :6].tolist()
    assert "extents" not in document
    shown = facts(kvfs("stat", layer).stdout)
    assert shown["shape of a row"] == "2 x 3 x 64"
    assert float(shown["ratio"]) > 1.3


def test_extents_cover_the_file(mounter: Mounter) -> None:
    layer = mounter.mountpoint / "agent-1" / "layer.000"
    document = json.loads(kvfs("stat", layer, "--extents", "--json").stdout)
    assert sum(extent["length"] for extent in document["extents"]) == document["size"]
    table = kvfs("stat", layer, "--extents").stdout.split("\n\n")[-1].splitlines()
    assert table[0].split() == ["offset", "length", "stored", "codec", "address"]
    assert len(table) == 1 + len(document["extents"])


def test_the_segments_that_a_file_lies_in_are_told(mounter: Mounter) -> None:
    layer = mounter.mountpoint / "agent-1" / "layer.001"
    document = json.loads(kvfs("stat", layer, "--extents", "--json").stdout)
    layout, extents = document["layout"], document["extents"]
    ring = read_segments(mounter.mountpoint)
    assert layout["extents"] == len(extents)
    assert 1 <= layout["runs"] <= len(extents)
    assert layout["stored"] == document["stored"]
    assert sum(part["stored"] for part in layout["parts"]) == layout["stored"]
    assert sum(part["share"] for part in layout["parts"]) == pytest.approx(1, abs=0.01)
    geometry = Geometry(ring.size, ring.count)
    assert {part["segment"] for part in layout["parts"]} == {
        geometry.segment(extent["address"]) for extent in extents
    }
    assert all(part["live_pct"] == ring.live_pct[part["segment"]] for part in layout["parts"])
    shown = facts(kvfs("stat", layer).stdout)
    assert shown["in the ring"].startswith(f"{len(extents)} extents in ")
    assert shown["segments"].startswith(f"{len(layout['parts'])} of {ring.count}: ")
    assert len(shown["ring"]) == 2 + min(64, ring.count)


def test_a_file_of_many_runs_is_told_so(mounter: Mounter) -> None:
    paths = [mounter.mountpoint / "team" / "notes" / name for name in ("one", "two")]
    for _ in range(3):  # in turns, each time brought into the ring
        for path in paths:
            with path.open("ab") as file:
                file.write(os.urandom(64 * 1024))
                file.flush()
                os.fsync(file.fileno())
    layout = json.loads(kvfs("stat", paths[0], "--json").stdout)["layout"]
    assert (layout["extents"], layout["runs"], layout["largest_run"]) == (3, 3, 64 * 1024)
    shown = facts(kvfs("stat", paths[0]).stdout)
    assert shown["in the ring"] == "3 extents in 3 runs, the longest 64.0 KiB"
    for path in paths:
        path.unlink()


def test_who_may_not_see_the_ring_sees_its_files_runs(shared: Mounter) -> None:
    layer = shared.mountpoint / "open" / "layer.000"
    fd = os.open(layer, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    layer.chmod(0o644)
    document = json.loads(kvfs_as_nobody("stat", layer, "--json").stdout)
    assert document["layout"]["runs"] >= 1
    assert document["layout"]["parts"] is None
    shown = facts(kvfs_as_nobody("stat", layer).stdout)
    assert "in the ring" in shown
    assert "segments" not in shown


def test_a_file_without_a_shape_has_sizes_only(mounter: Mounter) -> None:
    shown = facts(kvfs("stat", mounter.mountpoint / "team" / "notes" / "file").stdout)
    assert shown["size"] == "11 B (11 bytes)"
    assert "tokens" not in shown


@pytest.mark.parametrize(("dtype", "shape"), [("float8_e5m2", "2,3,64"), ("float32", "1000")])
def test_rows_that_cannot_be_decoded_are_shown_as_what_they_are(
    mounter: Mounter, dtype: str, shape: str
) -> None:
    file = mounter.mountpoint / "team" / "notes" / "file"
    os.setxattr(file, "user.kvfs.dtype", dtype.encode())
    os.setxattr(file, "user.kvfs.shape", shape.encode())
    shown = facts(kvfs("stat", file).stdout)
    assert shown["dtype"] == dtype
    assert not any(name.startswith("first") for name in shown)
    os.removexattr(file, "user.kvfs.dtype")
    os.removexattr(file, "user.kvfs.shape")


def test_what_cannot_be_shown_is_one_line(mounter: Mounter, tmp_path: Path) -> None:
    top = mounter.mountpoint
    expected = {
        tmp_path: "is not on KVFS; mount one with: kvfs mount MNT DEV",
        top / "missing": "does not exist",
        top / "team": "is no session; list those below it with: kvfs ls",
    }
    for path, message in expected.items():
        assert message in error_line(kvfs("stat", path, check=False))
    assert "--extents is for files" in error_line(kvfs("stat", top, "--extents", check=False))
    file = top / "agent-1" / "tokens"
    assert "look at a file with: kvfs stat" in error_line(kvfs("ls", file, check=False))


def test_all_extents_of_a_fragmented_file_are_shown(mounter: Mounter) -> None:
    path = mounter.mountpoint / "file"
    with path.open("wb") as file:
        for number in range(2000):
            file.seek(number * 8192)
            file.write(os.urandom(100))
            file.flush()
        os.fsync(file.fileno())
    assert len(os.getxattr(path, "user.kvfs.extents")) < 64 * 1024
    extents = json.loads(kvfs("stat", path, "--extents", "--json").stdout)["extents"]
    assert [extent["offset"] for extent in extents] == [number * 8192 for number in range(2000)]


def test_extents_far_apart_are_shown(mounter: Mounter) -> None:
    """Over more than is looked at at once, and over holes longer than the ring."""
    path = mounter.mountpoint / "file"
    places = [number << 20 for number in range(200)] + [(1 << 40) + (n << 26) for n in range(20)]
    with path.open("wb") as file:
        for place in places:
            file.seek(place)
            file.write(b"x")
            file.flush()
        file.truncate(1 << 60)
        os.fsync(file.fileno())
    extents = json.loads(kvfs("stat", path, "--extents", "--json").stdout)["extents"]
    assert [extent["offset"] for extent in extents] == places
    path.unlink()

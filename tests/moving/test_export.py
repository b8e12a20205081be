"""Sessions as files that others read, and files of others as sessions."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load_file, save_file

from mount_tools.common import CommandError
from mount_tools.export import export
from mount_tools.import_ import import_
from mount_tools.moving.entries import RefusedError
from tests.moving.sessions import left_behind, make_session, make_tree, shown
from tests.support.command import error_line
from tests.support.mounter import KVFS, kvfs

MIB = 1024 * 1024
SECONDS = 60


def exported(session: Path, file: Path, *, tar: bool = False, force: bool = False) -> Path:
    export(session, file, tar=tar, force=force, json_output=False)
    return file


def imported(file: Path, target: Path, *, force: bool = False) -> Path:
    import_(file, target, force=force, json_output=False)
    return target


def imported_bytes(data: bytes, target: Path) -> Path:
    fd = os.memfd_create("file")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    try:
        return imported(Path(f"/proc/self/fd/{fd}"), target)
    finally:
        os.close(fd)


# -- safetensors


def test_a_session_as_safetensors_is_what_the_library_reads(here: Path, tmp_path: Path) -> None:
    session = make_session(here / "agent", tokens=3000)
    (session / "fingerprint.r0").write_text('{"model": "m"}')
    (session / "layer.002").rename(session / "layer.002.r1")
    (session / "summary").write_bytes(b"plain bytes")
    data = exported(session, tmp_path / "agent.safetensors").read_bytes()
    tensors = dict(deserialize(data))
    assert sorted(tensors) == ["layer.000", "layer.001", "layer.002.r1", "summary", "tokens"]
    for name in ("layer.000", "layer.001", "layer.002.r1"):
        assert tensors[name]["dtype"] == "BF16"
        assert tensors[name]["shape"] == [3000, 2, 2, 16]
        assert bytes(tensors[name]["data"]) == (session / name).read_bytes()
    assert (tensors["tokens"]["dtype"], tensors["tokens"]["shape"]) == ("I32", [3000])
    assert (tensors["summary"]["dtype"], tensors["summary"]["shape"]) == ("U8", [11])
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    metadata = header["__metadata__"]
    assert metadata["session.json"] == (session / "session.json").read_text()
    assert metadata["fingerprint.r0"] == '{"model": "m"}'
    assert metadata["model"] == "a model 3x2x16 bfloat16 NHD #0"
    assert metadata["tokens"] == "3000"
    # Elements lie at multiples of their size.
    assert (len(data) - sum(len(tensor["data"]) for tensor in tensors.values())) % 8 == 0
    assert all(header[name]["data_offsets"][0] % 2 == 0 for name in tensors if "layer" in name)


def test_a_session_comes_back_from_safetensors_as_it_was(
    here: Path, there: Path, tmp_path: Path
) -> None:
    session = make_session(here / "agent", tokens=50_000)
    os.setxattr(session / "tokens", "user.any", b"\xff\0\n")
    (session / "empty").touch()
    (session / "layer.003").write_bytes(b"no whole row: x")
    os.setxattr(session / "layer.003", "user.kvfs.dtype", b"bfloat16")
    os.setxattr(session / "layer.003", "user.kvfs.shape", b"2,2,16")
    os.setxattr(session, "user.kvfs.codec", b"planes")
    os.setxattr(session, "user.kvfs.pin", b"1")
    file = exported(session, tmp_path / "agent.safetensors")
    assert shown(imported(file, there / "agent")) == shown(session)


def test_an_empty_session_and_one_without_tokens_come_back(
    here: Path, there: Path, tmp_path: Path
) -> None:
    (here / "nothing").mkdir(mode=0o700)
    make_session(here / "no tokens", tokens=0)
    for name in ("nothing", "no tokens"):
        file = exported(here / name, tmp_path / name)
        tensors = dict(deserialize(file.read_bytes()))
        assert all(one["shape"][0] == 0 for one in tensors.values())
        assert shown(imported(file, there / name)) == shown(here / name)


def test_what_the_library_wrote_becomes_a_session(there: Path, tmp_path: Path) -> None:
    data = {
        "layer.000": np.arange(5 * 2 * 2 * 16, dtype=np.float16).reshape(5, 2, 2, 16),
        "tokens": np.arange(5, dtype=np.int32),
        "a scalar": np.array(7.5),
        "of no type here": np.arange(3, dtype=np.uint16),
        "empty": np.empty(0, np.uint8),
    }
    file = tmp_path / "theirs.safetensors"
    save_file(data, file, {"session.json": "{}", "format": "np"})
    session = imported(file, there / "agent")
    assert sorted(os.listdir(session)) == sorted([*data, "session.json"])
    for name, array in data.items():
        assert (session / name).read_bytes() == array.tobytes()
    assert os.getxattr(session / "layer.000", "user.kvfs.dtype") == b"float16"
    assert os.getxattr(session / "layer.000", "user.kvfs.shape") == b"2,2,16"
    assert os.getxattr(session / "tokens", "user.kvfs.shape") == b"1"
    assert os.listxattr(session / "of no type here") == []
    again = load_file(exported(session, tmp_path / "ours"))
    assert np.array_equal(again["layer.000"], data["layer.000"])


def test_what_has_no_place_in_safetensors_is_refused_by_its_name(
    here: Path, tmp_path: Path
) -> None:
    session = make_session(here / "agent")
    for make, name in [
        (lambda path: path.mkdir(), "below"),
        (lambda path: os.symlink("tokens", path), "link"),
        (lambda path: os.link(session / "tokens", path), "second"),
        (lambda path: path.touch(), os.fsdecode(b"\xff")),
    ]:
        make(session / name)
        with pytest.raises(RefusedError, match=r"export .* with --tar"):
            exported(session, tmp_path / "file")
        path = session / name
        path.rmdir() if path.is_dir() else path.unlink()
    assert os.listdir(tmp_path) == []


def header(document: object, data: bytes = b"", length: int | None = None) -> bytes:
    packed = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(packed) if length is None else length) + packed + data


def one(start: int, end: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def entries_of(**told: object) -> dict[str, object]:
    root = {"mode": 0o700, "mtime_ns": 0, "xattrs": {}}
    return {
        "__metadata__": {"kvfs": "1", "entries": json.dumps({"": root, "a": {**root, **told}})},
        "a": one(0, 1),
    }


HOSTILE_TENSORS: dict[str, bytes] = {
    "huge": header({"a": one(0, 1)}, b"x", 1 << 60),
    "longer than the file": header({"a": one(0, 1)}, b"x", 1 << 20),
    "no JSON": header(b"{nonsense"),
    "deep": header(b'{"a":' + b"[" * 100_000),
    "a list": header(b"{}"[:1] + b'"a": 1}'),
    "absolute": header({"/tmp/kvfs-hostile": one(0, 1)}, b"x"),
    "upwards": header({"../kvfs-hostile": one(0, 1)}, b"x"),
    "below": header({"a/b": one(0, 1)}, b"x"),
    "dots": header({"..": one(0, 1)}, b"x"),
    "empty name": header({"": one(0, 1)}, b"x"),
    "control": header({"a\x1b[2J\n": one(0, 1)}, b"x"),
    "half a character": header(b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "long": header({"n" * 256: one(0, 1)}, b"x"),
    "overlap": header({"a": one(0, 4), "b": one(2, 6)}, b"123456"),
    "gap": header({"a": one(0, 2), "b": one(4, 6)}, b"123456"),
    "not from the beginning": header({"a": one(2, 4)}, b"1234"),
    "other length": header({"a": one(0, 4, "F32", [2])}, b"1234"),
    "backwards": header({"a": one(4, 0, shape=[0])}, b"1234"),
    "negative": header({"a": one(0, 4, shape=[-4])}, b"1234"),
    "product": header({"a": one(0, 0, shape=[1 << 62, 1 << 62, 0, 1])}, b"more"),
    "no numbers": header({"a": one(0, 4, shape=["4"])}, b"1234"),
    "true": header({"a": one(0, 1, shape=[True])}, b"1"),
    "unknown type": header({"a": one(0, 4, "Q9")}, b"1234"),
    "type of no text": header({"a": {**one(0, 4), "dtype": []}}, b"1234"),
    "twice": header(b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
                    b'"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "cut": header({"a": one(0, 9)}, b"1234"),
    "more": header({"a": one(0, 2)}, b"1234"),
    "metadata": header({"__metadata__": {"a": 1}}),
    "text and tensor": header({"__metadata__": {"session.json": ""}, "session.json": one(0, 0)}),
    "later": header({"__metadata__": {"kvfs": "2"}}),
    "entries": header({"__metadata__": {"kvfs": "1", "entries": "[1]"}}),
    "xattr that acts": header(entries_of(xattrs={"user.kvfs.fork": "x"}), b"x"),
    "xattr of the system": header(entries_of(xattrs={"trusted.x": "x"}), b"x"),
    "setuid": header(entries_of(mode=0o4755), b"x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE_TENSORS)
def test_a_hostile_file_of_tensors_is_refused_and_nothing_of_it_is_kept(
    there: Path, kind: str
) -> None:
    with pytest.raises(CommandError) as refused:
        imported_bytes(HOSTILE_TENSORS[kind], there / "agent")
    assert "\n" not in str(refused.value)
    assert os.listdir(there) == []
    assert not (there.parent / "kvfs-hostile").exists()
    assert not Path("/tmp/kvfs-hostile").exists()


def test_a_file_of_tensors_that_was_cut_anywhere_is_refused(
    here: Path, there: Path, tmp_path: Path
) -> None:
    session = make_session(here / "agent", tokens=40)
    data = exported(session, tmp_path / "file").read_bytes()
    draw = random.Random(0)
    for end in [0, 7, 8, 9, len(data) - 1, *(draw.randrange(len(data)) for _ in range(20))]:
        with pytest.raises(CommandError):
            imported_bytes(data[:end], there / "agent")
    assert os.listdir(there) == []


# -- tar


def test_a_tree_comes_back_from_an_archive_as_it_was(
    here: Path, there: Path, tmp_path: Path
) -> None:
    session = make_tree(here / "agent")
    os.setxattr(session, "user.kvfs.pin", b"1")
    file = exported(session, tmp_path / "agent.tar", tar=True)
    assert file.stat().st_size < 4 * MIB  # the hole is one
    assert shown(imported(file, there / "agent")) == shown(session)


def test_plain_tar_reads_an_archive_with_attributes_links_and_holes(
    here: Path, tmp_path: Path
) -> None:
    session = make_tree(here / "agent")
    os.utime(session / "tokens", ns=(1, 1_500_000_001))  # not before 1970: it takes that for later
    file = exported(session, tmp_path / "agent.tar", tar=True)
    (tmp_path / "out").mkdir()
    result = subprocess.run(
        ["tar", "x", "--xattrs", "-f", file, "-C", tmp_path / "out"], check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0
    # Of what is no UTF-8.
    assert {line.rpartition(" ")[2] for line in result.stderr.splitlines()} == {"'hdrcharset'"}
    assert shown(tmp_path / "out" / "agent") == shown(session)
    assert (tmp_path / "out" / "agent" / "sparse").stat().st_blocks < MIB // 512


@pytest.mark.parametrize("form", ["posix", "gnu"])
def test_what_plain_tar_wrote_becomes_a_session(here: Path, there: Path, form: str) -> None:
    session = make_tree(here / "agent")
    before = shown(session)
    options = ["--xattrs", "--sparse"] if form == "posix" else []
    for number, names in enumerate((["-C", here, "agent"], ["-C", session, "."])):
        command = ["tar", "c", f"--format={form}", *options, *names]
        data = subprocess.run(command, check=True, capture_output=True).stdout
        made = imported_bytes(data, there / f"agent-{number}")
        if form == "posix":
            assert shown(made) == before
        else:  # keeps whole seconds and no attributes
            with (made / "sparse").open("rb") as file:
                file.seek(1 << 26)
                assert file.read(3) == b"end"
            assert (made / "layer.000").read_bytes() == (session / "layer.000").read_bytes()


def test_an_archive_of_files_alone_becomes_a_session(there: Path) -> None:
    made = imported_bytes(archive(member("a/x", data=b"1"), member("a/y", data=b"2")), there / "s")
    assert sorted(os.listdir(made)) == ["x", "y"]


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, type_: bytes = tarfile.REGTYPE, data: bytes = b"", **more: object) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = type_, len(data), 0o644
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def archive(*members: Member) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as file:
        for info, data in members:
            file.addfile(info, io.BytesIO(data))
    return packed.getvalue()


DIRECTORY = member("a", tarfile.DIRTYPE, mode=0o755)
_WHOLE = archive(DIRECTORY, member("a/x", data=b"\0" * 512), member("a/y", data=b"y" * 600))
_SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a/x"}


def sparse(places: str, size: str = "4096") -> Member:
    data = places.encode().ljust(512, b"\0") + b"d" * 512
    return member("a/x", data=data, pax_headers={**_SPARSE, "GNU.sparse.realsize": size})


HOSTILE_ARCHIVES: dict[str, bytes] = {
    "absolute": archive(member("/tmp/kvfs-hostile", data=b"x")),
    "absolute below": archive(DIRECTORY, member("/tmp/kvfs-hostile", data=b"x")),
    "upwards": archive(DIRECTORY, member("a/../../kvfs-hostile", data=b"x")),
    "upwards at once": archive(member("../kvfs-hostile", data=b"x")),
    "two sessions": archive(DIRECTORY, member("b", tarfile.DIRTYPE, mode=0o755)),
    "like its name": archive(DIRECTORY, member("ab", data=b"x")),
    "character device": archive(DIRECTORY, member("a/d", tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "block device": archive(DIRECTORY, member("a/d", tarfile.BLKTYPE, devmajor=7)),
    "pipe": archive(DIRECTORY, member("a/p", tarfile.FIFOTYPE)),
    "link to all": archive(DIRECTORY, member("a/l", tarfile.SYMTYPE, linkname="/etc/passwd")),
    "link out": archive(DIRECTORY, member("a/l", tarfile.SYMTYPE, linkname="../kept")),
    "through a link": archive(
        DIRECTORY, member("a/d", tarfile.DIRTYPE, mode=0o755),
        member("a/l", tarfile.SYMTYPE, linkname="d"), member("a/l/x", data=b"x"),
    ),
    "name of outside": archive(DIRECTORY, member("a/l", tarfile.LNKTYPE, linkname="../kept")),
    "name of nothing": archive(DIRECTORY, member("a/l", tarfile.LNKTYPE, linkname="a/no")),
    "twice": archive(DIRECTORY, member("a/x", data=b"1"), member("a/x", data=b"2")),
    "in nothing": archive(DIRECTORY, member("a/no/x", data=b"1")),
    "control": archive(DIRECTORY, member("a/\x1b[2J", data=b"x")),
    "line": archive(DIRECTORY, member("a/x\nkvfs: y", data=b"x")),
    "long": archive(DIRECTORY, member("a/" + "n" * 256, data=b"x")),
    "xattr that acts": archive(
        DIRECTORY, member("a/x", pax_headers={"SCHILY.xattr.user.kvfs.fork": "x"})
    ),
    "time": archive(DIRECTORY, member("a/x", pax_headers={"mtime": "1e999999999"})),
    "no time": archive(DIRECTORY, member("a/x", pax_headers={"mtime": "nan"})),
    "huge header": archive(DIRECTORY, member("a/x", pax_headers={"comment": "c" * (9 * MIB)})),
    "map backwards": archive(DIRECTORY, sparse("2\n2048\n10\n0\n10\n")),
    "map beyond": archive(DIRECTORY, sparse("1\n4090\n512\n")),
    "map of more than there is": archive(DIRECTORY, sparse("1\n0\n4096\n")),
    "no map": archive(DIRECTORY, sparse("nonsense\n")),
    "a file alone": archive(member("", tarfile.REGTYPE)),
    "nothing": bytes(10240),
    "cut behind a member": _WHOLE[: 3 * 512],
    "cut in a member": _WHOLE[: 4 * 512 + 5],
    "cut in a header": _WHOLE[: 3 * 512 + 100],
    "flipped header": _WHOLE[: 3 * 512 + 10] + b"~" + _WHOLE[3 * 512 + 11 :],
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE_ARCHIVES)
def test_a_hostile_archive_is_refused_and_nothing_of_it_is_kept(there: Path, kind: str) -> None:
    (there / "kept").write_text("kept")
    with pytest.raises(CommandError) as refused:
        imported_bytes(HOSTILE_ARCHIVES[kind], there / "agent")
    assert "\n" not in str(refused.value)
    assert os.listdir(there) == ["kept"]
    assert (there / "kept").stat().st_nlink == 1
    assert not (there.parent / "kvfs-hostile").exists()
    assert not Path("/tmp/kvfs-hostile").exists()


# -- the command


def test_both_go_through_pipes_and_say_in_json_what_they_did(here: Path, there: Path) -> None:
    session = make_session(here / "agent")
    for options in ([], ["--tar"]):
        first = subprocess.run(
            [KVFS, "export", *options, "--json", session, "-"], check=True, capture_output=True,
            timeout=SECONDS,
        )  # fmt: skip
        told = json.loads(first.stderr)
        assert told["entries"] == 6 and told["size"] > 1.1 * MIB
        second = subprocess.run(
            [KVFS, "import", "--json", "-", there / f"a{len(options)}"], input=first.stdout,
            check=True, capture_output=True, timeout=SECONDS,
        )  # fmt: skip
        assert json.loads(second.stdout)["entries"] == 6
        assert shown(there / f"a{len(options)}") == shown(session)


def test_what_exists_is_replaced_only_by_force(here: Path, there: Path, tmp_path: Path) -> None:
    session, file = make_session(here / "agent"), tmp_path / "agent.safetensors"
    file.write_text("precious")
    with pytest.raises(CommandError, match="exists"):
        exported(session, file)
    assert file.read_text() == "precious"
    exported(session, file, force=True)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="is a directory"):
        exported(session, tmp_path, force=True)
    make_session(there / "agent", tokens=3)
    with pytest.raises(CommandError, match="exists"):
        imported(file, there / "agent")
    assert shown(imported(file, there / "agent", force=True)) == shown(session)
    assert os.listdir(tmp_path) == ["agent.safetensors"]
    assert os.listdir(there) == ["agent"]
    result = kvfs("import", KVFS, there / "other", check=False)
    assert "is neither a safetensors file nor a tar archive" in error_line(result)


def test_an_export_that_fails_leaves_no_half_file(here: Path, tmp_path: Path) -> None:
    session = make_session(here / "agent", tokens=50_000)
    before, after = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MIB, after))
    try:
        with pytest.raises(OSError, match="File too large"):
            exported(session, tmp_path / "agent.tar", tar=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, after))
    assert os.listdir(tmp_path) == []
    assert not left_behind(here)


def test_what_a_killed_export_left_is_removed_by_the_next_one(here: Path, tmp_path: Path) -> None:
    session = make_session(here / "agent", tokens=300_000)
    process = subprocess.Popen([KVFS, "export", session, tmp_path / "a"])
    while not any(path.stat().st_size for path in tmp_path.iterdir()):
        assert process.poll() is None, "it was too fast to be killed"
    process.kill()
    process.wait(SECONDS)
    assert len(left_behind(tmp_path)) == len(left_behind(here)) == 1
    assert os.listdir(tmp_path) == left_behind(tmp_path)
    exported(session, tmp_path / "b", tar=True)
    assert os.listdir(tmp_path) == ["b"]
    assert not left_behind(here)


def test_a_file_of_another_name_is_never_removed(here: Path, tmp_path: Path) -> None:
    session = make_session(here / "agent", tokens=3)
    (tmp_path / ".kvfs-other").touch()
    (tmp_path / "kvfs-moving-x").touch()
    exported(session, tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == [".kvfs-other", "a", "kvfs-moving-x"]


def test_no_more_memory_is_taken_than_some_chunks(here: Path, tmp_path: Path) -> None:
    session = make_session(here / "agent", tokens=300_000, layers=4)

    def peak(*arguments: str | Path) -> int:
        """In bytes, of a process that runs the command."""
        program = "import resource, sys; from mount_tools.main import app, run; "
        program += "assert run(app, 'kvfs') == 0; "
        program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        command = [sys.executable, "-c", program, *arguments]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(result.stderr.splitlines()[-1]) * 1024

    assert sum(path.stat().st_size for path in session.iterdir()) > 140 * MIB
    least, file = peak("--version"), tmp_path / "agent"
    assert peak("export", session, file) < least + 64 * MIB
    assert peak("import", file, here / "again") < least + 64 * MIB
    assert peak("export", "--tar", "--force", session, file) < least + 64 * MIB

"""The warm tier on a real mount: where bytes are, how they get there, and what maps them."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MounterMaker
from tests.support.calls import errno_of
from tests.support.mounter import Mounter

MIB = 1024 * 1024


def tier(path: Path) -> str:
    return os.getxattr(path, "user.kvfs.tier").decode()


def demote(path: Path) -> None:
    os.setxattr(path, "user.kvfs.demote", b"1")


def make_session(root: Path, name: str = "agent", layers: int = 4, size: int = MIB) -> Path:
    session = root / name
    session.mkdir()
    for number in range(layers):
        (session / f"layer.{number:03d}").write_bytes(content(name, number, size))
    return session


def content(name: str, number: int, size: int = MIB) -> bytes:
    seed = f"{name}/{number}/".encode()
    return (seed * (size // len(seed) + 1))[:size]


def map_of(fd: int | Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(os.getxattr(fd, "user.kvfs.map"))
    return answer


def map_of_all(directory: Path) -> dict[str, dict[str, Any]]:
    """Of the files of a directory, each as `map_of` gives it."""
    answer = map_of(directory)
    return {
        name: file
        | {
            "segments": [
                {"path": answer["paths"][number], "offset": offset, "length": length, "at": at}
                for number, offset, length, at in file["segments"]
            ]
        }
        for name, file in answer["files"].items()
    }


def mapped(answer: dict[str, Any]) -> bytes:
    """The bytes of a file as its warm segments have them."""
    found = bytearray(answer["size"])
    for segment in answer["segments"]:
        with open(segment["path"], "rb") as file:
            skip = segment["offset"] % mmap.ALLOCATIONGRANULARITY
            length, offset = skip + segment["length"], segment["offset"] - skip
            with mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ, offset=offset) as view:
                found[segment["at"] : segment["at"] + segment["length"]] = view[skip:]
    return bytes(found)


def read_past_the_page_cache(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        memory = mmap.mmap(-1, -(-path.stat().st_size // 4096) * 4096)
        return memory[: os.preadv(fd, [memory], 0)]
    finally:
        os.close(fd)


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- up and down


def test_what_is_written_is_warm_and_goes_down_and_comes_up(kv_mount: Path) -> None:
    session = make_session(kv_mount)
    layer = session / "layer.001"
    assert tier(session) == tier(layer) == "warm"
    demote(session)
    assert tier(session) == tier(layer) == "cold"
    assert read_past_the_page_cache(layer) == content("agent", 1)
    os.setxattr(layer, "user.kvfs.prefetch", b"1")
    wait_until(lambda: tier(layer) == "warm")
    assert tier(session) == "mixed"
    os.setxattr(session, "user.kvfs.prefetch", b"1")
    wait_until(lambda: tier(session) == "warm")
    for number in range(4):
        assert read_past_the_page_cache(session / f"layer.{number:03d}") == content("agent", number)


def test_a_file_whose_parts_begin_anywhere_comes_up(kv_mount: Path) -> None:
    session = kv_mount / "agent"
    session.mkdir()
    os.setxattr(session, "user.kvfs.codec", b"none")
    expected = b""
    for size in (5001, 70_003, 131, 9999):
        with open(session / "layer.000", "ab", buffering=0) as file:
            file.write(part := os.urandom(size))
            os.fsync(file.fileno())
        expected += part
    demote(session)
    assert mapped(map_of(session / "layer.000")) == expected
    assert tier(session) == "warm"


@pytest.mark.parametrize("codec", ["none", "zstd", "planes"])
@pytest.mark.parametrize("size", [1, 5000, 65536, MIB + 1, 3 * MIB])
def test_a_file_of_any_size_and_codec_comes_up_whole(kv_mount: Path, size: int, codec: str) -> None:
    session = kv_mount / "agent"
    session.mkdir()
    os.setxattr(session, "user.kvfs.codec", codec.encode())
    layer = session / "layer.000"
    layer.write_bytes(content("agent", 0, size))
    demote(layer)
    assert tier(layer) == "cold"
    assert mapped(map_of(layer)) == content("agent", 0, size)
    assert tier(layer) == "warm"
    assert read_past_the_page_cache(layer) == content("agent", 0, size)


def test_a_file_of_many_small_appends_goes_down_packed(
    make_mounter: MounterMaker, tmp_path: Path
) -> None:
    (tmp_path / "lru.toml").write_text('policy = "lru"\n')
    mounter = make_mounter("512M")
    mounter.mount("--warm", "96M", "--profile", str(tmp_path / "lru.toml"))
    kv_mount = mounter.mountpoint
    session = kv_mount / "agent"
    session.mkdir()
    expected = b""
    with open(session / "layer.000", "ab", buffering=0) as file:
        for number in range(40):
            part = os.urandom(10_000 + number)
            file.write(part)
            os.fsync(file.fileno())
            expected += part
    extents = json.loads(os.getxattr(session / "layer.000", "user.kvfs.extents"))
    assert len(extents) >= 40
    _demote_group_by_filling(kv_mount)
    wait_until(lambda: tier(session) == "cold")
    extents = json.loads(os.getxattr(session / "layer.000", "user.kvfs.extents"))
    assert len(extents) <= 4
    assert read_past_the_page_cache(session / "layer.000") == expected


def _demote_group_by_filling(root: Path) -> None:
    """Above the fill level the least recently used go."""
    for number in range(100):
        warm = json.loads((root / ".kvfs" / "stats.json").read_text())["warm"]
        if warm["taken"] > 0.85 * warm["limit"]:
            return
        make_session(root, f"other-{number}", 1, 2 * MIB)


@pytest.fixture
def kv_mount(make_mounter: MounterMaker) -> Path:
    mounter = make_mounter("512M")
    mounter.mount("--warm", "96M")
    return mounter.mountpoint


def test_a_writer_of_more_than_fits_is_slowed_and_not_failed(kv_mount: Path) -> None:
    """Three times the limit."""
    for number in range(36):
        (kv_mount / f"file.{number}").write_bytes(content("pool", number, 8 * MIB))
    stats = json.loads((kv_mount / ".kvfs" / "stats.json").read_text())
    assert stats["warm"]["taken"] <= stats["warm"]["limit"]
    assert stats["warm"]["evicted"] > 0
    for number in range(36):
        found = read_past_the_page_cache(kv_mount / f"file.{number}")
        assert found == content("pool", number, 8 * MIB)


def test_what_is_removed_gives_its_memory_back(kv_mount: Path) -> None:
    def taken() -> int:
        stats: dict[str, Any] = json.loads((kv_mount / ".kvfs" / "stats.json").read_text())
        return int(stats["warm"]["taken"])

    os.sync()
    before = taken()
    session = make_session(kv_mount, layers=8, size=2 * MIB)
    fd = os.open(session, os.O_RDONLY)
    os.fsync(fd)
    assert taken() >= before + 16 * MIB
    for layer in session.iterdir():
        layer.unlink()
    os.fsync(fd)
    os.close(fd)
    wait_until(lambda: taken() < before + 9 * MIB)  # the operation log has a chunk


def test_memory_of_a_session_that_went_down_is_used_again(kv_mount: Path) -> None:
    def warm(what: str) -> int:
        stats: dict[str, Any] = json.loads((kv_mount / ".kvfs" / "stats.json").read_text())
        return int(stats["warm"][what])

    first = make_session(kv_mount, layers=8, size=MIB)
    demote(first)
    wait_until(lambda: warm("spare") >= 4 * MIB)
    spare = warm("spare")
    second = make_session(kv_mount, "other", layers=8, size=MIB)
    assert warm("spare") < spare
    for session in (first, second):
        for number in range(8):
            found = read_past_the_page_cache(session / f"layer.{number:03d}")
            assert found == content(session.name, number, MIB)


def test_what_is_used_more_is_hotter(kv_mount: Path) -> None:
    def heat(path: Path) -> float:
        return float(os.getxattr(path, "user.kvfs.heat"))

    busy, idle = make_session(kv_mount, "busy"), make_session(kv_mount, "idle")
    for _ in range(10):
        read_past_the_page_cache(busy / "layer.001")
    assert heat(busy) > 2 * heat(idle) > 0
    assert heat(busy / "layer.001") > 2 * heat(busy / "layer.002")
    assert heat(kv_mount) == 0.0


# -- after a kill


def test_what_was_warm_is_warm_after_a_kill(make_mounter: MounterMaker) -> None:
    mounter = make_mounter("512M")
    mounter.mount()
    clean = make_session(mounter.mountpoint, "clean")
    fd = os.open(clean, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    dirty = make_session(mounter.mountpoint, "dirty")
    mounter.kill()
    mounter.mount()
    assert tier(clean) == tier(dirty) == "warm"
    assert mounter.stats()["warm"]["taken_over"] >= 4 * MIB
    for session in (clean, dirty):
        for number in range(4):
            layer = session / f"layer.{number:03d}"
            assert mapped(map_of(layer)) == content(session.name, number)
            assert read_past_the_page_cache(layer) == content(session.name, number)


def test_what_is_removed_after_a_kill_gives_its_memory_back(make_mounter: MounterMaker) -> None:
    """Also memory that it shares with what had been removed before."""
    mounter = make_mounter()
    mounter.mount()
    session = make_session(mounter.mountpoint)
    fd = os.open(session, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    (session / "layer.000").unlink()
    mounter.kill()
    mounter.mount()
    assert list(mounter.warm_directory.rglob("*.kvmap"))
    for path in session.iterdir():
        path.unlink()
    wait_until(lambda: not list(mounter.warm_directory.rglob("*.kvmap")))


def test_a_warm_copy_that_was_changed_behind_our_back_is_not_believed(
    make_mounter: MounterMaker,
) -> None:
    mounter = make_mounter("512M")
    mounter.mount()
    session = make_session(mounter.mountpoint, layers=1)
    fd = os.open(session, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    segment = map_of(session / "layer.000")["segments"][0]
    mounter.kill()
    with open(segment["path"], "r+b") as file:
        file.seek(segment["offset"] + 12_345)
        file.write(b"\xff")
    mounter.mount()
    assert read_past_the_page_cache(session / "layer.000") == content("agent", 0)
    assert mounter.stats()["warm"]["damaged"] == 1


def test_a_clean_end_leaves_nothing_in_the_tmpfs(mounter: Mounter) -> None:
    mounter.mount()
    make_session(mounter.mountpoint)
    mounter.umount()
    left = [path for path in mounter.warm_directory.rglob("*") if path.is_file()]
    assert left == []


def test_a_reader_leaves_what_it_found_in_the_tmpfs_and_nothing_else(
    make_mounter: MounterMaker,
) -> None:
    mounter = make_mounter("512M")
    mounter.mount()
    layer = make_session(mounter.mountpoint, layers=1) / "layer.000"
    mounter.umount()
    mounter.mount("-o", "ro")
    assert mapped(map_of(layer)) == content("agent", 0)
    mounter.umount()
    assert [path for path in mounter.warm_directory.rglob("*") if path.is_file()] == []
    mounter.mount()
    layer.with_name("dirty").write_bytes(b"dirty")
    mounter.kill()
    left = {path for path in mounter.warm_directory.rglob("*") if path.is_file()}
    mounter.mount("-o", "ro")
    assert mapped(map_of(layer)) == content("agent", 0)
    mounter.umount()
    assert {path for path in mounter.warm_directory.rglob("*") if path.is_file()} == left
    mounter.mount()
    assert layer.with_name("dirty").read_bytes() == b"dirty"


# -- maps


def test_what_was_mapped_stays_as_it_was(kv_mount: Path) -> None:
    """Whatever becomes of the file: overwritten, truncated, gone down, removed."""
    session = make_session(kv_mount)
    layer = session / "layer.000"
    with open(layer, "r+b", buffering=0) as file:
        answer = map_of(file.fileno())
        before = mapped(answer)
        file.write(b"x" * MIB)
        assert mapped(answer) == before == content("agent", 0)
        again = map_of(file.fileno())
        assert again["version"] != answer["version"]
        assert mapped(again) == b"x" * MIB
        file.truncate(1000)
        file.seek(1000)
        file.write(b"y" * 1000)
        assert mapped(map_of(file.fileno())) == b"x" * 1000 + b"y" * 1000
        demote(layer)
        assert mapped(answer) == before, "a lease lasts as long as the file is open"
    with open(answer["segments"][0]["path"], "rb") as warm:
        start = answer["segments"][0]["offset"]
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        view = mmap.mmap(warm.fileno(), MIB, prot=mmap.PROT_READ, offset=page)
    layer.unlink()
    demote(session)
    assert view[start - page :] == before[: MIB - (start - page)], "it outlives the eviction"


def test_an_append_of_small_parts_is_mapped_as_few_segments(kv_mount: Path) -> None:
    session = kv_mount / "agent"
    session.mkdir()
    expected = b""
    with open(session / "layer.000", "ab", buffering=0) as file:
        for _ in range(500):
            file.write(part := os.urandom(4096))
            expected += part
        answer = map_of(file.fileno())
    assert mapped(answer) == expected
    assert len(answer["segments"]) <= 12


def test_at_most_half_of_warm_is_leased(kv_mount: Path) -> None:
    """Beyond that, reads go through the mount."""
    opened = []
    refused = 0
    try:
        for number in range(10):
            session = make_session(kv_mount, f"s{number}", 1, 8 * MIB)
            opened.append(os.open(session / "layer.000", os.O_RDONLY))
            try:
                map_of(opened[-1])
            except OSError as failure:
                assert failure.errno == errno.ENODATA
                refused += 1
        stats = json.loads((kv_mount / ".kvfs" / "stats.json").read_text())["warm"]
        assert 0 < stats["leased"] <= stats["limit"] // 2
        assert refused > 0
    finally:
        for fd in opened:
            os.close(fd)
    stats = json.loads((kv_mount / ".kvfs" / "stats.json").read_text())["warm"]
    assert stats["leased"] == 0


def test_a_hole_is_not_mapped(kv_mount: Path) -> None:
    session = make_session(kv_mount)
    with open(session / "sparse", "wb") as file:
        file.truncate(MIB)
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        map_of(session / "sparse")
    assert "sparse" not in map_of_all(session)


def test_a_directory_shows_what_of_its_files_is_warm(kv_mount: Path) -> None:
    """One answer for a whole session; it brings nothing in."""
    session = make_session(kv_mount)
    (session / "below").mkdir()
    files = map_of_all(session)
    assert sorted(files) == [f"layer.{number:03d}" for number in range(4)]
    for number in range(4):
        name = f"layer.{number:03d}"
        assert files[name] == map_of(session / name)
        assert mapped(files[name]) == content("agent", number)
    demote(session)
    assert map_of_all(session) == {}
    assert tier(session) == "cold"
    wait_until(lambda: map_of(session / "layer.002"))
    (name,) = map_of_all(session)
    assert name == "layer.002"


def test_what_a_directory_shows_may_go_and_stays_as_it_was_for_who_mapped_it(
    kv_mount: Path,
) -> None:
    session = make_session(kv_mount)
    segments = map_of_all(session)["layer.003"]["segments"]
    stats = json.loads((kv_mount / ".kvfs" / "stats.json").read_text())["warm"]
    assert 4 * MIB <= stats["leased"] <= stats["taken"]
    parts = []
    for one in segments:
        with open(one["path"], "rb") as warm:
            skip = one["offset"] % mmap.ALLOCATIONGRANULARITY
            length, offset = one["length"] + skip, one["offset"] - skip
            view = mmap.mmap(warm.fileno(), length, prot=mmap.PROT_READ, offset=offset)
            parts.append(memoryview(view)[skip:])
    demote(session)
    assert tier(session) == "cold"
    wait_until(lambda: not any(os.path.exists(one["path"]) for one in segments))
    for number in range(4):
        make_session(kv_mount, f"other{number}")
    assert b"".join(parts) == content("agent", 3)


def test_a_session_of_many_turns_is_shown_whole(kv_mount: Path) -> None:
    """Each turn appends a little to each layer, and sees it in the ring."""
    session = kv_mount / "agent"
    session.mkdir()
    expected: dict[str, bytes] = {f"layer.{number:03d}": b"" for number in range(32)}
    for _ in range(50):
        for name in expected:
            with open(session / name, "ab", buffering=0) as file:
                file.write(part := os.urandom(3000))
            expected[name] += part
        fd = os.open(session / name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    assert {name: mapped(file) for name, file in map_of_all(session).items()} == expected


def test_a_directory_of_too_many_files_for_one_answer_says_so(kv_mount: Path) -> None:
    pool = kv_mount / "pool"
    pool.mkdir()
    for number in range(1025):
        (pool / f"{number}").touch()
    assert errno_of(map_of, pool) == errno.ENODATA


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_user_gets_no_map_and_cannot_open_warm_files(make_mounter: MounterMaker) -> None:
    mounter = make_mounter("512M")
    mounter.mount("-o", "allow_other")
    mounter.directory.chmod(0o755)
    mounter.mountpoint.chmod(0o755)
    session = make_session(mounter.mountpoint)
    session.chmod(0o755)
    layer = session / "layer.000"
    layer.chmod(0o644)
    path = map_of(layer)["segments"][0]["path"]
    script = (
        "import os, sys; os.setuid(65534)\n"
        "assert open(sys.argv[1], 'rb').read(1)\n"
        "for call in (lambda: os.getxattr(sys.argv[1], 'user.kvfs.map'),"
        " lambda: open(sys.argv[2], 'rb')):\n"
        "    try: call()\n"
        "    except OSError: continue\n"
        "    sys.exit(3)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, layer, path], check=False)
    assert result.returncode == 0

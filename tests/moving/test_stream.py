"""The stream by itself: whatever is done to it, it is what was sent, or refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine.codec import Layout
from mount_tools.common import CommandError
from mount_tools.moving.bytes import ahead
from mount_tools.moving.content import BLOCK, Content, Slice, changed_blocks, runs
from mount_tools.moving.entries import Entry, Kind, RefusedError
from mount_tools.moving.landing import landing
from mount_tools.moving.stream import (
    HEADER_SIZE,
    MAGIC,
    Begin,
    Data,
    End,
    Entered,
    Header,
    StreamWriter,
    read_stream,
)
from tests.moving.sessions import left_behind, make_session, receive_bytes, shown, stream_of

Told = tuple[object, ...]


def read_all(stream: bytes) -> list[Told]:
    """The frames, with copies of what lies in memory that is used again."""
    with tempfile.TemporaryFile() as file:
        file.write(stream)
        file.seek(0)
        with ahead(read_stream(file.fileno())) as frames:
            return [_told(frame) for frame in frames]


def _told(frame: object) -> Told:
    if isinstance(frame, Data):
        return "data", frame.offset, bytes(frame.data)
    return (frame,)


def written(work: Callable[[StreamWriter], None], *, compress: bool = False) -> bytes:
    with tempfile.TemporaryFile() as file:
        work(StreamWriter(file.fileno(), compress=compress))
        file.seek(0)
        return file.read()


def frames_of(stream: bytes) -> list[bytes]:
    found, at = [], len(MAGIC)
    while at < len(stream):
        header = Header(*Header.STRUCT.unpack_from(stream, at))
        end = at + HEADER_SIZE + header.stored
        found.append(stream[at:end])
        at = end
    return found


names = st.binary(min_size=1, max_size=20).filter(
    lambda name: b"/" not in name and min(name) >= 0x20 and 0x7F not in name and set(name) != {46}
)
entries = st.builds(
    Entry,
    path=st.lists(names, min_size=1, max_size=3).map(b"/".join),
    kind=st.just(Kind.FILE),
    mode=st.integers(0, 0o777),
    mtime_ns=st.integers(-(2**62), 2**62),
    size=st.just(8 * BLOCK),
    xattrs=st.dictionaries(names.map(b"user.".__add__), st.binary(max_size=50), max_size=3),
)
files = st.lists(
    st.tuples(entries, st.booleans(), st.lists(st.binary(min_size=1, max_size=300), max_size=3)),
    max_size=4,
)


@given(files, st.booleans(), st.integers(0, 2**128 - 1))
def test_what_is_read_is_what_was_written(
    sent: list[tuple[Entry, bool, list[bytes]]], compress: bool, content: int
) -> None:
    expected: list[Told] = [(Begin(7, (b"base", Content(content))),)]

    def work(writer: StreamWriter) -> None:
        writer.begin(Begin(7, (b"base", Content(content))))
        size = 0
        for entry, keeps, pieces in sent:
            writer.enter(entry, keeps=keeps)
            expected.append((Entered(entry, keeps),))
            for number, piece in enumerate(pieces):
                data = piece * 40
                writer.data(number * BLOCK, memoryview(data), Layout(2, 8))
                expected.append(("data", number * BLOCK, data))
                size += len(data)
        writer.end(Content(content))
        expected.append((End(len(sent), size, Content(content)),))

    assert read_all(written(work, compress=compress)) == expected


@pytest.fixture(scope="module")
def stream() -> bytes:
    """Of a session of two layers, without a mount."""

    def work(writer: StreamWriter) -> None:
        random = Random(1)
        writer.begin(Begin(4 * BLOCK))
        writer.enter(Entry(b"", Kind.DIRECTORY, 0o700, 5), keeps=False)
        for name in (b"layer.000", b"layer.001"):
            writer.enter(Entry(name, Kind.FILE, 0o600, 5, 2 * BLOCK), keeps=False)
            for block in range(2):
                data = memoryview(random.randbytes(BLOCK))
                writer.data(block * BLOCK, data, Layout())
        writer.end(Content(3))

    return written(work)


@settings(max_examples=200)
@given(st.data())
def test_a_stream_that_was_cut_flipped_or_reordered_is_refused(
    stream: bytes, data: st.DataObject
) -> None:
    frames = frames_of(stream)
    assert MAGIC + b"".join(frames) == stream
    kind = data.draw(st.sampled_from(["cut", "flipped", "swapped", "dropped", "twice", "longer"]))
    place = data.draw(st.integers(0, len(stream) - 1))
    one, other = (data.draw(st.integers(0, len(frames) - 1)) for _ in range(2))
    wrong = bytearray(stream)
    match kind:
        case "cut":
            del wrong[place:]
        case "flipped":
            wrong[place] ^= 1 << data.draw(st.integers(0, 7))
        case "swapped":
            frames[one], frames[other] = frames[other], frames[one]
            wrong[:] = MAGIC + b"".join(frames)
        case "dropped":
            del frames[one]
            wrong[:] = MAGIC + b"".join(frames)
        case "twice":
            frames.insert(other, frames[one])
            wrong[:] = MAGIC + b"".join(frames)
        case _:
            wrong += data.draw(st.binary(min_size=1, max_size=100))
    if bytes(wrong) == stream:
        return
    with pytest.raises(RefusedError):
        read_all(bytes(wrong))


@pytest.mark.parametrize("where", ["begin", "middle", "before the end", "end"])
def test_of_a_damaged_stream_nothing_arrives(here: Path, there: Path, where: str) -> None:
    session = make_session(here / "agent")
    kept = make_session(there / "kept")
    before = shown(kept)
    stream = stream_of(session)
    frames = frames_of(stream)
    at = {
        "begin": len(MAGIC) + 3,
        "middle": len(stream) // 2,
        "before the end": len(stream) - len(frames[-1]) - 1,
        "end": len(stream) - 1,
    }[where]
    flipped = bytearray(stream)
    flipped[at] ^= 4
    for wrong in (bytes(flipped), stream[:at]):
        for target in (there / "agent", kept):
            with pytest.raises(RefusedError):
                receive_bytes(target, wrong, force=True)
    assert os.listdir(there) == ["kept"]
    assert shown(kept) == before
    assert not left_behind(there)


def forged(entered: list[tuple[Entry, bool]], data: bytes = b"", content: int = 0) -> bytes:
    """What somebody who means harm may send, with all checksums right."""

    def work(writer: StreamWriter) -> None:
        writer.begin(Begin(0))
        for entry, keeps in entered:
            writer.enter(entry, keeps=keeps)
        if data:
            writer.data(0, memoryview(data), Layout())
        writer.end(Content(content))

    return written(work)


ROOT = (Entry(b"", Kind.DIRECTORY, 0o700, 0), False)


def a_file(path: bytes, size: int = 0, **more: object) -> tuple[Entry, bool]:
    return Entry(path, Kind.FILE, 0o600, 0, size, **more), False  # type: ignore[arg-type]


HOSTILE: dict[str, list[tuple[Entry, bool]]] = {
    "nothing": [],
    "no session": [a_file(b"x")],
    "the session is a file": [a_file(b"")],
    "absolute": [ROOT, a_file(b"/tmp/kvfs-hostile")],
    "upwards": [ROOT, a_file(b"../kvfs-hostile")],
    "inner upwards": [ROOT, a_file(b"a/../../kvfs-hostile")],
    "empty name": [ROOT, a_file(b"a//b")],
    "dot": [ROOT, a_file(b".")],
    "zero": [ROOT, a_file(b"a\0b")],
    "control": [ROOT, a_file(b"a\x1b[2J")],
    "long": [ROOT, a_file(b"n" * 256)],
    "twice": [ROOT, a_file(b"a"), a_file(b"a")],
    "two sessions": [ROOT, ROOT],
    "in nothing": [ROOT, a_file(b"no/a")],
    "in a file": [ROOT, a_file(b"a"), a_file(b"a/b")],
    "in a link": [
        ROOT, (Entry(b"d", Kind.DIRECTORY, 0o700, 0), False),
        (Entry(b"l", Kind.SYMLINK, 0o777, 0, target=b"d"), False), a_file(b"l/a"),
    ],
    "link out": [ROOT, (Entry(b"l", Kind.SYMLINK, 0o777, 0, target=b"../x"), False)],
    "link to all": [ROOT, (Entry(b"l", Kind.SYMLINK, 0o777, 0, target=b"/etc"), False)],
    "link round": [ROOT, (Entry(b"l", Kind.SYMLINK, 0o777, 0, target=b"a/../.."), False)],
    "name of nothing": [ROOT, (Entry(b"l", Kind.LINK, 0o600, 0, target=b"a"), False)],
    "name of outside": [ROOT, (Entry(b"l", Kind.LINK, 0o600, 0, target=b"../kept"), False)],
    "keeps nothing": [ROOT, (Entry(b"a", Kind.FILE, 0o600, 0), True)],
    "setuid": [ROOT, (Entry(b"a", Kind.FILE, 0o4755, 0), False)],
    "fork": [ROOT, a_file(b"a", xattrs={b"user.kvfs.fork": b"x"})],
    "hint": [ROOT, a_file(b"a", xattrs={b"user.kvfs.demote": b"1"})],
    "wrong shape": [ROOT, a_file(b"a", xattrs={b"user.kvfs.shape": b"0,x"})],
    "of the system": [ROOT, a_file(b"a", xattrs={b"security.capability": b"x"})],
    "known": [ROOT, a_file(b"a", xattrs={b"user.kvfs-content": b"x"})],
    "negative": [ROOT, a_file(b"a", -1)],
    "huge": [ROOT, a_file(b"a", 1 << 63)],
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_forged_is_refused_and_nothing_of_it_is_kept(there: Path, kind: str) -> None:
    (there / "kept").touch()
    with pytest.raises(RefusedError) as refused:
        receive_bytes(there / "agent", forged(HOSTILE[kind]))
    assert "\n" not in str(refused.value)
    assert os.listdir(there) == ["kept"]
    assert not (there.parent / "kvfs-hostile").exists()
    assert not Path("/tmp/kvfs-hostile").exists()


def test_data_that_is_not_of_its_file_is_refused(there: Path) -> None:
    for entered, data in [
        ([ROOT], b"x"),
        ([ROOT, a_file(b"a", 3)], b"four"),
        ([ROOT, a_file(b"a", 2 * BLOCK)], b"part of a block"),
        ([ROOT, a_file(b"a", 4)], b"four"),  # the content is another
    ]:
        with pytest.raises(RefusedError):
            receive_bytes(there / "agent", forged(entered, data))
    assert os.listdir(there) == []


def test_a_session_that_loses_files_while_it_is_made_is_not_made(there: Path) -> None:
    with (
        pytest.raises(CommandError, match="lost files"),
        landing(there / "agent", replace=False) as new,
    ):
        new.add(ROOT[0])
        new.add(a_file(b"a")[0])
        new.end_file()
        (new.path / "a").unlink()
        new.land()
    assert os.listdir(there) == []


# -- which blocks differ


slices = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 3 * BLOCK), st.integers(1, 3)), max_size=6
)


def _laid(parts: list[tuple[int, int, int]]) -> Iterator[Slice]:
    """Slices that do not overlap, of extents whose first byte has a place in the file."""
    at = 0
    for gap, length, extent in parts:
        at += gap * (BLOCK // 3)
        yield Slice(at, length, extent, at)
        at += length


@given(slices, slices)
def test_blocks_are_said_to_be_equal_only_where_every_byte_is_shared(
    mine: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]]
) -> None:
    ours, others = list(_laid(mine)), list(_laid(theirs))
    changed = set(changed_blocks(ours, others))

    def of_byte(parts: list[Slice], byte: int) -> tuple[int, int] | None:
        for part in parts:
            if part.offset <= byte < part.offset + part.length:
                return part.extent, part.skew + byte - part.offset
        return None

    ends = [edge for part in (*ours, *others) for edge in (part.offset, part.offset + part.length)]
    for byte in {place for end in ends for place in (end - 1, end) if place >= 0}:
        if of_byte(ours, byte) != of_byte(others, byte):
            assert byte // BLOCK in changed
    assert not changed_blocks(ours, ours)


@given(st.sets(st.integers(0, 12)), st.integers(0, 12 * BLOCK))
def test_runs_are_these_blocks_as_far_as_the_file_goes(blocks: set[int], size: int) -> None:
    found = runs(sorted(blocks), size)
    bytes_of = {n for start, end in found for n in range(start // BLOCK, -(-end // BLOCK))}
    assert bytes_of == {n for n in blocks if n * BLOCK < size}
    assert all(start < end <= size for start, end in found)
    assert all(a[1] < b[0] for a, b in pairwise(found))

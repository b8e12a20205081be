"""The check and the repair of a ring, one damage after the other."""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.check import Report, check
from kvfs.engine.check.load import load
from kvfs.engine.check.slots import read_slots
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    ROOT_INODE,
    SUPERBLOCK_ADDRESSES,
    FrameHeader,
    Inode,
    Pointer,
    Superblock,
)
from kvfs.engine.io import run
from kvfs.engine.store import Store
from tests.engine.audit import audit
from tests.engine.kit import (
    DIRECTORY,
    MIB,
    SYMLINK,
    Bench,
    failure_of,
    frames_written,
    new_device,
    noise,
    wipe,
)
from tests.support.devices import RecordingDevice

ANY_ROOT = "the root directory"


# -- what a ring shows -------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A file as its user sees it. `data` is None where it cannot be read."""

    mode: int
    nlink: int
    data: bytes | None
    xattrs: tuple[tuple[bytes, bytes | None], ...]


def shown(store: Store, directory: int = ROOT_INODE, path: str = "") -> dict[str, Shown]:
    """The whole tree, by path."""
    found = {}
    for _, entry in run(store.list_directory(directory, 0, 1 << 20)):
        name = f"{path}/{entry.name.decode()}"
        node = run(store.node(entry.ino))
        xattrs = [(x, run(store.xattr(entry.ino, x))) for x in run(store.xattr_names(entry.ino))]
        found[name] = Shown(
            node.inode.mode, node.inode.nlink, _data_of(store, node.inode), tuple(sorted(xattrs))
        )
        if node.is_directory:
            found |= shown(store, entry.ino, name)
    return found


def _data_of(store: Store, inode: Inode) -> bytes | None:
    if stat.S_ISLNK(inode.mode):
        return run(store.readlink(inode.ino))
    try:
        return bytes(run(store.read(inode.ino, 0, inode.size)))
    except OSError:
        return None


def populated(bench: Bench) -> None:
    """Files of all kinds in two directories and below, old and new, changed and removed."""
    for directory in (b"one", b"two"):
        parent = bench.make(directory, mode=DIRECTORY)
        for number in range(250):
            ino = bench.make(b"file-%d" % number, parent)
            bench.write(ino, noise(1000 + 10 * number, number + parent % 1000))
        below = bench.make(b"below", parent, DIRECTORY)
        bench.write(bench.make(b"deep", below), noise(300_000, 7))
        bench.make(b"empty", parent)
        bench.make(b"empty-directory", parent, DIRECTORY)
        bench.make(b"link", parent, SYMLINK, target=b"some/where")
        run(bench.store.link(bench.find(b"file-1", parent), below, b"second-name"))
        run(bench.store.set_xattr(bench.find(b"file-2", parent), b"user.x", b"value"))
        run(bench.store.checkpoint())
        bench.write(bench.find(b"file-3", parent), b"changed", 1000)
        run(bench.store.set_attributes(bench.find(b"file-4", parent), size=100))
        run(bench.store.set_attributes(bench.find(b"file-5", parent), size=50_000))
        run(bench.store.rename(parent, b"file-6", below, b"moved"))
        for number in range(10, 250, 5):
            run(bench.store.unlink(parent, b"file-%d" % number))
    run(bench.store.sync())


@dataclass
class Case:
    """A ring, what it shows, and places in it."""

    bench: Bench
    image: bytearray
    before: dict[str, Shown]

    @classmethod
    def of(cls, bench: Bench, *, close: bool = True) -> Case:
        before = shown(bench.store)
        if close:
            run(bench.store.close())
        return cls(bench, bytearray(bench.device.image), before)

    def damaged(self, *places: tuple[int, int]) -> RecordingDevice:
        """A copy in which these bytes are zeros."""
        image = bytearray(self.image)
        for address, length in places:
            wipe(image, address, length)
        return RecordingDevice(image)

    def nodes(self) -> list[Pointer]:
        device = RecordingDevice(bytearray(self.image))
        return load(device, read_slots(device, "ring")).base.trees.nodes

    def bitmap(self) -> list[Pointer]:
        device = RecordingDevice(bytearray(self.image))
        return list(load(device, read_slots(device, "ring")).base.checkpoint.bitmap)

    @property
    def superblock(self) -> Superblock:
        return read_slots(RecordingDevice(bytearray(self.image)), "ring").newest

    def show(self, device: RecordingDevice) -> dict[str, Shown]:
        """What a mount shows; it also has to be whole, and to take writes."""
        bench = self.reopened(device)
        found = shown(bench.store)
        bench.write(bench.make(b"new file"), noise(200_000))
        run(bench.store.sync())
        audit(bench.store)
        run(bench.store.close())
        return found

    def reopened(self, device: RecordingDevice) -> Bench:
        copy = RecordingDevice(bytearray(device.image))
        bench = Bench(self.bench.directory / "again", copy, boot=f"boot {id(copy)}")
        assert not bench.store.read_only
        return bench


def repaired(device: RecordingDevice) -> Report:
    """A check finds what a repair corrects, and a check after that finds nothing else than
    what is lost."""
    before = bytes(device.image)
    found = check(device, "ring")
    assert bytes(device.image) == before, "a check changes nothing"
    report = check(device, "ring", repair=True)
    assert found.findings == report.findings
    left = check(device, "ring")
    assert left.findings == report.lost
    assert (left.inodes, left.extents) == (report.inodes, report.extents)
    return report


def structures(report: Report) -> set[str]:
    return {finding.structure for finding in report.findings}


# -- what is in order --------------------------------------------------------------------


def test_an_empty_ring_is_clean() -> None:
    report = check(new_device(), "ring")
    assert report.is_clean and report.inodes == 0


@pytest.mark.parametrize("close", [True, False])
def test_a_ring_with_files_is_clean(bench: Bench, close: bool) -> None:
    populated(bench)
    case = Case.of(bench, close=close)
    device = case.damaged()
    report = check(device, "ring", repair=True)
    assert report.is_clean and not report.is_repaired
    assert device.image == case.image
    assert report.inodes == bench.store.usage().inodes
    assert report.data_bytes > 500_000


def test_what_is_no_ring_is_refused() -> None:
    with pytest.raises(DeviceError, match="no KVFS superblock"):
        check(RecordingDevice.of_size(16 * MIB), "ring")


NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["make", "write", "write", "cut", "remove", "rename", "link", "directory", "symlink",
             "xattr", "sync", "checkpoint", "clean", "reopen", "kill"]
        ),
        NAMES, NAMES, st.integers(0, 200_000),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, close=st.booleans())
def test_a_ring_after_any_history_is_clean(tmpfs: Path, steps: list[Any], close: bool) -> None:
    bench = Bench(tmpfs / f"history-{id(steps)}", boot=f"{id(steps)}")
    for step in steps:
        do(bench, *step)
    run(bench.store.sync())
    if close:
        run(bench.store.close())
    report = check(bench.device, "ring")
    assert report.findings == []
    assert report.inodes in (0, bench.store.usage().inodes)


def do(bench: Bench, what: str, one: bytes, two: bytes, number: int) -> None:
    """One step; what the tree does not allow is left out."""
    store = bench.store
    try:
        match what:
            case "make":
                bench.make(one)
            case "directory":
                bench.make(one, mode=DIRECTORY)
            case "symlink":
                bench.make(one, mode=SYMLINK, target=two)
            case "write":
                bench.write(bench.find(one), noise(number // 2 + 1, number), number)
            case "cut":
                run(store.set_attributes(bench.find(one), size=number))
            case "remove":
                run(store.unlink(ROOT_INODE, one))
            case "rename":
                run(store.rename(ROOT_INODE, one, ROOT_INODE, two, exchange=bool(number % 2)))
            case "link":
                run(store.link(bench.find(one), bench.find(two), one))
            case "xattr":
                run(store.set_xattr(bench.find(one), b"user." + two, b"v" * (number % 2000)))
            case "sync":
                run(store.sync())
            case "checkpoint":
                run(store.checkpoint())
            case "clean":
                run(store.clean())
            case "reopen":
                run(store.close())
                bench.open()
            case "kill":
                bench.open()
    except OSError as failure:
        assert failure.errno != errno.EIO


# -- superblocks, checkpoint, nodes, bitmap ------------------------------------------------


@pytest.fixture
def closed(bench: Bench) -> Case:
    """Both superblock slots lead to checkpoints of their own."""
    populated(bench)
    run(bench.store.checkpoint())
    run(bench.store.unlink(bench.find(b"one"), b"file-7"))
    bench.write(bench.find(b"file-8", bench.find(b"two")), b"newest")
    return Case.of(bench)


@pytest.fixture
def one_checkpoint(bench: Bench) -> Case:
    """Both lead to the same one, as after a mount that was killed; all frames are there."""
    populated(bench)
    run(bench.store.close())
    bench.open()
    return Case.of(bench, close=False)


@pytest.fixture
def turned(bench: Bench) -> Case:
    """The same, in a ring that was turned over since: frames of what is old are gone."""
    populated(bench)
    rubbish = bench.make(b"rubbish")
    for number in range(30):
        bench.write(rubbish, noise(700_000, number))
        run(bench.store.sync())
        run(bench.store.checkpoint())
    run(bench.store.unlink(ROOT_INODE, b"rubbish"))
    run(bench.store.close())
    bench.open()
    return Case.of(bench, close=False)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_lost_superblock_is_written_again(closed: Case, slot: int) -> None:
    device = closed.damaged((SUPERBLOCK_ADDRESSES[slot], BLOCK))
    report = repaired(device)
    assert [f.address for f in report.findings] == [SUPERBLOCK_ADDRESSES[slot]]
    assert device.image[DATA_START:] == closed.image[DATA_START:]
    assert closed.show(device) == closed.before


def test_a_superblock_in_the_wrong_slot_is_none(closed: Case) -> None:
    device = closed.damaged()
    newest = closed.superblock
    (other,) = set(SUPERBLOCK_ADDRESSES) - {newest.address}
    device.image[other : other + BLOCK] = replace(newest, generation=newest.generation - 2).pack()
    report = repaired(device)
    assert "belongs in the other slot" in report.findings[0].message
    assert closed.show(device) == closed.before


def test_a_superblock_of_another_ring_is_none(closed: Case) -> None:
    device = closed.damaged()
    newest = closed.superblock
    older = replace(newest, generation=newest.generation - 1, uuid=b"another ring    ")
    device.image[older.address : older.address + BLOCK] = older.pack()
    report = repaired(device)
    assert "of another ring" in report.findings[0].message
    assert closed.show(device) == closed.before


@pytest.mark.parametrize("kind", ["closed", "one_checkpoint"])
def test_a_lost_node_is_rebuilt(kind: str, request: pytest.FixtureRequest) -> None:
    """Each of them: from the other checkpoint, or from the frames in the ring."""
    case: Case = request.getfixturevalue(kind)
    nodes = case.nodes()
    assert len(nodes) > 4
    for node in nodes:
        device = case.damaged((node.address, BLOCK))
        report = repaired(device)
        assert report.findings[0].structure == "node"
        assert report.findings[0].address == node.address
        assert case.show(device) == case.before


@pytest.mark.parametrize("kind", ["closed", "one_checkpoint"])
def test_a_lost_checkpoint_is_rebuilt(kind: str, request: pytest.FixtureRequest) -> None:
    case: Case = request.getfixturevalue(kind)
    device = case.damaged((case.superblock.checkpoint.address, BLOCK))
    report = repaired(device)
    assert structures(report) == {"checkpoint"}
    assert case.show(device) == case.before


def test_all_nodes_lost_are_rebuilt_from_the_older_checkpoint(closed: Case) -> None:
    older = read_slots(RecordingDevice(bytearray(closed.image)), "ring").older
    assert older is not None
    device = closed.damaged()
    wanted = load(device, replace(read_slots(device, "ring"), newest=older, older=None))
    kept = {node.address for node in wanted.base.trees.nodes}
    lost = [node for node in closed.nodes() if node.address not in kept]
    assert len(lost) > 2
    device = closed.damaged(*[(node.address, BLOCK) for node in lost])
    repaired(device)
    assert closed.show(device) == closed.before


def test_a_lost_node_in_a_ring_that_was_turned_over_costs_no_data(turned: Case) -> None:
    """Names may be lost, and are found in lost+found; what was deleted stays deleted."""
    for node in turned.nodes():
        device = turned.damaged((node.address, BLOCK))
        repaired(device)
        found = turned.show(device)
        assert contents(turned.before) <= contents(found)
        assert not [name for name in found if name.endswith("file-10")]
        for path in found.keys() - turned.before.keys():
            assert path.startswith("/lost+found"), path


def contents(files: dict[str, Shown]) -> set[bytes]:
    """Of all regular files with bytes in them."""
    return {f.data for f in files.values() if stat.S_ISREG(f.mode) and f.data is not None}


def test_a_part_of_the_bitmap_that_is_lost_is_made_anew(closed: Case) -> None:
    (part,) = closed.bitmap()
    device = closed.damaged((part.address, BLOCK))
    assert structures(repaired(device)) == {"bitmap"}
    assert closed.show(device) == closed.before


def test_a_bitmap_that_is_wrong_is_made_anew(bench: Bench) -> None:
    populated(bench)
    before = shown(bench.store)
    bench.store._writer.ring.liveness.mark(DATA_START + 12 * MIB, 5 * BLOCK)
    run(bench.store.close())
    report = repaired(bench.device)
    assert [str(f) for f in report.findings] == [
        "bitmap: part 0 calls 5 blocks live that are not, and 0 dead"
    ]
    assert Case(bench, bytearray(), before).show(bench.device) == before


def test_a_node_that_is_whole_and_wrong_is_rebuilt(closed: Case) -> None:
    """A lost write: an older node is where the root should be, whole in itself."""
    root, child, *_ = closed.nodes()
    device = closed.damaged()
    other = device.image[child.address : child.address + BLOCK]
    device.image[root.address : root.address + BLOCK] = other
    assert structures(repaired(device)) == {"node"}
    assert closed.show(device) == closed.before


# -- the log -------------------------------------------------------------------------------


@pytest.fixture
def logged(bench: Bench) -> list[FrameHeader]:
    """Files a to f, each in a frame of its own that was flushed."""
    bench.make(b"d", mode=DIRECTORY)
    run(bench.store.checkpoint())
    start = len(frames_written(bench.device))
    for name in (b"a", b"b", b"c", b"e", b"f"):
        bench.write(bench.make(name), noise(9000, ord(name)))
        run(bench.store.sync())
    return frames_written(bench.device)[start:]


def test_a_torn_end_of_the_log_is_no_error(bench: Bench, logged: list[FrameHeader]) -> None:
    bench.write(bench.make(b"torn"), noise(9000))
    bench.write_out()
    last = frames_written(bench.device)[-1]
    assert last.sequence == logged[-1].sequence + 1
    for place in (0, BLOCK):
        device = Case.of(bench, close=False).damaged((last.address + place, BLOCK))
        assert check(device, "ring", repair=True).is_clean


@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("part", ["header", "table"])
def test_what_is_whole_behind_a_damaged_frame_of_the_log_counts(
    bench: Bench, logged: list[FrameHeader], number: int, part: str
) -> None:
    """All of it had been flushed. Only the damaged frame's own file is missing."""
    case = Case.of(bench, close=False)
    frame = logged[number]
    skip = 0 if part == "header" else 200
    device = case.damaged((frame.address + skip, 100))
    report = repaired(device)
    assert "log" in structures(report)
    lost = sorted(case.before.keys() - {"/d"})[number]
    expected = {path: file for path, file in case.before.items() if path != lost}
    assert case.show(device) == expected


def test_a_frame_of_the_log_with_bad_data_keeps_the_rest(
    bench: Bench, logged: list[FrameHeader]
) -> None:
    case = Case.of(bench, close=False)
    device = case.damaged((logged[1].address + BLOCK, 512))
    report = repaired(device)
    assert structures(report) == {"log", "data"}
    assert [f.path for f in report.lost] == ["/b"]
    bench = case.reopened(device)
    assert failure_of(bench.store.read(bench.find(b"b"), 0, 1)) == errno.EIO
    found = shown(bench.store)
    assert {p: f for p, f in found.items() if p != "/b"} == {
        p: f for p, f in case.before.items() if p != "/b"
    }


def test_the_last_flushed_frame_lost_is_a_torn_end(bench: Bench, logged: list[FrameHeader]) -> None:
    """No later frame says that it had been flushed."""
    case = Case.of(bench, close=False)
    device = case.damaged((logged[-1].address, BLOCK))
    assert check(device, "ring").is_clean
    assert case.show(device).keys() == case.before.keys() - {"/f"}


def test_data_whose_names_were_in_a_lost_frame_goes_to_lost_and_found(bench: Bench) -> None:
    """A commit unit of several frames: data in the first, inode, name and map in the last."""
    run(bench.store.checkpoint())
    start = len(frames_written(bench.device))
    data = noise(2 * MIB, 5)
    bench.write(bench.make(b"long"), data)
    run(bench.store.sync())
    bench.write(bench.make(b"after"), b"after")
    run(bench.store.sync())
    frames = frames_written(bench.device)[start:]
    (last,) = [f for f in frames[:-1] if not f.flags]
    case = Case.of(bench, close=False)
    device = case.damaged((last.address, BLOCK))
    repaired(device)
    found = case.show(device)
    assert found["/after"] == case.before["/after"]
    (path,) = [p for p in found if p.startswith("/lost+found/#")]
    part = found[path].data
    assert part is not None and len(part) > MIB and data.startswith(part)

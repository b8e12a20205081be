"""The check and the repair of a ring, one damage after the other."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.check import Finding, Report, check
from kvfs.engine.check.load import Loaded, load
from kvfs.engine.check.slots import Slots, read_slots
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    REFERENCES,
    ROOT_INODE,
    SUPERBLOCK_ADDRESSES,
    Counts,
    Dentry,
    Extent,
    FrameHeader,
    Inode,
    Item,
    Pointer,
    Slice,
    Superblock,
    counts_key,
    dentry_key,
    extent_key,
    inode_key,
    map_key,
    name_slot,
    orphan_key,
    references_key,
    symlink_key,
    xattr_key,
)
from kvfs.engine.io import run
from kvfs.engine.store import Store
from kvfs.engine.vault import Vault
from tests.engine.audit import audit
from tests.engine.kit import (
    DIRECTORY,
    MIB,
    SYMLINK,
    Bench,
    failure_of,
    flip,
    frames_written,
    new_device,
    noise,
    wipe,
)
from tests.support.devices import RecordingDevice
from tests.support.encrypted import KEY

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
        return loaded(device).base.trees.nodes

    def bitmap(self) -> list[Pointer]:
        device = RecordingDevice(bytearray(self.image))
        return list(loaded(device).base.checkpoint.bitmap)

    @property
    def superblock(self) -> Superblock:
        return read_slots(RecordingDevice(bytearray(self.image)), "ring").newest

    def show(self, device: RecordingDevice) -> dict[str, Shown]:
        """What a mount shows; it also takes writes, and is in order after that."""
        lost = check(device, "ring").lost
        bench = self.reopened(device)
        found = shown(bench.store)
        bench.write(bench.make(b"new file"), noise(200_000))
        run(bench.store.sync())
        if not lost:
            audit(bench.store)
        run(bench.store.close())
        assert check(bench.device, "ring").findings == lost
        return found

    def reopened(self, device: RecordingDevice) -> Bench:
        copy = RecordingDevice(bytearray(device.image))
        bench = Bench(self.bench.directory / "again", copy, boot=f"boot {id(copy)}")
        assert not bench.store.read_only
        return bench


def loaded(device: RecordingDevice, slots: Slots | None = None) -> Loaded:
    slots = slots or read_slots(device, "ring")
    return load(device, slots, Vault.unlock(slots.newest, KEY, "ring"))


def repaired(device: RecordingDevice) -> Report:
    """A check finds what a repair corrects, and a check after that finds nothing else than
    what is lost."""
    before = bytes(device.image)
    found = check(device, "ring")
    assert bytes(device.image) == before, "a check changes nothing"
    report = check(device, "ring", repair=True)
    assert found.findings == report.findings
    left = check(device, "ring")
    # What is lost may have been carried elsewhere, as it is.
    assert anywhere(left.findings) == anywhere(report.lost)
    assert (left.inodes, left.extents) == (report.inodes, report.extents)
    return report


def anywhere(findings: list[Finding]) -> list[Finding]:
    return [replace(finding, address=None) for finding in findings]


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
             "xattr", "fork", "sync", "checkpoint", "clean", "reopen", "kill"]
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
                bench.make(one, ROOT_INODE if number % 2 else bench.find(two))
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
            case "fork":
                run(store.fork(bench.find(one), two))
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
    wanted = loaded(device, replace(read_slots(device, "ring"), newest=older, older=None))
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
        assert contents(turned.before) == contents(found)
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
    bench.store._appender.ring.liveness.mark(DATA_START + 12 * MIB, 5 * BLOCK)
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


# -- file data -----------------------------------------------------------------------------


def test_an_extent_with_bad_bytes_is_told_and_stays_an_error(closed: Case) -> None:
    bench = closed.reopened(closed.damaged())
    ino = bench.find(b"deep", bench.find(b"below", bench.find(b"two")))
    *_, extent = run(bench.store.extents(ino, 0, 300_000))
    device = closed.damaged()
    flip(device.image, extent.address + 77)
    before = bytes(device.image)
    report = repaired(device)
    (finding,) = report.findings
    assert finding.path == "/two/below/deep" and finding.is_lost
    assert finding.address == extent.address and "fail their checksum" in finding.message
    assert not report.is_repaired and device.image == before
    bench = closed.reopened(device)
    start = 300_000 - extent.size
    assert bench.read(ino, 0, start) == noise(300_000, 7)[:start]
    assert failure_of(bench.store.read(ino, start, 1)) == errno.EIO


def test_sectors_that_cannot_be_read_are_told(closed: Case) -> None:
    """Those of one extent do not hide its neighbours."""
    bench = closed.reopened(closed.damaged())
    ino = bench.find(b"file-21", bench.find(b"one"))
    (extent,) = run(bench.store.extents(ino, 0, 1))
    device = closed.damaged()

    def fail(kind: str, address: int, length: int) -> None:
        if kind == "read" and address <= extent.address < address + length:
            raise OSError(errno.EIO, "a sector is bad")

    device.fail = fail
    report = check(device, "ring")
    assert [f.path for f in report.lost] == [f.path for f in report.findings] == ["/one/file-21"]


def test_what_lies_behind_unreadable_frames_is_carried_elsewhere(closed: Case) -> None:
    """The index knows where it is; but cleaning would not find it."""
    bench = closed.reopened(closed.damaged())
    ring = bench.store._appender.ring
    ino = bench.find(b"deep", bench.find(b"below", bench.find(b"two")))
    (extent, *_) = run(bench.store.extents(ino, 0, 300_000))
    segment = ring.geometry.segment(extent.address)
    device = closed.damaged((ring.geometry.address(segment), 100))
    report = repaired(device)
    assert structures(report) == {"segment"} and not report.lost
    assert closed.show(device) == closed.before
    bench = closed.reopened(device)
    assert bench.store._appender.ring.live_bytes(segment) == 0


# -- items that contradict each other ------------------------------------------------------


@dataclass
class Crafted:
    """Numbers of files in a ring, for items that are wrong."""

    bench: Bench
    directory: int
    below: int
    file: int
    other: int
    symlink: int

    @classmethod
    def of(cls, bench: Bench) -> Crafted:
        directory = bench.make(b"directory", mode=DIRECTORY)
        below = bench.make(b"below", directory, DIRECTORY)
        file, other = (bench.make(name, directory) for name in (b"file", b"other"))
        symlink = bench.make(b"symlink", directory, SYMLINK, target=b"target")
        bench.write(file, noise(200_000, 1))
        bench.write(other, noise(5000, 2))
        run(bench.store.set_xattr(file, b"user.x", b"value"))
        run(bench.store.sync())
        return cls(bench, directory, below, file, other, symlink)

    def slot(self, name: bytes) -> int:
        return name_slot(self.bench.store._writer.index.vault.hash_key, name)

    def inode(self, ino: int, **changes: Any) -> Item:
        return inode_key(ino), replace(run(self.bench.store.node(ino)).inode, **changes).pack()

    def name(self, directory: int, name: bytes, ino: int, type_: int = stat.S_IFREG) -> Item:
        return dentry_key(directory, self.slot(name)), Dentry(ino, type_, name).pack()

    def no_name(self, directory: int, name: bytes) -> Item:
        return dentry_key(directory, self.slot(name)), None

    def extent(self, ino: int) -> Extent:
        return run(self.bench.store.extents(ino, 0, 1))[0]

    def repaired(self, *items: Item) -> tuple[Report, dict[str, Shown]]:
        """With these items in the index."""
        store = self.bench.store
        before = shown(store)
        store._writer.index.apply(sorted(items))
        store._state.nodes._nodes.clear()
        run(store._writer.checkpoint())
        image = bytearray(self.bench.device.image)
        report = repaired(self.bench.device)
        assert report.is_repaired
        self.before = before
        return report, Case(self.bench, image, before).show(self.bench.device)


@pytest.fixture
def crafted(bench: Bench) -> Crafted:
    return Crafted.of(bench)


Wrong = Callable[[Crafted], list[Item]]

# Wrong items that a repair sets right, so that nobody sees a difference: what is told.
HARMLESS: dict[str, tuple[Wrong, str]] = {
    "links": (lambda c: [c.inode(c.file, nlink=7)], "counts 7 links, there are 1"),
    "links of a directory": (lambda c: [c.inode(c.directory, nlink=9)], "counts 9 links"),
    "stored": (lambda c: [c.inode(c.file, stored=1)], "says it takes 1 bytes"),
    "parent": (lambda c: [c.inode(c.below, parent=ROOT_INODE)], "does not know its directory"),
    "counts": (lambda c: [(counts_key(), Counts(99, 2).pack())], "99 inodes"),
    "made": (lambda c: [(counts_key(), Counts(6, 0).pack())], "0 directories made"),
    "no counts": (lambda c: [(counts_key(), None)], "0 inodes"),
    "references": (
        lambda c: [(references_key(c.extent(c.file).extent_id), REFERENCES.pack(3))],
        "says 3 references, there are 1",
    ),
    "orphan with a name": (lambda c: [(orphan_key(c.file), b"")], "noted as one"),
    "orphan without inode": (lambda c: [(orphan_key(1 << 50), b"")], "noted as one"),
    "type of a name": (
        lambda c: [c.name(c.directory, b"file", c.file, stat.S_IFDIR)],
        "another type of file",
    ),
    "slot of a name": (
        lambda c: [
            c.no_name(c.directory, b"file"),
            (dentry_key(c.directory, 512), Dentry(c.file, stat.S_IFREG, b"file").pack()),
        ],
        "not where its hash says",
    ),
    "name twice": (
        lambda c: [
            (
                dentry_key(c.directory, c.slot(b"file") + 1),
                Dentry(c.file, stat.S_IFREG, b"file").pack(),
            )
        ],
        "is there twice",
    ),
    "name without inode": (lambda c: [c.name(c.directory, b"ghost", 1 << 50)], "which is gone"),
    "name of the root": (
        lambda c: [c.name(c.directory, b"up", ROOT_INODE, stat.S_IFDIR)],
        "leads to the root",
    ),
    "no name": (lambda c: [c.name(c.directory, b"a/b", c.file)], "is no name"),
    "name in a file": (lambda c: [c.name(c.file, b"x", c.other)], "is no directory"),
    "directory in two places": (
        lambda c: [c.name(ROOT_INODE, b"second", c.below, stat.S_IFDIR)],
        "in two places",
    ),
    "lost name": (lambda c: [c.no_name(c.directory, b"file")], "has no name"),
    "lost name of a directory": (lambda c: [c.no_name(c.directory, b"below")], "has no name"),
    "lost name of the directory above": (
        lambda c: [c.no_name(ROOT_INODE, b"directory")],
        "has no name",
    ),
    "xattr without inode": (lambda c: [(xattr_key(1 << 50, 512), b"\1xv")], "no inode"),
    "target without symlink": (lambda c: [(symlink_key(c.file), b"x")], "no symlink"),
    "slice of nothing": (
        lambda c: [(map_key(c.file, 200_000), Slice(0, 50, 1 << 40, 0).pack())],
        "do not fit",
    ),
    "map of a directory": (
        lambda c: [(map_key(c.below, 0), Slice(0, 50, c.extent(c.file).extent_id, 0).pack())],
        "no regular file",
    ),
    "extent of no file": (
        lambda c: [(extent_key(777), Extent(777, DATA_START + MIB * 9, 5, 5, 0, 1, 0).pack())],
        "used by no file",
    ),
    "extent outside": (
        lambda c: [(extent_key(777), Extent(777, 1 << 40, 5, 5, 0, 1, 0).pack())],
        "where no extent can be",
    ),
    "unknown item": (lambda c: [(inode_key(c.file)[:9] + b"\x77" + bytes(8), b"x")], "decoded"),
    "cut item": (lambda c: [(xattr_key(c.file, 512), b"\x09x")], "cannot be decoded"),
    "id above the floor": (
        lambda c: [
            (extent_key(1 << 40), Extent(1 << 40, DATA_START + MIB * 9, 5, 5, 0, 1, 0).pack())
        ],
        "is in use, the next one is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HARMLESS)
def test_wrong_items_are_set_right(crafted: Crafted, what: str) -> None:
    wrong, message = HARMLESS[what]
    report, found = crafted.repaired(*wrong(crafted))
    assert any(message in finding.message for finding in report.findings), report.findings
    assert found == crafted.before


# -- what cannot be set right without a trace ----------------------------------------------


def test_a_slice_of_a_missing_extent_is_told_and_stays_an_error(crafted: Crafted) -> None:
    report, found = crafted.repaired((extent_key(crafted.extent(crafted.file).extent_id), None))
    (finding,) = report.lost
    assert finding.path == "/directory/file" and "is missing" in finding.message
    assert found.pop("/directory/file").data is None
    del crafted.before["/directory/file"]
    assert found == crafted.before


def test_a_file_with_a_missing_extent_can_be_removed(crafted: Crafted) -> None:
    crafted.repaired((extent_key(crafted.extent(crafted.file).extent_id), None))
    bench = Bench(crafted.bench.directory / "x", crafted.bench.device, boot="next")
    run(bench.store.unlink(crafted.directory, b"file"))
    run(bench.store.close())
    assert check(bench.device, "ring").is_clean


@pytest.mark.parametrize("blocks_before", [0, 1])
def test_of_two_extents_in_one_place_the_whole_one_stays(
    crafted: Crafted, blocks_before: int
) -> None:
    good, bad = crafted.extent(crafted.file), crafted.extent(crafted.other)
    moved = replace(bad, address=good.address - blocks_before * BLOCK)
    report, found = crafted.repaired((extent_key(bad.extent_id), moved.pack()))
    assert [f.path for f in report.lost] == ["/directory/other"]
    assert found["/directory/file"] == crafted.before["/directory/file"]


def test_slices_that_overlap_show_the_later_extent(crafted: Crafted) -> None:
    first, second = run(crafted.bench.store.extents(crafted.file, 0, 200_000))
    assert first.extent_id < second.extent_id
    over = Slice(1000, 3000, second.extent_id, 0)
    report, found = crafted.repaired((map_key(crafted.file, 1000), over.pack()))
    assert any("overlap" in finding.message for finding in report.findings)
    data = noise(200_000, 1)
    shown = data[:1000] + data[first.size : first.size + 3000] + data[4000:]
    assert found["/directory/file"].data == shown


def test_directories_below_each_other_go_to_lost_and_found(crafted: Crafted) -> None:
    c = crafted
    report, found = c.repaired(
        c.no_name(ROOT_INODE, b"directory"),
        c.name(c.below, b"loop", c.directory, stat.S_IFDIR),
        c.inode(c.directory, parent=c.below, name=b"loop"),
    )
    assert any("below itself" in finding.message for finding in report.findings)
    assert sorted(path.rpartition("/")[2] for path in found) == sorted(
        ["lost+found", f"#{c.directory}" if f"/lost+found/#{c.directory}" in found else
         f"#{c.below}", "file", "other", "symlink",
         "below" if f"/lost+found/#{c.directory}" in found else "loop"]
    )  # fmt: skip
    assert contents(found) == contents(c.before)


def test_a_file_whose_directory_is_gone_goes_to_lost_and_found(crafted: Crafted) -> None:
    c = crafted
    _, found = c.repaired(c.no_name(ROOT_INODE, b"directory"), (inode_key(c.directory), None))
    expected = {f"/lost+found/#{ino}" for ino in (c.below, c.file, c.other, c.symlink)}
    assert found.keys() == {"/lost+found", *expected}
    assert found[f"/lost+found/#{c.file}"] == c.before["/directory/file"]


def test_data_without_an_inode_gets_one(crafted: Crafted) -> None:
    _, found = crafted.repaired((inode_key(crafted.file), None))
    assert found["/directory/file"].data == noise(200_000, 1)


def test_data_without_an_inode_and_a_name_goes_to_lost_and_found(crafted: Crafted) -> None:
    c = crafted
    _, found = c.repaired((inode_key(c.file), None), c.no_name(c.directory, b"file"))
    assert found[f"/lost+found/#{c.file}"].data == noise(200_000, 1)


@pytest.mark.parametrize("mode", [0o644 | stat.S_IFREG, DIRECTORY])
def test_lost_and_found_may_be_there_already(crafted: Crafted, mode: int) -> None:
    c = crafted
    taken = c.bench.make(b"lost+found", mode=mode)
    if stat.S_ISDIR(mode):
        c.bench.make(b"#%d" % c.file, taken)
    run(c.bench.store.sync())
    _, found = c.repaired(c.no_name(c.directory, b"file"), c.inode(c.file, name=b""))
    path = f"/lost+found/#{c.file}-1" if stat.S_ISDIR(mode) else f"/lost+found-1/#{c.file}"
    assert found[path].data == noise(200_000, 1)


def test_what_was_unlinked_and_is_held_is_dropped(crafted: Crafted) -> None:
    c = crafted
    c.bench.store.pin(c.file)
    run(c.bench.store.unlink(c.directory, b"file"))
    run(c.bench.store.sync())
    device = RecordingDevice(bytearray(c.bench.device.image))
    assert check(device, "ring").is_clean
    _, found = c.repaired((orphan_key(c.file), None))
    assert found.keys() == c.before.keys()
    assert "/directory/file" not in found


def test_a_lost_root_is_made_anew(crafted: Crafted) -> None:
    report, found = crafted.repaired((inode_key(ROOT_INODE), None))
    assert report.findings[0].message == "the root directory is lost"
    assert found == crafted.before


# -- a repair that is interrupted, or has no room --------------------------------------------


class PowerCut(Exception):
    """Nothing more reaches the device."""


@pytest.mark.parametrize("kind", ["closed", "one_checkpoint", "turned", "log"])
def test_a_repair_can_be_interrupted_at_every_write(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Also in the middle of one; what is left can be repaired as the ring before could."""
    if kind == "log":
        logged: list[FrameHeader] = request.getfixturevalue("logged")
        case = Case.of(request.getfixturevalue("bench"), close=False)
        place = logged[1].address
    else:
        case = request.getfixturevalue(kind)
        place = case.nodes()[1].address
    whole = case.damaged((place, BLOCK))
    check(whole, "ring", repair=True)
    expected = case.show(whole)
    for cut in range(whole.writes):
        for torn in (0, 3):
            device = case.damaged((place, BLOCK))
            cut_after(device, cut, torn)
            with pytest.raises(PowerCut):
                check(device, "ring", repair=True)
            left = RecordingDevice(bytearray(device.image))
            check(left, "ring", repair=True)
            assert check(left, "ring").is_clean
            assert case.show(left) == expected


def cut_after(device: RecordingDevice, writes: int, sectors: int) -> None:
    """So many writes reach it, and so many sectors of the next one."""

    def fail(kind: str, address: int, length: int) -> None:
        if kind == "write" and device.writes == writes:
            device.torn_at = lambda count: min(count, sectors)
        elif kind != "read" and device.writes > writes:
            raise PowerCut

    device.fail = fail


def test_a_full_ring_can_be_repaired(tmpfs: Path) -> None:
    bench = Bench(tmpfs)
    made = 0
    with pytest.raises(OSError, match="No space left"):
        while True:
            bench.write(bench.make(b"%d" % made), noise(30_000, made))
            made += 1
    case = Case.of(bench)
    for node in case.nodes():
        device = case.damaged((node.address, BLOCK))
        repaired(device)
        bench = case.reopened(device)
        assert shown(bench.store) == case.before


# -- anything, anywhere ----------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), is_wiped=st.booleans())
@pytest.mark.parametrize("kind", ["closed", "one_checkpoint", "turned"])
def test_one_bad_bit_or_block_anywhere_costs_no_more_than_itself(
    kind: str, request: pytest.FixtureRequest, data: st.DataObject, is_wiped: bool
) -> None:
    case: Case = request.getfixturevalue(kind)
    blocks = used_blocks(case)
    address = blocks[data.draw(st.integers(0, len(blocks) - 1))] * BLOCK
    device = case.damaged()
    if is_wiped:
        wipe(device.image, address)
    else:
        flip(device.image, address + data.draw(st.integers(0, BLOCK - 1)))
    report = repaired(device)
    bad = {finding.path for finding in report.lost}
    # A finding says one name of a file, which may have others.
    lost_data = {case.before[path].data for path in bad if path in case.before}
    bad |= {path for path, file in case.before.items() if file.data in lost_data}
    found = case.show(device)
    kept = {p: f for p, f in found.items() if p not in bad}
    if report.is_clean or kind != "turned":
        assert kept == {p: f for p, f in case.before.items() if p not in bad}
    else:
        lost = {case.before[path].data for path in bad if path in case.before}
        assert contents(case.before) - lost <= contents(kept)


def used_blocks(case: Case) -> list[int]:
    image = case.image
    return [n for n in range(len(image) // BLOCK) if any(image[n * BLOCK : (n + 1) * BLOCK])]

"""Whether a damaged ring keeps what is promised: never wrong bytes, no crash, no hang; EIO for
what is lost and only for it; found by a check; brought back by a repair."""

from __future__ import annotations

import errno
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType

import xxhash

from kvfs.engine.check import Report, check
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    BLOCK,
    ROOT_INODE,
    SUPERBLOCK_ADDRESSES,
    FormatError,
    Inode,
    Superblock,
)
from kvfs.engine.io import run
from kvfs.engine.store import Store
from tests.engine.kit import Bench
from tests.rot.anatomy import Anatomy
from tests.rot.damages import Damaged
from tests.rot.paint import Entry
from tests.rot.rings import Ring
from tests.support.devices import RecordingDevice
from tests.support.encrypted import KEY

_SECONDS = 60
_SECTOR = 512
_NEW = b"written after the damage"


class BrokenPromise(AssertionError):
    """What was promised and did not hold."""


@contextmanager
def _within(seconds: int, what: str) -> Iterator[None]:
    """Raises BrokenPromise where it takes longer. In the main thread."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise BrokenPromise(f"{what} does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(slots=True)
class Judge:
    """Of one damage."""

    anatomy: Anatomy
    damaged: Damaged
    directory: Path
    _opened: int = 0

    # -- which damage may cost what

    @property
    def hit(self) -> frozenset[int]:
        return self.damaged.hit

    @property
    def log_is_hit(self) -> bool:
        return bool(self.hit & self.log)

    @property
    def log(self) -> frozenset[int]:
        return frozenset().union(*self.anatomy.log)

    @property
    def may_be_refused(self) -> bool:
        vital = self.anatomy.opening | self.anatomy.slots | self.log
        return bool(self.hit & (vital | self.anatomy.nodes))

    @property
    def matters(self) -> bool:
        """Whether something is hit that the ring needs."""
        if self.hit <= self.anatomy.slots and self._slots_are_valid:
            return False  # as after the loss of the last superblock: the log leads on
        structures = [one for same in self.anatomy.structures.values() for one in same]
        if any(one.is_used and one.blocks & self.hit - self.log for one in structures):
            return True
        # The last frames may be those that never came; one behind a bad one says that it did.
        bad = [bool(frame & self.hit) for frame in self.anatomy.log]
        return (True, False) in pairwise(bad)

    @property
    def _slots_are_valid(self) -> bool:
        generations = []
        for address in SUPERBLOCK_ADDRESSES:
            with suppress(FormatError):
                block = bytes(self.damaged.image[address : address + BLOCK])
                generations.append(Superblock.unpack(block).generation)
        return len(generations) == 2 and abs(generations[0] - generations[1]) == 1

    @property
    def keys_are_hit(self) -> bool:
        """Of an encrypted ring: without both copies of a part of the key table nothing can be read
        that is under its keys."""
        tables = self.anatomy.structures.get("key table", [])
        return sum(bool(one.blocks & self.hit) for one in tables) > 1

    def may_fail(self, path: str) -> bool:
        needs = self.anatomy.needs[path]
        return bool((needs.way | needs.data) & self.hit) or self.log_is_hit

    # -- a mount

    def mount(self) -> None:
        """As it is, without a repair."""
        device = RecordingDevice(bytearray(self.damaged.image))
        try:
            bench = self._open(device)
        except DeviceError as refused:
            self._expect(self.may_be_refused, f"it is refused: {refused}")
            self._expect("kvfs " in str(refused) or "cut" in str(refused), f"no advice: {refused}")
            return
        self._look(bench.store)
        self._write(bench)
        self._look(bench.store)
        if bench.store.read_only:
            self._expect(bool(bench.store.damage), "it is read-only and does not say why")
            return
        try:
            again = self._open(RecordingDevice(bytearray(device.image)))
        except DeviceError as refused:
            self._expect(bool(self.hit & self.anatomy.nodes), f"it is refused: {refused}")
        else:
            self._look(again.store)

    def _look(self, store: Store) -> None:
        for path, entry in self.anatomy.ring.tree.items():
            try:
                wrong = self._differs(store, path, entry)
            except OSError as failure:
                is_prefix = self.log_is_hit or store.damage is not None
                is_lost = failure.errno == errno.EIO and self.may_fail(path)
                is_later = failure.errno in (errno.EIO, errno.ENOENT) and is_prefix
                self._expect(is_lost or is_later, f"{path}: {failure!r}")
            else:
                self._expect(not wrong, f"{path}: {wrong}")

    def _differs(self, store: Store, path: str, entry: Entry) -> str | None:
        """Raises OSError."""
        ino = ROOT_INODE
        for name in path.encode().split(b"/")[1:]:
            ino = run(store.lookup(ino, name)).inode.ino
        inode = run(store.node(ino)).inode
        if stat.S_IFMT(inode.mode) != stat.S_IFMT(entry.mode):
            return f"mode {inode.mode:o}"
        xattrs = {name: run(store.xattr(ino, name)) for name in run(store.xattr_names(ino))}
        if xattrs != entry.xattrs and not self.log_is_hit:
            return f"xattrs {xattrs.keys()}"
        if stat.S_ISDIR(inode.mode):
            return None
        data = _data_of(store, inode)
        if data == entry.data:
            return None
        is_prefix = self.log_is_hit or store.damage is not None
        is_older = is_prefix and data in self.anatomy.ring.versions[path]
        return None if is_older else "wrong bytes"

    def _write(self, bench: Bench) -> None:
        """Writes go on, or it is told why not."""
        store = bench.store
        try:
            ino = bench.make(_NEW)
            bench.write(ino, _NEW * 3000)
            run(store.sync())
            self._expect(bench.read(ino) == _NEW * 3000, "a new file has other bytes")
            for _ in range(3):
                run(store.tick())
                run(store.checkpoint())
            run(store.clean())
            self._expect(bench.read(ino) == _NEW * 3000, "a new file has other bytes")
            run(store.close())
        except OSError as failure:
            told = store.damage or store.failure
            excused = bool(self.hit & (self.anatomy.nodes | self.log | self.anatomy.opening))
            self._expect(excused, f"no writes: {failure!r} {told}")

    # -- check and repair

    def repair(self) -> None:
        device = RecordingDevice(bytearray(self.damaged.image))
        try:
            found = check(device, "ring", key=KEY)
        except DeviceError as refused:
            self._expect(bool(self.hit & self.anatomy.slots), f"no check: {refused}")
            return
        self._expect(device.image == self.damaged.image, "a check wrote something")
        self._expect(bool(found.findings) or not self.matters, "a check finds nothing")
        report = check(device, "ring", key=KEY, repair=True)
        self._expect(
            list(map(str, found.findings)) == list(map(str, report.findings)),
            "a repair finds something else than a check",
        )
        left = check(device, "ring", key=KEY)
        self._expect(all(finding.is_lost for finding in left.findings), f"{left.findings[:3]}")
        bench = self._open(device)
        self._expect(not bench.store.read_only, "it is read-only after a repair")
        self._compare(bench.store, report)
        ino = bench.make(_NEW)
        bench.write(ino, _NEW * 3000)
        run(bench.store.close())
        after = check(device, "ring", key=KEY)
        self._expect(
            {(f.path, f.message) for f in after.findings}
            == {(f.path, f.message) for f in left.findings},
            f"a mount after the repair leaves {after.findings[:3]}",
        )

    def _compare(self, store: Store, report: Report) -> None:
        lost = {finding.ino for finding in report.lost}
        all_told = any("taken together" in finding.message for finding in report.findings)
        older = {finding.ino for finding in report.findings if "older frames" in finding.message}
        found = _found(store)
        if self.keys_are_hit:
            return
        for path, entry in self.anatomy.ring.tree.items():
            seen = found.get(path)
            needs = self.anatomy.needs[path]
            is_own = bool(needs.data & self.hit)
            is_way = bool(needs.way & self.hit)
            if seen is None:
                excused = (
                    is_way and (self.anatomy.ring.is_turned or self.damaged.is_wide)
                ) or self.log_is_hit
                self._expect(excused, f"{path} is gone after the repair")
            elif seen.data is None:
                self._expect(
                    seen.inode.ino in lost, f"{path} cannot be read, and no finding says so"
                )
                excused = is_own or self.log_is_hit or (is_way and self.damaged.is_wide)
                self._expect(excused, f"{path} cannot be read after the repair")
            elif seen.data != entry.data:
                excused = (
                    self.log_is_hit or all_told or seen.inode.ino in older
                ) and seen.data in self.anatomy.ring.versions[path]
                self._expect(excused, f"{path} has other bytes after the repair")
        for path in found.keys() - self.anatomy.ring.tree.keys():
            may_come = path.startswith("/lost+found") or self.log_is_hit or all_told
            self._expect(may_come, f"{path} has come")
            data = found[path].data or b""
            self._expect(_sectors(data) <= self._painted, f"{path} has bytes that nobody wrote")

    @property
    def _painted(self) -> frozenset[tuple[int, bytes]]:
        return _painted(self.anatomy.ring)

    # -- details

    def _open(self, device: RecordingDevice) -> Bench:
        self._opened += 1
        return Bench(self.directory / str(self._opened), device, boot=f"boot {self._opened}")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise BrokenPromise(f"{self.anatomy.ring.name}, {self.damaged.what}: {what}")


@dataclass(frozen=True, slots=True)
class _Seen:
    """`data` is None where it cannot be read."""

    inode: Inode
    data: bytes | None


@cache
def _painted(ring: Ring) -> frozenset[tuple[int, bytes]]:
    """What any file ever had at which sector."""
    versions = (data for versions in ring.versions.values() for data in versions)
    return frozenset().union(*map(_sectors, versions))


def _sectors(data: bytes) -> frozenset[tuple[int, bytes]]:
    """But for the last one, which a recovered file may have more or less of."""
    starts = range(0, len(data) // _SECTOR * _SECTOR, _SECTOR)
    return frozenset(
        (start, xxhash.xxh64_digest(data[start : start + _SECTOR])) for start in starts
    )


def _found(store: Store, directory: int = ROOT_INODE, path: str = "") -> dict[str, _Seen]:
    found = {path: _Seen(run(store.node(directory)).inode, b"")}
    for _, entry in run(store.list_directory(directory, 0, 1 << 20)):
        at = f"{path}/{entry.name.decode()}"
        inode = run(store.node(entry.ino)).inode
        if stat.S_ISDIR(inode.mode):
            found |= _found(store, entry.ino, at)
        else:
            try:
                found[at] = _Seen(inode, _data_of(store, inode))
            except OSError as failure:
                assert failure.errno == errno.EIO
                found[at] = _Seen(inode, None)
    return found


def _data_of(store: Store, inode: Inode) -> bytes:
    if stat.S_ISLNK(inode.mode):
        return run(store.readlink(inode.ino))
    return bytes(run(store.read(inode.ino, 0, inode.size)))


def judge(anatomy: Anatomy, damaged: Damaged) -> None:
    """Raises BrokenPromise."""
    directory = Path(tempfile.mkdtemp(prefix="kvfs-rot-", dir="/dev/shm"))
    try:
        judge = Judge(anatomy, damaged, directory)
        with _within(_SECONDS, f"{damaged.what}: the mount"):
            judge.mount()
        with _within(_SECONDS, f"{damaged.what}: the repair"):
            judge.repair()
    finally:
        shutil.rmtree(directory)

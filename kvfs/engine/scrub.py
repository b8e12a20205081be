"""Scrub: all that is live is read and compared with its checksum, before a reader asks for it.

The index says what must be there, not the frames: a lost write leaves frames that are whole in
themselves. So the superblocks and the checkpoint come first, then the nodes of both trees, by
key, then the extents that the extent table names, a leaf of it at a time, each time in the order of
the device. Ids rise with time, so that this is nearly the order of the ring, and what is in
memory is one batch, however many extents there are.

Between two reads anything may happen. An extent is looked up again before it is read: cleaning may
have moved it, and a writer dropped it; and what is read is pinned meanwhile, so that its segment is
not used again. What is rotten and has a clean copy in memory is written anew.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypeVar

from kvfs.engine import btree
from kvfs.engine.buffer import Buffer
from kvfs.engine.buffers import aligned
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import (
    BLOCK,
    EXTENT_SIZE_MAX,
    KEY_END,
    KIND_BYTE,
    SUPERBLOCK_ADDRESSES,
    TABLE_EXTENTS,
    TABLE_INODES,
    Extent,
    FormatError,
    Item,
    ItemKind,
    Pointer,
    Slice,
    Superblock,
    checksum,
    extent_key,
    key_owner,
    key_slot,
    round_up,
)
from kvfs.engine.io import Completion, Read, Step, Urgency, settled, wait
from kvfs.engine.nodecache import UnreadableNode
from kvfs.engine.reader import ExtentReader
from kvfs.engine.units import Units
from kvfs.engine.writer import Writer

log = logging.getLogger(__name__)

_SCANNED_AT_ONCE = 500
_ROTTEN_MAX = 1000  # of which more is kept than that they were counted
_EXTENTS, _EXTENTS_END = bytes([TABLE_EXTENTS]), bytes([TABLE_EXTENTS]) + KEY_END[1:]
_INODES, _INODES_END = bytes([TABLE_INODES]), bytes([TABLE_INODES]) + KEY_END[1:]

T = TypeVar("T")
Piece = TypeVar("Piece", Extent, Pointer)


class Phase(str, Enum):
    """What is being read."""

    IDLE = "idle"
    ROOTS = "superblocks and checkpoint"
    NAMES = "nodes of names"
    TABLE = "nodes of the extent table"
    DATA = "data"


_NEXT = dict(zip(list(Phase), [*list(Phase)[1:], Phase.IDLE], strict=True))


@dataclass(frozen=True, slots=True)
class Hurt:
    """Bytes of a file that are lost with something. `path` from the root, without a slash
    before it; None where it cannot be told."""

    ino: int
    offset: int
    length: int
    path: bytes | None


@dataclass(slots=True)
class Rot:
    """Something that is not what was written: `what` it is and where it lies. `files` are known a
    while after it was found."""

    what: str
    address: int
    extent: Extent | None = None
    files: list[Hurt] | None = None
    is_healed: bool = False


@dataclass(slots=True)
class Scrub:
    """One pass after the other, each begun by `begin` and driven by `advance`. `done` of about
    `total` bytes are read in this pass, the last before `position`; times in ns since 1970.
    `errors` and `rotten` are of this pass, `found` and `healed` since the mount.

    `rewrite(ino, offset, length)` writes what is in memory to the ring anew."""

    device: Device
    writer: Writer
    reader: ExtentReader
    buffer: Buffer
    units: Units
    rewrite: Callable[[int, int, int], Step[bool]]
    may_heal: Callable[[], bool]
    phase: Phase = Phase.IDLE
    position: int = 0
    done: int = 0
    total: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    passes: int = 0
    errors: int = 0
    found: int = 0
    healed: int = 0
    rotten: list[Rot] = field(default_factory=list)
    _cursor: bytes | None = b""
    _groups: deque[list[Extent]] = field(default_factory=deque)
    _asked: int = 0
    _memory: memoryview | None = None

    @property
    def is_running(self) -> bool:
        return self.phase is not Phase.IDLE

    @property
    def share(self) -> float:
        """Of the pass: how much of it is done, 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0

    def begin(self) -> None:
        """A pass, unless one is under way."""
        if self.is_running:
            return
        self.started_ns = time.time_ns()
        self.done, self.total = 0, self.writer.appender.ring.liveness.live_bytes
        self.errors, self.rotten, self._asked = 0, [], 0
        self._memory = aligned(EXTENT_SIZE_MAX)
        self._go_on(Phase.ROOTS)

    def advance(self, limit: int) -> Step[int]:
        """Read about so many bytes of the pass, if one is under way. Returns how many were."""
        before = self.done
        while self.is_running and self.done - before < limit:
            match self.phase:
                case Phase.ROOTS:
                    yield from self._roots()
                case Phase.NAMES | Phase.TABLE:
                    yield from self._nodes()
                case Phase.DATA:
                    yield from self._data()
        return self.done - before

    def _go_on(self, phase: Phase) -> None:
        self.phase = phase
        self._cursor = _EXTENTS if phase in (Phase.TABLE, Phase.DATA) else b""

    # -- superblocks, the checkpoint's record, bitmap and key table

    def _roots(self) -> Step[None]:
        checkpoint, record = (
            self.writer.index.checkpoint,
            self.writer.appender.superblock.checkpoint,
        )
        keys = [*self.writer.appender.superblock.key_tables]
        keys += [place for part in self.writer.index.vault.table for place in part.places]
        places = sorted(p for p in (record, *checkpoint.bitmap, *keys) if p.stored)
        rotten = []
        with self._pinned(places):
            for place in (yield from self._read(places)):
                self.writer.checkpoints.rewrite_part(place)
                what = {record: "checkpoint", **dict.fromkeys(keys, "copy of the key table")}
                rotten.append(Rot(what.get(place, "part of the bitmap"), place.address, files=[]))
        for address in SUPERBLOCK_ADDRESSES:
            if not (yield from self._is_superblock(address)):
                rotten.append(Rot("superblock", address, files=[]))
        for rot in rotten:
            self._saw(rot)
        yield from self._heal_by_checkpoint(rotten)
        self._go_on(Phase.NAMES)

    def _is_superblock(self, address: int) -> Step[bool]:
        """A second time where it is being written."""
        for _ in range(2):
            with suppress(OSError, FormatError):
                block = yield from self._in_background(
                    partial(read_bytes, self.device, address, BLOCK)
                )
                Superblock.unpack(block)
                return True
        return False

    # -- nodes

    def _nodes(self) -> Step[None]:
        """The leaves below one node, and what leads to them."""
        index = self.writer.index
        checkpoint = index.checkpoint
        root = checkpoint.names if self.phase is Phase.NAMES else checkpoint.extents
        assert self._cursor is not None
        places, end = yield from btree.leaves_from(index.nodes, root, self._cursor)
        if checkpoint is not index.checkpoint:
            return  # another one was written meanwhile: from here on in its trees
        with self._pinned(places):
            bad = yield from self._read(sorted(places))
            rotten = [self._rotten_node(place) for place in bad]
            yield from self._heal_by_checkpoint([rot for rot in rotten if rot is not None])
        self._cursor = end
        if end is None:
            self._go_on(_NEXT[self.phase])

    def _rotten_node(self, place: Pointer) -> Rot | None:
        """What can be healed: it is still in memory, and the next checkpoint puts it elsewhere."""
        nodes = self.writer.index.nodes
        rot = Rot("node of the index", place.address, files=[])
        if any(known.address == place.address for known in self.rotten):
            return None  # it leads to others, too
        self._saw(rot)
        node = nodes.find(place)
        if node is None:
            nodes.saw_unreadable(place, f"metadata at byte {place.address} fails its checksum")
            return None
        self.writer.index.move([node.key(0)], round_up(place.stored))
        return rot

    def _heal_by_checkpoint(self, rotten: list[Rot]) -> Step[None]:
        """The next two checkpoints write all that they need of it anew, and both superblocks."""
        if not rotten or not self.may_heal():
            return
        with suppress(OSError):  # it is told by who writes checkpoints
            for _ in SUPERBLOCK_ADDRESSES:
                yield from self.writer.checkpoint()
            for rot in rotten:
                self._healed(rot)

    # -- data

    def _data(self) -> Step[None]:
        if self._groups:
            yield from self._extents(self._groups.popleft())
        elif self._cursor is not None:
            yield from self._next_batch()
        else:
            yield from self._ask_whose()
            self._end()

    def _end(self) -> None:
        self._go_on(Phase.IDLE)
        self._memory = None
        self.done = max(self.done, self.total)
        self.finished_ns = time.time_ns()
        self.passes += 1

    def _next_batch(self) -> Step[None]:
        assert self._cursor is not None
        items, self._cursor = yield from self._scanned(self._cursor, _EXTENTS_END)
        extents = [
            Extent.unpack(key_owner(key), value)
            for key, value in items
            if value is not None and key[KIND_BYTE] == ItemKind.EXTENT
        ]
        self._groups.extend(_runs(sorted(extents, key=lambda extent: extent.address)))

    def _scanned(self, low: bytes, high: bytes) -> Step[tuple[list[Item], bytes | None]]:
        """Some items from a key on, and the key to go on from, None at the end. Leaves that cannot
        be read are passed over."""
        index = self.writer.index
        is_extents = low[:1] == _EXTENTS
        root = index.checkpoint.extents if is_extents else index.checkpoint.names
        end = yield from btree.leaf_end(index.nodes, root, low)
        last = high if end is None or end > high else end
        try:
            items = yield from index.scan(low, last, _SCANNED_AT_ONCE)
        except UnreadableNode:
            return [], None if last == high else last
        if len(items) == _SCANNED_AT_ONCE:
            return items, items[-1][0] + b"\0"
        return items, None if last == high else last + b"\0"

    def _extents(self, group: list[Extent]) -> Step[None]:
        try:
            current = yield from settled(partial(self._where, group))
        except UnreadableNode:
            return
        first, *others = _runs(current) or [[]]
        self._groups.extendleft(reversed(others))
        if not first:
            return
        with self._pinned(first):
            bad = yield from self._read(first)
        for extent in bad:
            yield from self._rotten_extent(extent)
        if sum(rot.files is None for rot in self.rotten) > self._asked:
            yield from self._ask_whose()

    def _where(self, group: list[Extent]) -> Step[list[Extent]]:
        """Where they lie now, without those that are gone; by address."""
        found = []
        for extent in group:
            value = yield from self.writer.index.get(extent_key(extent.extent_id))
            if value is not None:
                found.append(Extent.unpack(extent.extent_id, value))
        return sorted(found, key=lambda extent: extent.address)

    def _rotten_extent(self, extent: Extent) -> Step[None]:
        with suppress(UnreadableNode):
            if not (yield from self._where([extent])):
                return  # it was dropped meanwhile
        self.reader.saw_rot(extent)
        self._saw(Rot("data", extent.address, extent))

    # -- whose it is

    def _ask_whose(self) -> Step[None]:
        """Look for the files that rotten extents are of. All maps have to be looked at for that:
        it is done each time that the extents found have doubled, and at the end."""
        asked = {
            rot.extent.extent_id: rot
            for rot in self.rotten
            if rot.extent is not None and rot.files is None
        }
        if not asked:
            return
        found = yield from self._slices_of(set(asked))
        for extent_id, rot in asked.items():
            rot.files = found.get(extent_id, [])
            for hurt in rot.files:
                whose = f"inode {hurt.ino}" if hurt.path is None else escaped(hurt.path)
                log.error(
                    "rot: bytes %d to %d of %s are lost (extent %d at byte %d of the device)",
                    hurt.offset, hurt.offset + hurt.length, whose, extent_id, rot.address,
                    extra={"path": whose, "extent": extent_id, "address": rot.address},
                )  # fmt: skip
            yield from self._heal(rot)
        self._asked += len(asked)

    def _slices_of(self, asked: set[int]) -> Step[dict[int, list[Hurt]]]:
        found: dict[int, list[Hurt]] = {}
        cursor: bytes | None = _INODES
        while cursor is not None:
            items, cursor = yield from self._scanned(cursor, _INODES_END)
            for key, value in items:
                if value is None or key[KIND_BYTE] != ItemKind.MAP:
                    continue
                part = Slice.unpack(key_slot(key), value)
                if part.extent_id in asked:
                    ino = key_owner(key)
                    path = yield from self._path(ino)
                    hurt = Hurt(ino, part.offset, part.length, path)
                    found.setdefault(part.extent_id, []).append(hurt)
            yield from self._in_background(_nothing)
        return found

    def _path(self, ino: int) -> Step[bytes | None]:
        with suppress(OSError):
            return (yield from self.units.path(ino))
        return None

    # -- what was found

    def _saw(self, rot: Rot) -> None:
        self.errors += 1
        self.found += 1
        if len(self.rotten) < _ROTTEN_MAX:
            self.rotten.append(rot)
        if rot.extent is None:
            log.error(
                "rot: the %s at byte %d of the device is damaged", rot.what, rot.address,
                extra={"what": rot.what, "address": rot.address},
            )  # fmt: skip

    def _heal(self, rot: Rot) -> Step[None]:
        """By what warm memory has of it, for all who use it."""
        assert rot.extent is not None
        if not rot.files or not self.may_heal():
            return
        if self.buffer.find(rot.extent, is_use=False) is None:
            return
        with suppress(OSError):  # no room: it stays in memory as long as it may
            for hurt in rot.files:
                if not (yield from self.rewrite(hurt.ino, hurt.offset, hurt.length)):
                    return
            self._healed(rot)

    def _healed(self, rot: Rot) -> None:
        rot.is_healed = True
        self.healed += 1
        log.warning("what was rotten at byte %d was in memory and is written anew", rot.address)

    # -- reading

    @contextmanager
    def _pinned(self, pieces: Sequence[Extent | Pointer]) -> Iterator[None]:
        ring, addresses = self.writer.appender.ring, [piece.address for piece in pieces]
        for address in addresses:
            ring.pin(address)
        try:
            yield
        finally:
            for address in addresses:
                ring.unpin(address)

    def _read(self, pieces: list[Piece]) -> Step[list[Piece]]:
        """Which are not what was written. They are by address."""
        bad: list[Piece] = []
        for run in _runs(pieces):
            bad += yield from self._read_run(run)
        return bad

    def _read_run(self, run: list[Piece]) -> Step[list[Piece]]:
        assert self._memory is not None
        start = run[0].address
        length = run[-1].address + round_up(run[-1].stored) - start
        memory = self._memory[:length]
        read = Read(self.device, start, [memory], partial(_bad_of, run, memory), is_quick=False)
        try:
            bad = yield from self._in_background(read)
        except OSError:
            if len(run) > 1:  # one sector that cannot be read does not tell of the others
                bad = []
                for piece in run:
                    bad += yield from self._read_run([piece])
                return bad
            bad = run
        self.position = start + length
        self.done += length
        return bad

    def _in_background(self, work: Callable[[], T]) -> Step[T]:
        completion: Completion[T] = self.writer.appender.executor.submit(work, Urgency.BACKGROUND)
        return (yield from wait(completion))


def _runs(pieces: list[Piece]) -> list[list[Piece]]:
    """Those that lie one behind the other, as many as are read at once."""
    runs: list[list[Piece]] = []
    end = -1
    for piece in pieces:
        taken = round_up(piece.stored)
        fits = bool(runs) and end + taken - runs[-1][0].address <= EXTENT_SIZE_MAX
        if piece.address == end and fits:
            runs[-1].append(piece)
        else:
            runs.append([piece])
        end = piece.address + taken
    return runs


def _bad_of(run: list[Piece], memory: memoryview) -> list[Piece]:
    """Runs in a thread."""
    start = run[0].address
    bad = []
    for piece in run:
        at = piece.address - start
        if checksum(memory[at : at + piece.stored]) != piece.checksum:
            bad.append(piece)
    return bad


def _nothing() -> None:
    """What others can go before."""


def escaped(path: bytes) -> str:
    """A path from the root for a line of a log, whatever bytes names have."""
    text = path.decode(errors="surrogateescape")
    return "/" + "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )

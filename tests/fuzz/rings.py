"""Whole rings made wrong behind good checksums: by somebody who knows the format."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from kvfs.engine import metadata
from kvfs.engine.check import CheckError, check
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    _POINTER,
    BLOCK,
    FORMAT_VERSION,
    KEY,
    POINTER_SIZE,
    SUPERBLOCK_ADDRESSES,
    Checkpoint,
    FormatError,
    FrameHeader,
    Item,
    ItemKind,
    Pointer,
    RecordHeader,
    RecordKind,
    Superblock,
    TreeNode,
    checksum,
    pack_items,
    round_up,
)
from kvfs.engine.io import InlineExecutor, Step, run
from kvfs.engine.loading import load_newest
from kvfs.engine.nodes import Node
from kvfs.engine.ring import Ring
from kvfs.engine.store import Store, StoreOptions
from kvfs.engine.superblocks import read_superblocks
from tests.fuzz.mutation import mutated
from tests.support.devices import MemoryDevice

FIXTURES = Path(__file__).parents[1] / "fixtures"
MIB = 1024 * 1024
OPTIONS = StoreOptions(uid=0, gid=0, cache_size=4 * MIB, index_cache_size=4 * MIB)
_READ_MAX = 128 * 1024
_NODES_MAX = 2000


@cache
def base(name: str = f"ring-v{FORMAT_VERSION}") -> bytes:
    packed = (FIXTURES / f"{name}.img.zst").read_bytes()
    return zstandard.ZstdDecompressor().decompress(packed)


@dataclass
class Forger:
    """Changes an image in place. What it writes anew goes to segments that are free."""

    random: Random
    image: bytearray = field(default_factory=lambda: bytearray(base()))

    def __post_init__(self) -> None:
        self.device = MemoryDevice(self.image)
        superblocks = read_superblocks(self.device, "ring")
        loaded = load_newest(self.device, "ring", superblocks, 4 * MIB, 40_000, None)
        self.superblock = superblocks.newest
        self.ring: Ring = loaded.ring
        self.operation = loaded.operation
        liveness = self.ring.liveness.live_blocks
        used = (self.ring.position.segment, self.ring.position.next_segment)
        free = [n for n, live in enumerate(liveness) if not live and n not in used]
        self._at = self.ring.geometry.address(free[-1])
        self._end = self._at + self.ring.geometry.segment_size

    # -- what is there

    def checkpoint(self) -> Checkpoint:
        return Checkpoint.unpack(metadata.read(self.device, self.superblock.checkpoint))

    def node(self, pointer: Pointer) -> TreeNode:
        return TreeNode(metadata.read(self.device, pointer))

    def items(self) -> list[tuple[bytes, bytes]]:
        return _items(bytes(self.image))

    # -- forgeries

    def log(self) -> None:
        """Frames that follow the log, with records and items that are not what they should be."""
        random = self.random
        for _ in range(random.randint(1, 3)):
            items = [self._item() for _ in range(random.randint(0, 5))]
            records, payload = [], []
            for _ in range(random.choice((0, 0, 1, 2))):
                record, stored = self._record(sum(map(len, payload)))
                records.append(record)
                payload.append(stored)
            if self.ring.room < 64 * 1024:
                return
            frame = self.ring.append(
                records, payload, pack_items(items), operation=self.operation + 1,
                continues=not random.randrange(8),
            )  # fmt: skip
            data = bytearray(b"".join(frame.buffers))
            if not random.randrange(6):
                data = self._other_header(data)
            self.device.write(frame.header.address, [memoryview(data)])

    def append(self, items: list[Item]) -> None:
        """A frame with these items, as if they had been written last."""
        frame = self.ring.append(
            [], [], pack_items(items), operation=self.operation + 1, continues=False
        )
        self.device.write(frame.header.address, frame.buffers)

    def _item(self) -> Item:
        random, items = self.random, self.items()
        key, value = random.choice(items)
        if not random.randrange(3):
            # One of a kind that is rare.
            kind = random.choice(list(ItemKind))
            key, value = random.choice([i for i in items if i[0][9] == kind] or items)
        changed = mutated(random, value, [random.choice(items)[1]]) if random.randrange(8) else None
        if not random.randrange(4):
            key = (mutated(random, key) + bytes(KEY.size))[: KEY.size]
        return key, changed

    def _record(self, at: int) -> tuple[RecordHeader, memoryview]:
        random = self.random
        stored = memoryview(bytearray(random.randbytes(random.choice((100, BLOCK, 9000)))))
        known = [key for key, _ in self.items() if key[9] == ItemKind.EXTENT]
        extent_id = int.from_bytes(random.choice(known)[1:9], "big")
        if random.randrange(2):
            extent_id = random.getrandbits(random.choice((8, 32, 64)))
        record = RecordHeader(
            RecordKind.DATA, random.choice((0, 0, 1, 2, 9)), random.choice((0, 1, 2, 255)),
            random.getrandbits(64), random.getrandbits(64), extent_id, random.getrandbits(64),
            random.choice((len(stored), 2**32 - 1, 0, 12345)), len(stored), at, checksum(stored),
        )  # fmt: skip
        if not random.randrange(6):
            record.kind = random.randrange(256)
        return record, memoryview(bytearray(bytes(stored).ljust(round_up(len(stored)), b"\0")))

    def _other_header(self, data: bytearray) -> bytearray:
        body = bytearray(data[: FrameHeader.STRUCT.size])
        changed = mutated(self.random, bytes(body))[: len(body)].ljust(len(body), b"\0")
        data[: FrameHeader.SIZE] = changed + checksum(changed).to_bytes(8, "little")
        return data

    def node_of_the_index(self) -> None:
        """One node of a tree is another; the path above it, the checkpoint and the superblocks
        say so."""
        checkpoint, random = self.checkpoint(), self.random
        tree = random.choice(("names", "extents"))
        root = self._forged(getattr(checkpoint, tree))
        self._point_to(dataclasses.replace(checkpoint, **{tree: root}).pack())

    def _forged(self, pointer: Pointer) -> Pointer:
        node, random = self.node(pointer), self.random
        items = node.items()
        if node.level and random.randrange(4):
            number = random.randrange(node.count)
            child = self._forged(Pointer.unpack(items[number][1]))
            items[number] = (items[number][0], child.pack())
            return self._stored(TreeNode.pack(node.level, items))
        if random.randrange(2):
            number = random.randrange(node.count)
            key, value = items[number]
            items[number] = (key, mutated(random, value, [random.choice(items)[1]]))
            return self._stored(TreeNode.pack(node.level, items))
        return self._stored(mutated(random, TreeNode.pack(node.level, items)))

    def checkpoint_record(self) -> None:
        self._point_to(mutated(self.random, self.checkpoint().pack()))

    def superblock_fields(self) -> None:
        """Behind the magic and the version, in one slot or in both."""
        for superblock in self._slots():
            packed = superblock.pack()
            body = packed[:16] + mutated(self.random, packed[16 : Superblock.STRUCT.size])
            body = body.ljust(BLOCK - 8, b"\0")[: BLOCK - 8]
            self._put(superblock.address, body + checksum(body).to_bytes(8, "little"))
            if self.random.randrange(2):
                return

    def rot(self) -> None:
        """Bytes as they were not written, and nothing that hides it."""
        live = [n for n, blocks in enumerate(self.ring.liveness.live_blocks) if blocks]
        for _ in range(self.random.randint(1, 20)):
            segment = self.random.choice(live)
            start = self.ring.geometry.address(segment)
            at = start + self.random.randrange(self.ring.geometry.segment_size)
            self.image[at] ^= self.random.randint(1, 255)

    FORGERIES = (log, log, log, node_of_the_index, node_of_the_index, checkpoint_record,
                 superblock_fields, rot)  # fmt: skip

    # -- details

    def _slots(self) -> Iterator[Superblock]:
        slots = [Superblock.unpack(self.image[at : at + BLOCK]) for at in SUPERBLOCK_ADDRESSES]
        yield from sorted(slots, key=lambda superblock: -superblock.generation)

    def _point_to(self, body: bytes) -> None:
        pointer = self._stored(body)
        for superblock in self._slots():
            changed = dataclasses.replace(superblock, checkpoint=pointer)
            self._put(changed.address, changed.pack())
        self.superblock = dataclasses.replace(self.superblock, checkpoint=pointer)

    def _stored(self, body: bytes) -> Pointer:
        address = self._at
        self._at += round_up(len(body) or 1)
        assert self._at <= self._end
        self._put(address, body)
        pointer = Pointer(address, len(body), len(body), 0, checksum(body))
        if not self.random.randrange(12):
            wrong = mutated(self.random, pointer.pack())[:POINTER_SIZE].ljust(POINTER_SIZE, b"\0")
            return Pointer(*_POINTER.unpack(wrong))
        return pointer

    def _put(self, address: int, data: bytes) -> None:
        self.image[address : address + len(data)] = data


@cache
def _items(image: bytes) -> list[tuple[bytes, bytes]]:
    """All that the trees of a ring hold."""
    device = MemoryDevice(bytearray(image))
    superblock = read_superblocks(device, "ring").newest
    checkpoint = Checkpoint.unpack(metadata.read(device, superblock.checkpoint))
    found: list[tuple[bytes, bytes]] = []
    waiting = [checkpoint.names, checkpoint.extents]
    while waiting:
        node = TreeNode(metadata.read(device, waiting.pop()))
        if node.level:
            waiting += [Pointer.unpack(value) for _, value in node.items()]
        else:
            found += node.items()
    return found


def forged(seed: bytes) -> bytearray:
    """An image that is wrong in a way that follows from the seed."""
    random = Random(seed)
    forger = Forger(random)
    forgery: Callable[[Forger], None] = random.choice(Forger.FORGERIES)
    forgery(forger)
    return forger.image


# -- what is done with it


def open_and_use(image: bytearray, make_buffer: Callable[[InlineExecutor], Any]) -> None:
    """Open, look at everything, change something, close. What may be raised are OSError and,
    by the opening, DeviceError."""
    executor = InlineExecutor()
    try:
        store = Store.open(MemoryDevice(image), "ring", executor, make_buffer(executor), OPTIONS)
    except (DeviceError, OSError):
        return
    _look(store)
    with suppress(OSError):
        run(store.units.sessions())
    with suppress(OSError):
        run(store.reclaimer.entries())
    store.usage()
    if not store.read_only:
        _change(store)
    with suppress(OSError):
        run(store.close())


def _look(store: Store) -> None:
    waiting, seen = [1], set()
    while waiting and len(seen) < _NODES_MAX:
        directory = waiting.pop()
        if directory in seen:
            continue
        seen.add(directory)
        for ino, node in _children(store, directory):
            if ino in seen:
                continue
            seen.add(ino)
            _attempt(store.xattr_names(ino))
            if stat.S_ISLNK(node.inode.mode):
                _attempt(store.readlink(ino))
            elif node.is_directory:
                waiting.append(ino)
                seen.discard(ino)
            else:
                size = node.inode.size
                for offset in {0, max(0, size - _READ_MAX)}:
                    _attempt(store.read(ino, offset, _READ_MAX))


def _children(store: Store, directory: int) -> list[tuple[int, Node]]:
    try:
        entries = run(store.list_directory(directory, 0, 1000))
    except OSError:
        return []
    found = []
    for _, entry in entries:
        with suppress(OSError):
            found.append((entry.ino, run(store.node(entry.ino))))
    return found


def _change(store: Store) -> None:
    top = _attempt(store.create(1, b"new directory", 0o40700, 0, 0))
    made = _attempt(store.create(1, b"new", 0o100600, 0, 0))
    if made is not None:
        _attempt(store.write(made.inode.ino, 0, b"new" * 10_000))
    for name in (b"session", b"kinds", b"many"):
        found = _attempt(store.lookup(1, name))
        if found is not None:
            _attempt(store.set_xattr(found.inode.ino, b"user.x", b"y"))
            _attempt(store.fork(found.inode.ino, b"fork of " + name))
            _attempt(store.rename(1, name, 1, b"other " + name))
    session = _attempt(store.lookup(1, b"other session"))
    if session is not None:
        _attempt(store.unlink(session.inode.ino, b"layer.zstd"))
    if top is not None:
        _attempt(store.rmdir(1, b"new directory"))
    _attempt(store.sync())
    _attempt(store.clean())
    _attempt(store.checkpoint())


def _attempt(step: Step[Any]) -> Any:
    try:
        return run(step)
    except OSError:
        return None


def check_and_repair(image: bytearray) -> None:
    """What a repair has mended is sound, but for what is lost."""
    device = MemoryDevice(image)
    before = bytes(image)
    try:
        report = check(device, "ring", repair=False)
        assert image == before, "a check that changes the ring"
        if report.findings:
            check(device, "ring", repair=True)
            again = check(device, "ring", repair=False)
            left = [finding for finding in again.findings if not finding.is_lost]
            assert left == [], f"a repair leaves {left[:3]}"
    except (DeviceError, CheckError, FormatError, OSError):
        return

"""What a ring is made of: each structure with its place, and what each path needs of them."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from kvfs.engine.check.frames import all_headers, new_ring
from kvfs.engine.check.load import load, mark_disjoint
from kvfs.engine.check.slots import read_slots
from kvfs.engine.check.tables import Tables, decoded
from kvfs.engine.check.trees import EXTENTS, NAMES, Range, load_node
from kvfs.engine.cleaner import survey
from kvfs.engine.codec import Codec
from kvfs.engine.format import (
    BLOCK,
    ROOT_INODE,
    SUPERBLOCK_ADDRESSES,
    Extent,
    FrameHeader,
    Pointer,
    RecordHeader,
    counts_key,
    dentry_key,
    extent_key,
    inode_key,
    map_key,
    name_slot,
    references_key,
    symlink_key,
    xattr_key,
)
from kvfs.engine.ring import Geometry
from kvfs.engine.vault import Vault
from tests.rot.rings import Ring, ring
from tests.support.devices import RecordingDevice
from tests.support.encrypted import KEY

_SLOT_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Structure:
    """`length` bytes at `address`. Those that are not in use are left behind."""

    kind: str
    address: int
    length: int
    is_used: bool = True

    @property
    def blocks(self) -> frozenset[int]:
        return blocks_of(self.address, self.length)


def blocks_of(address: int, length: int) -> frozenset[int]:
    return frozenset(range(address // BLOCK, -(-(address + length) // BLOCK)))


@dataclass(frozen=True, slots=True)
class _Node:
    pointer: Pointer
    level: int
    keys: Range

    @property
    def blocks(self) -> frozenset[int]:
        return blocks_of(self.pointer.address, self.pointer.stored)


@dataclass(frozen=True, slots=True)
class Needs:
    """The blocks that lead to a path, those with its bytes, and those that list what is in it."""

    way: frozenset[int]
    data: frozenset[int]
    listing: frozenset[int]


@dataclass(frozen=True)
class Anatomy:
    """`opening` are blocks that a mount needs at once, `log` those of each frame that it
    replays, `nodes` all of the index."""

    ring: Ring
    geometry: Geometry
    structures: dict[str, list[Structure]]
    needs: dict[str, Needs]
    opening: frozenset[int]
    slots: frozenset[int]
    log: tuple[frozenset[int], ...]
    nodes: frozenset[int]


@cache
def anatomy(name: str) -> Anatomy:
    return _Dissection(ring(name)).anatomy()


class _Dissection:
    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.device = RecordingDevice(bytearray(ring.image))
        self.slots = read_slots(self.device, "ring")
        vault = Vault.unlock(self.slots.newest, KEY, "ring")
        self.loaded = load(self.device, self.slots, vault)
        assert not self.loaded.findings
        self.geometry = self.loaded.base.geometry
        checkpoint = self.loaded.base.checkpoint
        self.names = list(self._walk(checkpoint.names, NAMES))
        self.extents = list(self._walk(checkpoint.extents, EXTENTS))
        self.tables = decoded(self.loaded.items, [])

    def anatomy(self) -> Anatomy:
        structures: dict[str, list[Structure]] = defaultdict(list)
        for structure in (*self._fixed(), *self._of_frames(), *self._data()):
            structures[structure.kind].append(structure)
        nodes = frozenset().union(*(node.blocks for node in (*self.names, *self.extents)))
        superblock = self.slots.newest
        places = [superblock.checkpoint, *self.loaded.base.checkpoint.bitmap, *self._key_table()]
        opening = [blocks_of(place.address, place.stored) for place in places if place.stored]
        opening += [self._leading_to(key, key) for key in (counts_key(), inode_key(ROOT_INODE))]
        log = [
            blocks_of(frame.header.address, frame.header.frame_length)
            for frame in self.loaded.log.frames
        ]
        return Anatomy(
            self.ring, self.geometry, dict(structures), self._needs(), frozenset().union(*opening),
            frozenset().union(*(blocks_of(address, BLOCK) for address in SUPERBLOCK_ADDRESSES)),
            tuple(log), nodes,
        )  # fmt: skip

    # -- structures

    def _key_table(self) -> list[Pointer]:
        """Both copies of its root and of its parts."""
        table = self.loaded.base.vault.table
        places = [*self.slots.newest.key_tables, *(p for part in table for p in part.places)]
        return [place for place in places if place.stored]

    def _walk(self, pointer: Pointer, keys: Range) -> Iterator[_Node]:
        node = load_node(self.device, self.geometry, pointer, self.loaded.base.vault)
        yield _Node(pointer, node.level, keys)
        if node.level:
            bounds = [keys.low, *(node.key(number) for number in range(1, node.count)), keys.high]
            for number, (low, high) in enumerate(pairwise(bounds)):
                yield from self._walk(Pointer.unpack(node.value(number)), keys.part(low, high))

    def _fixed(self) -> Iterator[Structure]:
        newest = self.slots.newest
        for address in SUPERBLOCK_ADDRESSES:
            which = "newest" if address == newest.address else "older"
            yield Structure(f"{which} superblock", address, BLOCK)
        place = newest.checkpoint
        yield Structure("checkpoint record", place.address, place.stored)
        for place in self.loaded.base.checkpoint.bitmap:
            yield Structure("part of the bitmap", place.address, place.stored)
        for place in self._key_table():
            yield Structure("key table", place.address, place.stored)
        for tree, nodes in (("names", self.names), ("extents", self.extents)):
            for node in nodes:
                kind = f"node of {tree}, level {node.level}"
                yield Structure(kind, node.pointer.address, node.pointer.stored)

    def _of_frames(self) -> Iterator[Structure]:
        log = {frame.header.address for frame in self.loaded.log.frames}
        surveyed = self._surveyed()
        for header in all_headers(self.device, new_ring(self.slots.newest)):
            in_log = header.address in log
            where = " of the log" if in_log else ""
            is_used = in_log or header.address <= surveyed[self.geometry.segment(header.address)]
            yield Structure(f"frame header{where}", header.address, FrameHeader.SIZE, is_used)
            at = header.address + FrameHeader.SIZE
            records = header.record_count * RecordHeader.SIZE
            if records:
                yield Structure(f"record headers{where}", at, records, is_used)
            if header.item_bytes:
                yield Structure(f"items{where}", at + records, header.item_bytes, is_used)

    def _surveyed(self) -> dict[int, int]:
        """Of each segment, the last frame that names something live: cleaning reads up to it."""
        ring = new_ring(self.slots.newest)
        base = self.loaded.base
        places: list[Extent | Pointer] = [*base.places, *self.tables.extents.values()]
        places += [place for place in self._key_table() if place not in base.places]
        mark_disjoint(ring.liveness, self.geometry, places)
        last: dict[int, int] = defaultdict(int)
        for segment in ring.liveness.live_blocks.nonzero()[0]:
            found = survey(self.device, ring, int(segment))
            addresses = [live.header.address for live in found.data]
            addresses += [place.address for place in (*found.nodes, *found.others)]
            last[int(segment)] = max(addresses, default=0)
        return last

    def _data(self) -> Iterator[Structure]:
        for extent in self.tables.extents.values():
            kind = f"data, {Codec(extent.codec).name.lower()}"
            yield Structure(kind, extent.address, extent.stored)

    # -- what a path needs

    def _leading_to(self, low: bytes, high: bytes) -> frozenset[int]:
        """The nodes that keys from `low` to `high` lie in or below. What the log changed since
        does not need them, but is found beside what did not."""
        found: set[int] = set()
        for node in self.extents if low[0] == extent_key(0)[0] else self.names:
            if node.keys.low <= high and low < node.keys.high:
                found |= node.blocks
        return frozenset(found)

    def _needs(self) -> dict[str, Needs]:
        hash_key, tables = self.loaded.base.vault.hash_key, self.tables
        of_extent = {number: self._of_extent(number) for number in tables.extents}
        needs = {"": self._needs_of("", frozenset(), of_extent)}
        for path in sorted(self.ring.tree, key=lambda path: path.count("/")):
            if path:
                parent, _, name = path.rpartition("/")
                slot = name_slot(hash_key, name.encode())
                directory = self.ring.tree[parent].ino
                name_key = dentry_key(directory, slot)
                way = needs[parent].way | self._leading_to(name_key, name_key)
                needs[path] = self._needs_of(path, way, of_extent)
        return needs

    def _of_extent(self, number: int) -> frozenset[int]:
        low, high = sorted((extent_key(number), references_key(number)))
        return self._leading_to(low, high)

    def _needs_of(
        self, path: str, way: frozenset[int], of_extent: dict[int, frozenset[int]]
    ) -> Needs:
        ino, tables = self.ring.tree[path].ino, self.tables
        way |= self._leading_to(inode_key(ino), inode_key(ino))
        way |= self._leading_to(xattr_key(ino, 0), xattr_key(ino, _SLOT_MAX))
        data: set[int] = set()
        if stat.S_ISREG(self.ring.tree[path].mode):
            way |= self._leading_to(map_key(ino, 0), map_key(ino, _SLOT_MAX))
            for part in tables.slices[ino]:
                extent = tables.extents[part.extent_id]
                way |= of_extent[part.extent_id]
                data |= blocks_of(extent.address, extent.stored)
        way |= self._leading_to(symlink_key(ino), symlink_key(ino))
        listing = self._leading_to(dentry_key(ino, 0), dentry_key(ino, _SLOT_MAX))
        return Needs(way, frozenset(data), listing)


__all__ = ["Anatomy", "Needs", "Structure", "Tables", "anatomy", "blocks_of"]

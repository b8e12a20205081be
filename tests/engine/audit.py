"""Invariants of a store's index and ring, checked against each other."""

from __future__ import annotations

import json
import stat
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kvfs.engine import btree, journal
from kvfs.engine.device import read_bytes
from kvfs.engine.format import (
    BLOCK,
    FIRST_FREE_ID,
    KEY,
    KIND_BYTE,
    NO_SEGMENT,
    REFERENCES,
    ROOT_INODE,
    SERIAL_BITS,
    SUPERBLOCK_ADDRESSES,
    TABLE_EXTENTS,
    TABLE_LOG,
    Checkpoint,
    Counts,
    Dentry,
    Extent,
    Inode,
    ItemKind,
    Pointer,
    Slice,
    Superblock,
    Unit,
    key_owner,
    round_up,
)
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.keytable import read_table
from kvfs.engine.liveness import Liveness
from kvfs.engine.nodecache import NodeCache
from kvfs.engine.ring import Ring
from kvfs.engine.store import Store


@dataclass(slots=True)
class Items:
    """The committed items of an index, decoded."""

    inodes: dict[int, Inode] = field(default_factory=dict)
    dentries: list[tuple[int, Dentry]] = field(default_factory=list)
    slices: dict[int, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    extents: dict[int, Extent] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    orphans: set[int] = field(default_factory=set)
    owners: set[int] = field(default_factory=set)  # of xattrs and symlink targets
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def of(cls, store: Store) -> Items:
        items = cls()
        for key, value in committed(store):
            items._add(key, value)
        return items

    def _add(self, key: bytes, value: bytes) -> None:
        _, owner, kind, slot = KEY.unpack(key)
        match kind:
            case ItemKind.INODE:
                self.inodes[owner] = Inode.unpack(owner, value)
            case ItemKind.DENTRY:
                self.dentries.append((owner, Dentry.unpack(value)))
            case ItemKind.MAP:
                self.slices[owner].append(Slice.unpack(slot, value))
            case ItemKind.EXTENT:
                self.extents[owner] = Extent.unpack(owner, value)
            case ItemKind.REFERENCES:
                (self.references[owner],) = REFERENCES.unpack(value)
            case ItemKind.ORPHAN:
                self.orphans.add(owner)
            case ItemKind.XATTR | ItemKind.SYMLINK:
                self.owners.add(owner)
            case ItemKind.UNIT:
                Unit.unpack(value)
            case ItemKind.LOG:
                json.loads(value)
            case ItemKind.COUNTS:
                self.counts = Counts.unpack(value)
            case _:
                raise AssertionError(f"an item of unknown kind {kind}")

    @property
    def newest_id(self) -> int:
        serials = [ino & ((1 << SERIAL_BITS) - 1) for ino in self.inodes]
        return max([FIRST_FREE_ID - 1, *serials, *self.extents])


def audit(store: Store) -> Items:
    """Raises AssertionError where the committed state contradicts itself."""
    items = Items.of(store)
    _check_names(items)
    _check_maps(items)
    _check_liveness(store, items)
    _check_keys(store, items)
    check_slots(store)
    assert items.counts.inodes == store.usage().inodes == len(items.inodes)
    return items


def committed(store: Store) -> list[tuple[bytes, bytes]]:
    """All committed items, without those on their way."""
    index = store._writer.index
    assert not index._pending, "audit a store that was synced"
    found = []
    # Whatever runs the store's work: what is not in memory is read in place.
    executor, index.nodes.executor = index.nodes.executor, InlineExecutor()
    for table in range(TABLE_LOG + 1):
        low, high = bytes([table]).ljust(18, b"\0"), bytes([table]).ljust(18, b"\xff")
        found += [(key, value) for key, value in run(index.scan(low, high)) if value is not None]
    index.nodes.executor = executor
    return found


def _check_names(items: Items) -> None:
    names = Counter(dentry.ino for _, dentry in items.dentries)
    children: Counter[int] = Counter()
    for directory, dentry in items.dentries:
        assert directory in items.inodes, "a name in a directory that is gone"
        inode = items.inodes[dentry.ino]
        assert dentry.type == stat.S_IFMT(inode.mode)
        if stat.S_ISDIR(inode.mode):
            children[directory] += 1
            assert (inode.parent, inode.name) == (directory, dentry.name)
    for ino, inode in items.inodes.items():
        found = names[ino] + (ino == ROOT_INODE)
        assert (found == 0) == (ino in items.orphans), "without a name, and no orphan"
        if stat.S_ISDIR(inode.mode):
            assert found <= 1
            assert inode.nlink == (2 + children[ino] if found else 0)
        else:
            assert inode.nlink == found
    assert items.orphans <= items.inodes.keys()
    assert items.owners <= items.inodes.keys(), "an xattr or target without an inode"


def _check_maps(items: Items) -> None:
    used: Counter[int] = Counter()
    owners: set[tuple[int, int]] = set()  # extent, and a file that it is in
    for ino, slices in items.slices.items():
        end = 0
        for slice_ in slices:
            assert slice_.offset >= end and slice_.length > 0, "slices overlap"
            end = slice_.end
            extent = items.extents[slice_.extent_id]
            assert slice_.skew + slice_.length <= extent.size
            owners.add((slice_.extent_id, ino))
            used[slice_.extent_id] += 1
        assert end <= items.inodes[ino].size
    assert used.keys() == items.extents.keys(), "an extent that no file uses"
    assert items.references == {extent: count for extent, count in used.items() if count > 1}
    stored: Counter[int] = Counter()
    for extent_id, ino in owners:
        stored[ino] += round_up(items.extents[extent_id].stored)
    for ino, inode in items.inodes.items():
        assert inode.stored == stored[ino], "what a file takes on the device"


def _check_liveness(store: Store, items: Items) -> None:
    geometry = store._appender.ring.geometry
    expected = Liveness(geometry.segment_count, geometry.segment_size)
    checkpoint = store._writer.index.checkpoint
    places: list[Extent | Pointer] = list(items.extents.values())
    places += tree_places(store._writer.index.nodes, checkpoint)
    places += [place for place in checkpoint.bitmap if place.stored]
    places += key_places(store)
    if store.superblock.checkpoint.stored:
        places.append(store.superblock.checkpoint)
    for place in places:
        assert geometry.contains(place.address, round_up(place.stored))
        expected.mark(place.address, place.stored)  # refuses what overlaps
    live = store._appender.ring.liveness
    assert live.live_blocks.tolist() == expected.live_blocks.tolist()
    assert live._bits == expected._bits


def _check_keys(store: Store, items: Items) -> None:
    """Each inode has a key, and each extent counts for that of who wrote it."""
    vault = store._writer.index.vault
    if vault.is_on:
        expected = vault.keys.of(items.inodes, items.extents.values()).counts()
        assert {entry for entry in vault.keys.counts() if entry[1] or entry[2]} == expected


def key_places(store: Store) -> list[Pointer]:
    table = [place for part in store._writer.index.vault.table for place in part.places]
    return table + [place for place in store.superblock.key_tables if place.stored]


def check_slots(store: Store) -> None:
    """Both superblocks are good, and what they lead to is not in a segment that may be
    overwritten: checkpoints, the extents in them, and the log from there on."""
    ring, device = store._appender.ring, store._appender.device
    free = {number for number, is_free in enumerate(ring._free_mask()) if is_free}
    if ring.position.next_segment != NO_SEGMENT:
        free.add(ring.position.next_segment)
    for address in SUPERBLOCK_ADDRESSES:
        superblock = Superblock.unpack(bytes(read_bytes(device, address, BLOCK)))
        log = Ring(ring.geometry, superblock.uuid, superblock.epoch, superblock.replay)
        checkpoint = journal.read_checkpoint(device, superblock.checkpoint, log)
        vault = store._writer.index.vault.at(superblock)
        read_table(device, superblock, vault)
        nodes = NodeCache(device, InlineExecutor(), log, 1 << 30, vault)
        places = [superblock.checkpoint, *checkpoint.bitmap, *tree_places(nodes, checkpoint)]
        places += extents_of(nodes, checkpoint)
        places += [*superblock.key_tables, *(p for part in vault.table for p in part.places)]
        addresses = [place.address for place in places if place.stored]
        frames = list(journal.frames_behind(device, log, superblock, superblock.durable))
        addresses += [frame.header.address for frame in frames]
        needed = {ring.geometry.segment(needed) for needed in addresses}
        assert not needed & free, "a segment that a superblock needs may be overwritten"
        end = frames[-1].header.sequence + 1 if frames else superblock.replay.sequence
        assert end == ring.position.sequence, "the log does not lead to its end"


def tree_places(nodes: NodeCache, checkpoint: Checkpoint) -> list[Pointer]:
    """Where the nodes of a checkpoint's trees lie."""
    roots = (checkpoint.names, checkpoint.extents)
    places = [place for root in roots for place in run(btree.pointers(nodes, root))]
    assert sum(round_up(place.stored) for place in places) == checkpoint.node_bytes
    return places


def extents_of(nodes: NodeCache, checkpoint: Checkpoint) -> list[Extent]:
    low, high = bytes([TABLE_EXTENTS]), bytes([TABLE_EXTENTS]) + b"\xff" * 17
    return [
        Extent.unpack(key_owner(key), value)
        for key, value in run(btree.scan(nodes, checkpoint.extents, low, high, 1 << 62))
        if key[KIND_BYTE] == ItemKind.EXTENT
    ]

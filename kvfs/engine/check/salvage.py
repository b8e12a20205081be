"""What the frames in the ring say of items whose nodes are lost.

Two kinds of evidence. Leaves that the bitmap calls live, and the frames right before
the checkpoint as far as their chain is unbroken, tell exactly what the lost nodes held.
Older frames may be out of date: what they name counts only where something that is not
lost asks for it: a name, a link, live data. So nothing that was deleted comes back.
"""

from __future__ import annotations

import stat
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from kvfs.engine.check.data import is_whole
from kvfs.engine.check.frames import unbroken
from kvfs.engine.check.mend import laid
from kvfs.engine.check.tables import Tables
from kvfs.engine.check.trees import Gaps, load_node
from kvfs.engine.device import Device
from kvfs.engine.format import (
    KEY,
    TABLE_SUMMARIES,
    Dentry,
    Extent,
    FormatError,
    FrameHeader,
    Inode,
    Item,
    ItemKind,
    Pointer,
    RecordHeader,
    RecordKind,
    Slice,
    Superblock,
    dentry_key,
    extent_key,
    inode_key,
    key_owner,
    map_key,
    name_slot,
)
from kvfs.engine.journal import extent_of
from kvfs.engine.liveness import Liveness
from kvfs.engine.metadata import pointer_to
from kvfs.engine.ring import Frame, Geometry
from kvfs.engine.vault import Vault


@dataclass(frozen=True, slots=True)
class DataRecord:
    """Where a file's extent was last stored, and which part of the file it was."""

    extent: Extent
    ino: int
    directory: int
    offset: int


@dataclass(frozen=True, slots=True)
class Said:
    """The value of an item, and the segment of the frame that says so."""

    value: bytes | None
    segment: int


@dataclass(slots=True)
class Evidence:
    """`exact` are items as the lost nodes had them; `older` those of other frames, the
    newest of each key; `inodes` the newest of each inode; `gone` keys that the log behind
    the checkpoint removed. `segments` are those that what was used of it comes from."""

    gaps: Gaps
    exact: dict[bytes, bytes] = field(default_factory=dict)
    older: dict[bytes, Said] = field(default_factory=dict)
    inodes: dict[int, Said] = field(default_factory=dict)
    records: dict[int, DataRecord] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)

    def add_items(self, items: list[Item], segment: int) -> None:
        for key, value in items:
            kind, owner = KEY.unpack(key)[2], key_owner(key)
            if kind in (ItemKind.INODE, ItemKind.SUMMARY):
                self.inodes[owner] = Said(value, segment)
            if key[0] != TABLE_SUMMARIES and key in self.gaps:
                self.older[key] = Said(value, segment)

    def inode(self, ino: int) -> Inode | None:
        """The newest that is known of it."""
        said = self.inodes.get(ino)
        if said is None or said.value is None:
            return None
        self.segments.add(said.segment)
        return Inode.unpack(ino, said.value)


def gather(
    device: Device,
    superblock: Superblock,
    frames: list[Frame],
    bitmap: Liveness,
    gaps: Gaps,
    vault: Vault,
) -> Evidence:
    """`frames` are all that the ring holds, `bitmap` what the checkpoint calls live."""
    evidence = Evidence(gaps)
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    leaves: list[Pointer] = []
    for frame in frames:
        if frame.header.sequence < superblock.replay.sequence:
            evidence.add_items(frame.items, geometry.segment(frame.header.address))
        for record in frame.records:
            if record.kind == RecordKind.DATA:
                _add_record(evidence, frame.header, record, bitmap)
            elif record.kind == RecordKind.NODE and bitmap.is_live(_address(frame, record)):
                leaves.append(pointer_to(frame.header, record))
    _add_leaves(evidence, device, geometry, leaves, vault)
    for frame in reversed(unbroken(frames, superblock)):
        if _add_exact(evidence, frame) or evidence.segments:
            # With those behind it: they say that it is not out of date.
            evidence.segments.add(geometry.segment(frame.header.address))
    return evidence


def _address(frame: Frame, record: RecordHeader) -> int:
    return frame.header.address + record.payload


def _add_record(
    evidence: Evidence, header: FrameHeader, record: RecordHeader, bitmap: Liveness
) -> None:
    extent = extent_of(header, record)
    evidence.records[extent.extent_id] = DataRecord(
        extent, record.object_id, record.session_id, record.offset
    )
    if bitmap.is_live(extent.address):
        evidence.live.add(extent.extent_id)
    else:
        evidence.live.discard(extent.extent_id)


def _add_leaves(
    evidence: Evidence,
    device: Device,
    geometry: Geometry,
    pointers: list[Pointer],
    vault: Vault,
) -> None:
    """They lie below a lost node. The trees of a checkpoint have no key in common."""
    for pointer in pointers:
        try:
            node = load_node(device, geometry, pointer, vault)
        except (FormatError, OSError):
            continue
        if node.level == 0:
            evidence.exact.update(item for item in node.items() if item[0] in evidence.gaps)


def _add_exact(evidence: Evidence, frame: Frame) -> bool:
    """Whether it tells what no leaf did."""
    items: list[Item] = []
    for record in frame.records:
        if record.kind == RecordKind.DATA:
            extent = extent_of(frame.header, record)
            items.append((extent_key(extent.extent_id), extent.pack()))
    is_new = False
    for key, value in [*items, *frame.items]:
        if key not in evidence.gaps or key[0] == TABLE_SUMMARIES:
            continue
        if value is None:
            evidence.exact.pop(key, None)
            evidence.older.pop(key, None)
        else:
            is_new |= evidence.exact.get(key) != value
            evidence.exact[key] = value
    return is_new


# -- what is asked for ---------------------------------------------------------------


def adopt(device: Device, tables: Tables, evidence: Evidence, hash_key: bytes) -> None:
    """Bring back from the evidence what the tables ask for."""
    _adopt_extents(device, tables, evidence)
    wanted = _adopt_data(tables, evidence)
    named = {dentry.ino for _, _, dentry in tables.all_names()}
    inodes = tables.inodes.values()
    wanted |= named | {inode.parent for inode in inodes if inode.ino not in named}
    _adopt_inodes(tables, evidence, wanted)
    _adopt_links(tables, evidence, hash_key)


def _adopt_extents(device: Device, tables: Tables, evidence: Evidence) -> None:
    """Those that slices refer to, and those whose blocks are live; none without its bytes."""
    used = {part.extent_id for slices in tables.slices.values() for part in slices}
    for number in (used | evidence.live) - tables.extents.keys():
        key, record = extent_key(number), evidence.records.get(number)
        if record is None or key not in evidence.gaps or key in evidence.gone:
            continue
        if is_whole(device, record.extent):
            tables.extents[number] = record.extent


def _adopt_data(tables: Tables, evidence: Evidence) -> set[int]:
    """Extents that no slice refers to belong to files whose maps are lost. Returns these."""
    used = {part.extent_id for slices in tables.slices.values() for part in slices}
    said = _said_slices(evidence)
    found: dict[int, list[Slice]] = defaultdict(list)
    for number in sorted(tables.extents.keys() - used):
        record = evidence.records.get(number)
        if record is not None and map_key(record.ino, record.offset) in evidence.gaps:
            whole = Slice(record.offset, record.extent.size, number, 0)
            found[record.ino] += said.get((record.ino, number), [whole])
    for ino, slices in found.items():
        # What is not lost is right; the rest fills what is between, later extents above.
        parts = laid([*slices, *tables.slices[ino]])
        tables.slices[ino] = _cut(parts, _size_of(tables, evidence, ino))
    return set(found)


def _said_slices(evidence: Evidence) -> dict[tuple[int, int], list[Slice]]:
    """By inode and extent: the newest that frames say of lost maps."""
    said: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for key, older in evidence.older.items():
        _, owner, kind, slot = KEY.unpack(key)
        if kind == ItemKind.MAP and older.value is not None:
            part = Slice.unpack(slot, older.value)
            said[owner, part.extent_id].append(part)
    return said


def _cut(slices: list[Slice], size: int | None) -> list[Slice]:
    if size is None:
        return slices
    return [replace(p, length=min(p.length, size - p.offset)) for p in slices if p.offset < size]


def _size_of(tables: Tables, evidence: Evidence, ino: int) -> int | None:
    if ino in tables.inodes:
        return tables.inodes[ino].size
    inode = evidence.inode(ino)
    return None if inode is None else inode.size


def _adopt_inodes(tables: Tables, evidence: Evidence, wanted: set[int]) -> None:
    """Those that are asked for, the directories that they were in, and what is theirs."""
    waiting = sorted(wanted)
    adopted: set[int] = set()
    while waiting:
        ino = waiting.pop()
        key = inode_key(ino)
        is_lost = ino not in tables.inodes and key in evidence.gaps and key not in evidence.gone
        inode = evidence.inode(ino) if is_lost else None
        if inode is not None:
            inode.nlink = max(inode.nlink, 1)
            tables.inodes[ino] = inode
            adopted.add(ino)
            waiting.append(inode.parent)
    for key, said in evidence.older.items():
        _, owner, kind, _ = KEY.unpack(key)
        is_theirs = owner in adopted and kind in (ItemKind.XATTR, ItemKind.SYMLINK)
        if is_theirs and said.value is not None and key not in evidence.gone:
            evidence.segments.add(said.segment)
            tables.add(key, said.value)


def _adopt_links(tables: Tables, evidence: Evidence, hash_key: bytes) -> None:
    """Lost names of inodes that count more links than they have names: first the one that
    an inode itself knows, then what frames say."""
    links = Counter(dentry.ino for _, _, dentry in tables.all_names())

    def add(directory: int, slot: int, dentry: Dentry) -> None:
        inode, key = tables.inodes.get(dentry.ino), dentry_key(directory, slot)
        if inode is None or stat.S_ISDIR(inode.mode) or links[inode.ino] >= inode.nlink:
            return
        if key in evidence.gaps and key not in evidence.gone:
            links[inode.ino] += slot not in tables.names[directory]
            tables.names[directory].setdefault(slot, dentry)

    for inode in tables.inodes.values():
        dentry = Dentry(inode.ino, stat.S_IFMT(inode.mode), inode.name)
        add(inode.parent, name_slot(hash_key, inode.name), dentry)
    for key, said in evidence.older.items():
        _, owner, kind, slot = KEY.unpack(key)
        if kind == ItemKind.DENTRY and said.value is not None:
            evidence.segments.add(said.segment)
            add(owner, slot, Dentry.unpack(said.value))

"""What the frames in the ring say of items whose nodes are lost.

Two kinds of evidence. Leaves that the bitmap calls live, and the frames right before
the checkpoint as far as their chain is unbroken, tell exactly what the lost nodes held.
Older frames may be out of date: what they name counts only where something that is not
lost asks for it: a name, a link, live data. So nothing that was deleted comes back.
"""

from __future__ import annotations

import stat
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter, itemgetter

from sortedcontainers import SortedDict

from kvfs.engine.check.data import is_whole
from kvfs.engine.check.findings import Finding
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
    TreeNode,
    dentry_key,
    extent_key,
    inode_key,
    key_owner,
    map_key,
    name_slot,
    references_key,
    round_up,
)
from kvfs.engine.journal import extent_of
from kvfs.engine.liveness import Liveness
from kvfs.engine.metadata import pointer_to
from kvfs.engine.ring import Frame, Geometry
from kvfs.engine.vault import Vault

_SLICE_MAX = 1 << 30


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
    the checkpoint removed, `removed` those that the frames before it did; `leaves` the first and
    last keys of live leaves. `segments` are those that what was used of it comes from."""

    gaps: Gaps
    exact: dict[bytes, bytes] = field(default_factory=dict)
    older: dict[bytes, Said] = field(default_factory=dict)
    inodes: dict[int, Said] = field(default_factory=dict)
    records: dict[int, DataRecord] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    removed: set[bytes] = field(default_factory=set)
    leaves: list[tuple[bytes, bytes]] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)

    def add_items(self, items: list[Item], segment: int) -> None:
        for key, value in items:
            kind, owner = KEY.unpack(key)[2], key_owner(key)
            if kind in (ItemKind.INODE, ItemKind.SUMMARY):
                self.inodes[owner] = Said(value, segment)
            if key[0] != TABLE_SUMMARIES and key in self.gaps:
                self.older[key] = Said(value, segment)

    def denies(self, key: bytes) -> bool:
        """Whether the lost nodes are known not to have had it."""
        at = bisect_right(self.leaves, key, key=itemgetter(0)) - 1
        is_in_a_leaf = at >= 0 and key <= self.leaves[at][1]
        return key in self.removed or (is_in_a_leaf and key not in self.exact)

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
    missing: Gaps,
    vault: Vault,
) -> Evidence:
    """`frames` are all that the ring holds, `bitmap` what the checkpoint calls live; `gaps` those
    of its trees, `missing` these and what a damaged log may have told."""
    evidence = Evidence(missing)
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    leaves: list[tuple[int, Pointer]] = []
    changed: SortedDict[bytes, int] = SortedDict()
    for frame, is_current in _uses(frames, geometry):
        sequence = frame.header.sequence
        if sequence < superblock.replay.sequence:
            evidence.add_items(frame.items, geometry.segment(frame.header.address))
            changed.update((key, sequence) for key, _ in _told(frame) if key in gaps)
        for record in frame.records:
            is_live = is_current and bitmap.is_live(_address(frame, record))
            if record.kind == RecordKind.DATA:
                _add_record(evidence, frame.header, record, is_live)
            elif record.kind == RecordKind.NODE and is_live:
                leaves.append((sequence, pointer_to(frame.header, record)))
    _add_leaves(evidence, device, geometry, leaves, changed, vault)
    for frame in reversed(unbroken(frames, superblock)):
        if _add_exact(evidence, frame, gaps) or evidence.segments:
            # With those behind it: they say that it is not out of date.
            evidence.segments.add(geometry.segment(frame.header.address))
    return evidence


def all_told(
    device: Device, superblock: Superblock, frames: list[Frame], vault: Vault
) -> dict[bytes, bytes]:
    """What frames before the checkpoint and leaves in them say, the newest word on each key: where
    no checkpoint says what is still there. A leaf is the last word on all keys in its range."""
    found: SortedDict[bytes, bytes] = SortedDict()
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    for frame in frames:
        if frame.header.sequence >= superblock.replay.sequence:
            continue
        for record in frame.records:
            if record.kind == RecordKind.NODE:
                pointer = pointer_to(frame.header, record)
                with suppress(FormatError, OSError):  # it was dead, and something else lies there
                    _tell_leaf(found, load_node(device, geometry, pointer, vault))
        for key, value in _told(frame):
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
    return dict(found)


def _tell_leaf(found: SortedDict[bytes, bytes], node: TreeNode) -> None:
    if node.level == 0 and node.count:
        for key in list(found.irange(node.key(0), node.key(node.count - 1))):
            del found[key]
        found.update(node.items())


def _uses(frames: list[Frame], geometry: Geometry) -> Iterator[tuple[Frame, bool]]:
    """Each frame, and whether it is of its segment's last use. Those of one use follow each other:
    no other segment has a frame in between. What a lost write has left is of an earlier one."""
    groups = [
        (segment, list(group))
        for segment, group in groupby(frames, lambda f: geometry.segment(f.header.address))
    ]
    last = {segment: number for number, (segment, _) in enumerate(groups)}
    for number, (segment, group) in enumerate(groups):
        for frame in group:
            yield frame, last[segment] == number


def _address(frame: Frame, record: RecordHeader) -> int:
    return frame.header.address + record.payload


def _add_record(
    evidence: Evidence, header: FrameHeader, record: RecordHeader, is_live: bool
) -> None:
    extent = extent_of(header, record)
    evidence.records[extent.extent_id] = DataRecord(
        extent, record.object_id, record.session_id, record.offset
    )
    if is_live:
        evidence.live.add(extent.extent_id)
    else:
        evidence.live.discard(extent.extent_id)


def _told(frame: Frame) -> list[Item]:
    """What a frame says of the index, its extents included."""
    extents = [
        extent_of(frame.header, record)
        for record in frame.records
        if record.kind == RecordKind.DATA
    ]
    items: list[Item] = [(extent_key(extent.extent_id), extent.pack()) for extent in extents]
    return items + [item for item in frame.items if item[0][0] != TABLE_SUMMARIES]


def _add_leaves(
    evidence: Evidence,
    device: Device,
    geometry: Geometry,
    leaves: list[tuple[int, Pointer]],
    changed: SortedDict[bytes, int],
    vault: Vault,
) -> None:
    """They lie below a lost node. The trees of a checkpoint have no key in common. One in whose
    range something was `changed` by a later frame is what a lost write has left: a checkpoint
    would have written it anew."""
    for sequence, pointer in leaves:
        try:
            node = load_node(device, geometry, pointer, vault)
        except (FormatError, OSError):
            continue
        if node.level or not node.count:
            continue
        first, last = node.key(0), node.key(node.count - 1)
        if all(changed[key] < sequence for key in changed.irange(first, last)):
            evidence.leaves.append((first, last))
            evidence.exact.update(item for item in node.items() if item[0] in evidence.gaps)
    evidence.leaves.sort()


def _add_exact(evidence: Evidence, frame: Frame, gaps: Gaps) -> bool:
    """Whether it tells what no leaf did."""
    is_new = False
    for key, value in _told(frame):
        if key not in gaps:
            continue
        if value is None:
            evidence.exact.pop(key, None)
            evidence.older.pop(key, None)
            evidence.removed.add(key)
        else:
            evidence.removed.discard(key)
            is_new |= evidence.exact.get(key) != value
            evidence.exact[key] = value
    return is_new


# -- what is asked for ---------------------------------------------------------------


def adopt(device: Device, tables: Tables, evidence: Evidence, hash_key: bytes) -> list[Finding]:
    """Bring back from the evidence what the tables ask for. Tells which files may be older than
    they were."""
    _adopt_extents(device, tables, evidence)
    with_data = _adopt_data(tables, evidence)
    wanted = set(with_data)
    named = {dentry.ino for _, _, dentry in tables.all_names()}
    inodes = tables.inodes.values()
    wanted |= named | {inode.parent for inode in inodes if inode.ino not in named}
    adopted = _adopt_inodes(tables, evidence, wanted)
    _adopt_links(tables, evidence, hash_key)
    message = "it is put together from older frames, and may lack what was changed last"
    return [Finding("inode", message, ino) for ino in sorted(with_data | adopted)]


def mark_lost(tables: Tables, gaps: Gaps, id_floor: int) -> int:
    """What a map whose nodes are lost does not tell would read as zeros: where something is missing
    it becomes slices of extents that are not there, which read as errors. Their ids are from
    `id_floor` on; returns the next one."""
    for ino, inode in tables.inodes.items():
        if not stat.S_ISREG(inode.mode) or not gaps.touch(
            map_key(ino, 0), map_key(ino, inode.size)
        ):
            continue
        slices = tables.slices.get(ino, [])
        if _taken(tables, slices) >= inode.stored:
            continue  # all of it was found: what is between are holes
        lost = [
            Slice(start, end - start, id_floor + number, 0)
            for number, (start, end) in enumerate(_unknown(slices, ino, inode.size, gaps))
        ]
        id_floor += len(lost)
        if lost:
            tables.slices[ino] = sorted([*slices, *lost], key=attrgetter("offset"))
    return id_floor


def _taken(tables: Tables, slices: list[Slice]) -> int:
    """What a file with these slices takes on the device, in bytes, as far as that is known."""
    found = {part.extent_id for part in slices} & tables.extents.keys()
    return sum(round_up(tables.extents[number].stored) for number in found)


def _unknown(slices: list[Slice], ino: int, size: int, gaps: Gaps) -> Iterator[tuple[int, int]]:
    """The parts of a file, not longer than a slice may be, that no slice covers and for which
    there might be one that is lost."""
    ends = [0, *(part.end for part in slices)]
    starts = [*(part.offset for part in slices), size]
    for hole_start, hole_end in zip(ends, starts, strict=True):
        for start in range(hole_start, hole_end, _SLICE_MAX):
            end = min(start + _SLICE_MAX, hole_end)
            if gaps.touch(map_key(ino, start), map_key(ino, end - 1)):
                yield start, end


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
    """Extents that fewer slices refer to than there were belong to files whose maps are lost.
    Returns those that have more now."""
    used = Counter(part.extent_id for slices in tables.slices.values() for part in slices)
    there = tables.inodes.keys() | {dentry.ino for _, _, dentry in tables.all_names()}
    said = _said_slices(evidence)
    found: dict[int, list[Slice]] = defaultdict(list)
    for number in sorted(tables.extents):
        if not _is_missed(tables, evidence, number, used[number]):
            continue
        for ino, parts in said.get(number, {}).items():
            found[ino] += parts
        record = evidence.records.get(number)
        if record is None or record.ino in said.get(number, {}):
            continue
        # Of one that others use too only a file that is still there may be the one that lost it.
        is_wanted = (not used[number] and number not in said) or record.ino in there
        if is_wanted and map_key(record.ino, record.offset) in evidence.gaps:
            found[record.ino].append(Slice(record.offset, record.extent.size, number, 0))
    changed = set()
    for ino, slices in found.items():
        # What is not lost is right; the rest fills what is between, later extents above.
        before = tables.slices[ino]
        parts = _cut(laid([*slices, *before]), _size_of(tables, evidence, ino))
        if parts != before:
            tables.slices[ino] = parts
            changed.add(ino)
    return changed


def _is_missed(tables: Tables, evidence: Evidence, number: int, used: int) -> bool:
    """Whether an extent is known, or may be thought, to have more slices than were found."""
    key = references_key(number)
    if used and number not in tables.references and key in evidence.gaps:
        return True
    return used < tables.references.get(number, 1)


def _said_slices(evidence: Evidence) -> dict[int, dict[int, list[Slice]]]:
    """By extent and inode: the newest that frames say of lost maps."""
    said: dict[int, dict[int, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    for key, older in evidence.older.items():
        _, owner, kind, slot = KEY.unpack(key)
        if kind == ItemKind.MAP and older.value is not None and key not in evidence.gone:
            part = Slice.unpack(slot, older.value)
            said[part.extent_id][owner].append(part)
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


def _adopt_inodes(tables: Tables, evidence: Evidence, wanted: set[int]) -> set[int]:
    """Those that are asked for, the directories that they were in, and what is theirs. Returns
    these."""
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
    return adopted


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

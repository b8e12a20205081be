"""The state of a ring, from its newest superblock on, with every gap filled that can be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvfs.engine import metadata
from kvfs.engine.check.data import is_whole
from kvfs.engine.check.findings import Finding
from kvfs.engine.check.frames import Log, all_frames, new_ring, read_log, unbroken
from kvfs.engine.check.salvage import Evidence, all_told, gather
from kvfs.engine.check.slots import Slots
from kvfs.engine.check.trees import EXTENTS, NAMES, Gaps, Trees, load_node, read_trees
from kvfs.engine.device import Device
from kvfs.engine.format import (
    KIND_BYTE,
    TABLE_KEYS,
    TABLE_SUMMARIES,
    Checkpoint,
    Extent,
    FormatError,
    Item,
    ItemKind,
    Pointer,
    RecordKind,
    Superblock,
    extent_key,
    key_owner,
    round_up,
)
from kvfs.engine.journal import extent_of
from kvfs.engine.keys import Keys
from kvfs.engine.keytable import read_what_is_whole
from kvfs.engine.liveness import Liveness
from kvfs.engine.metadata import pointer_to
from kvfs.engine.ring import Frame, Geometry
from kvfs.engine.vault import Vault

_ALL_TOLD = "none can be used: all that frames tell is taken together, also what was deleted since"


@dataclass(slots=True)
class Base:
    """What a superblock's checkpoint holds, and its keys. `bitmap` is what it calls live, as far
    as that can be read; `places` are what the superblock needs besides file data. `is_lost`:
    neither the record nor the roots that it named were found."""

    superblock: Superblock
    checkpoint: Checkpoint
    trees: Trees
    bitmap: Liveness
    is_lost: bool
    vault: Vault
    findings: list[Finding] = field(default_factory=list)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.superblock.segment_size, self.superblock.segment_count)

    @property
    def places(self) -> list[Pointer]:
        keys = [place for part in self.vault.table for place in part.places]
        parts = (
            self.superblock.checkpoint, *self.checkpoint.bitmap, *self.superblock.key_tables, *keys
        )  # fmt: skip
        return [*self.trees.nodes, *(place for place in parts if place.stored)]


@dataclass(slots=True)
class Loaded:
    """`items` are all of the index; `gaps` are where some may be missing. `evidence` is there where
    something of it is lost."""

    base: Base
    log: Log
    items: dict[bytes, bytes]
    gaps: Gaps
    evidence: Evidence | None
    findings: list[Finding]


def load(device: Device, slots: Slots, unlocked: Vault) -> Loaded:
    """Raises OSError."""
    base = read_base(device, slots.newest, unlocked)
    log = read_log(device, slots.newest, slots.newest.durable)
    items, gaps = dict(base.trees.items), base.trees.gaps
    before = None
    older = slots.older
    if gaps and older is not None and older.checkpoint != slots.newest.checkpoint:
        there = read_base(device, older, unlocked)
        before = _before(device, there, slots.newest)
        base.vault.keys.learn_from(there.vault.keys)
        if before.is_exact:
            items.update(before.within(gaps))
            gaps = gaps.within(before.gaps)
    evidence = None
    if gaps or log.is_damaged:
        # What a lost frame of the log held is missing as if its nodes were.
        missing = Gaps([NAMES, EXTENTS]) if log.is_damaged else gaps
        frames = opened(all_frames(device, slots.newest), base.vault)
        evidence = gather(device, slots.newest, frames, base.bitmap, gaps, missing, base.vault)
        if before is not None and before.items and not before.is_exact:
            items.update(_still_there(device, before.within(gaps), evidence))
        elif base.is_lost:
            found = all_told(device, slots.newest, frames, base.vault)
            items.update(_still_there(device, found, evidence))
            base.findings.append(Finding("checkpoint", _ALL_TOLD))
        items.update((key, value) for key, value in evidence.exact.items() if key in gaps)
    log.frames = opened(log.frames, base.vault)
    gone = apply(items, log.frames)
    if evidence is not None:
        evidence.gone = gone
    findings = [*base.findings, *base.trees.findings, *log.findings]
    return Loaded(base, log, items, gaps, evidence, findings)


def opened(frames: list[Frame], vault: Vault) -> list[Frame]:
    """Frames with their items as the index has them, as far as there are keys for them."""
    if not vault.is_on:
        return frames
    for frame in frames:
        vault.learn_if_possible(frame.items)
    return [
        replace(frame, items=vault.opened_if_possible(_without_secrets(frame.items)))
        for frame in frames
    ]


def _without_secrets(items: list[Item]) -> list[Item]:
    return [item for item in items if item[0][0] != TABLE_KEYS]


def apply(items: dict[bytes, bytes], frames: list[Frame]) -> set[bytes]:
    """Make frames part of the items. Returns the keys that they removed last."""
    gone: set[bytes] = set()
    for frame in frames:
        for record in frame.records:
            if record.kind == RecordKind.DATA:
                extent = extent_of(frame.header, record)
                items[extent_key(extent.extent_id)] = extent.pack()
        for key, value in frame.items:
            if key[0] == TABLE_SUMMARIES:
                continue
            if value is None:
                items.pop(key, None)
                gone.add(key)
            else:
                items[key] = value
                gone.discard(key)
    return gone


@dataclass(frozen=True, slots=True)
class _Before:
    """What the older slot leads to at the newer one's checkpoint: `is_exact` where the whole log
    between the two is there. `gaps` are in its own trees."""

    items: dict[bytes, bytes]
    gaps: Gaps
    is_exact: bool

    def within(self, gaps: Gaps) -> dict[bytes, bytes]:
        return {key: value for key, value in self.items.items() if key in gaps}


def _before(device: Device, base: Base, newest: Superblock) -> _Before:
    older = base.superblock
    log = read_log(device, older, newest.durable)
    between = [f for f in log.frames if f.header.sequence < newest.replay.sequence]
    items = dict(base.trees.items)
    apply(items, opened(between, base.vault))
    is_exact = len(between) == newest.replay.sequence - older.replay.sequence
    return _Before(items, base.trees.gaps, is_exact)


def _still_there(
    device: Device, items: dict[bytes, bytes], evidence: Evidence
) -> dict[bytes, bytes]:
    """Of items of before those that nothing speaks against: what a lost frame has removed or moved
    since may be among them, but no extent without its bytes."""
    kept = {key: value for key, value in items.items() if not evidence.denies(key)}
    for extent in extents_in(kept):
        if not is_whole(device, extent):
            del kept[extent_key(extent.extent_id)]
    return kept


def needed_by(device: Device, slots: Slots, unlocked: Vault) -> set[int]:
    """The segments that what either superblock leads to lies in. Raises OSError."""
    needed: set[int] = set()
    for superblock in (slots.newest, slots.older):
        if superblock is not None:
            log = read_log(device, superblock, slots.newest.durable)
            needed |= _segments(read_base(device, superblock, unlocked), log)
    return needed


def _segments(base: Base, log: Log) -> set[int]:
    geometry = base.geometry
    addresses = [place.address for place in base.places]
    addresses += [frame.header.address for frame in log.frames]
    addresses += [extent.address for extent in extents_in(base.trees.items)]
    within = {geometry.segment(a) for a in addresses if geometry.contains(a, 0)}
    return within | {int(segment) for segment in base.bitmap.live_blocks.nonzero()[0]}


def extents_in(items: dict[bytes, bytes]) -> list[Extent]:
    """Those that can be decoded."""
    return [
        Extent.unpack(key_owner(key), value)
        for key, value in items.items()
        if key[KIND_BYTE] == ItemKind.EXTENT and len(value) == Extent.STRUCT.size
    ]


# -- the checkpoint ----------------------------------------------------------------


def read_base(device: Device, superblock: Superblock, unlocked: Vault) -> Base:
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    bitmap = new_ring(superblock).liveness
    findings: list[Finding] = []
    vault = _vault_at(device, superblock, unlocked, findings)
    checkpoint, is_read = Checkpoint(), True
    place = superblock.checkpoint
    if place.stored:
        try:
            checkpoint = Checkpoint.unpack(metadata.read(device, place))
        except (FormatError, OSError) as fault:
            findings.append(Finding("checkpoint", f"it cannot be read: {fault}"))
            checkpoint, is_read = _found_roots(device, superblock, vault), False
    trees = read_trees(device, geometry, checkpoint, vault)
    if not is_read:
        _expect_no_more(trees, checkpoint)
    is_lost = not is_read and checkpoint == Checkpoint()
    base = Base(superblock, checkpoint, trees, bitmap, is_lost, vault, findings)
    is_whole = _read_bitmap(device, base)
    if is_read and is_whole and not trees.gaps:
        _check_bitmap(base)
    return base


def _vault_at(
    device: Device, superblock: Superblock, unlocked: Vault, findings: list[Finding]
) -> Vault:
    try:
        vault = unlocked.at(superblock)
    except FormatError as fault:
        findings.append(Finding("keys", f"a superblock has none: {fault}"))
        return replace(unlocked, keys=Keys(), table=[])
    faults = read_what_is_whole(device, superblock, vault)
    findings += [Finding("keys", str(fault)) for fault in faults]
    return vault


def _found_roots(device: Device, superblock: Superblock, vault: Vault) -> Checkpoint:
    """Roots are written after what is below them: the last node of each tree that was
    written before the checkpoint's end, as far as no frame is missing there."""
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    found = Checkpoint()
    for frame in unbroken(all_frames(device, superblock), superblock):
        for record in reversed(frame.records):
            if record.kind != RecordKind.NODE or (found.names.stored and found.extents.stored):
                continue
            pointer = pointer_to(frame.header, record)
            try:
                first = load_node(device, geometry, pointer, vault).key(0)
            except (FormatError, OSError):
                return found
            if first in NAMES and not found.names.stored:
                found = replace(found, names=pointer)
            elif first in EXTENTS and not found.extents.stored:
                found = replace(found, extents=pointer)
    return found


def _expect_no_more(trees: Trees, roots: Checkpoint) -> None:
    """The checkpoint was not read: a tree without a root may have been there."""
    trees.findings = [f for f in trees.findings if f.structure != "checkpoint"]
    trees.gaps.ranges.extend(
        keys for root, keys in ((roots.names, NAMES), (roots.extents, EXTENTS)) if not root.stored
    )


# -- the bitmap ----------------------------------------------------------------------


def _read_bitmap(device: Device, base: Base) -> bool:
    """Whether all parts could be read."""
    bitmap, is_whole = base.bitmap, True
    for part, place in enumerate(base.checkpoint.bitmap):
        if not place.stored:
            continue
        try:
            if part >= bitmap.part_count:
                raise FormatError("it is of no part of the ring")
            bitmap.load_part(part, metadata.read(device, place))
        except (FormatError, OSError) as fault:
            message = f"part {part} cannot be used: {fault}"
            base.findings.append(Finding("bitmap", message, address=place.address))
            is_whole = False
    for place in (base.superblock.checkpoint, *base.checkpoint.bitmap):
        # They were written after the parts that tell of them.
        is_placed = place.stored and base.geometry.contains(place.address, round_up(place.stored))
        if is_placed and not bitmap.is_live(place.address):
            bitmap.mark(place.address, place.stored)
    return is_whole


def _check_bitmap(base: Base) -> None:
    expected = Liveness(base.superblock.segment_count, base.superblock.segment_size)
    places: list[Extent | Pointer] = [*base.places, *extents_in(base.trees.items)]
    mark_disjoint(expected, base.geometry, places)
    for part in range(expected.part_count):
        says, is_ = (int.from_bytes(b.pack_part(part), "little") for b in (base.bitmap, expected))
        if says != is_:
            dead, live = (says & ~is_).bit_count(), (is_ & ~says).bit_count()
            message = f"part {part} calls {dead} blocks live that are not, and {live} dead"
            base.findings.append(Finding("bitmap", message))


def mark_disjoint(liveness: Liveness, geometry: Geometry, places: list[Extent | Pointer]) -> None:
    """Mark what lies in the ring, and not where something else does."""
    end = 0
    for place in sorted(places, key=lambda place: place.address):
        taken = round_up(place.stored)
        if place.address >= end and geometry.contains(place.address, taken):
            liveness.mark(place.address, place.stored)
            end = place.address + taken

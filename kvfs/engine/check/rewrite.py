"""Writes a mended state: a new checkpoint in free space, then both superblock slots.

Until the first slot is written the ring is what it was, whenever that is interrupted: what
either superblock needs is not overwritten, and no frame there is leads to the new ones.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvfs.engine import keytable, metadata
from kvfs.engine.btree import Entry, cut
from kvfs.engine.check.findings import CheckError
from kvfs.engine.check.load import extents_in, mark_disjoint
from kvfs.engine.check.segments import Move
from kvfs.engine.check.trees import EXTENTS, NAMES, Leaf, Range, unchanged
from kvfs.engine.device import Device
from kvfs.engine.format import (
    BLOCK,
    KIND_BYTE,
    NO_SEGMENT,
    Checkpoint,
    Extent,
    ItemKind,
    Pointer,
    Position,
    RecordHeader,
    RecordKind,
    Superblock,
    SuperblockFlag,
    extent_key,
    key_owner,
    round_up,
)
from kvfs.engine.io import InlineExecutor, Step, run
from kvfs.engine.journal import extent_of
from kvfs.engine.metadata import EncodedRecord
from kvfs.engine.ring import Geometry, PlacedFrame, Ring, RingFull
from kvfs.engine.superblocks import write_superblock
from kvfs.engine.vault import Turn, Vault
from kvfs.engine.writeback import Payload, place_unit

_NO_ROOM = "no segment is free for what the repair has to write"


@dataclass(frozen=True, slots=True)
class NewState:
    """What is to be written. `items` are all of the index, `extents` those that they name;
    `move` is what of these is to lie elsewhere. `leaves` are what of the index may stay, as
    `stored_items`; `needed` segments are left alone, and those with `evidence` where there is
    room elsewhere. The log ended at `end`, if it ended well; `sequence` is above that of every
    frame there is, `operation` the last that the items contain."""

    items: dict[bytes, bytes]
    extents: list[Extent]
    move: Move
    leaves: list[Leaf]
    stored_items: dict[bytes, bytes]
    needed: set[int]
    evidence: set[int]
    end: Position | None
    sequence: int
    operation: int
    id_floor: int


def write_state(device: Device, newest: Superblock, state: NewState, vault: Vault) -> None:
    """`vault` has the keys of all that is kept. Raises CheckError when there is no room,
    OSError."""
    turn = vault.next_turn()
    try:
        ring, root, tables = _checkpointed(device, newest, state, vault, turn)
    except RingFull:
        raise CheckError(_NO_ROOM) from None
    device.flush()
    following = newest.next(
        epoch=newest.epoch + 1,
        epoch_start=ring.position.sequence,
        id_floor=state.id_floor,
        oplog_token=secrets.token_bytes(16),
        oplog_home=b"",
        flags=SuperblockFlag.CLEAN,
        operation=state.operation,
        checkpoint=root,
        replay=ring.position,
        key_tables=tables,
        sealed_keys=vault.sealed_keys(turn) if vault.is_on else newest.sealed_keys,
    )
    # Both slots: the older one still leads to what was mended.
    for superblock in (following, following.next()):
        write_superblock(device, superblock)


_Written = tuple[Ring, Pointer, tuple[Pointer, Pointer]]


def _checkpointed(
    device: Device, newest: Superblock, state: NewState, vault: Vault, turn: Turn
) -> _Written:
    """The new log, and the places of checkpoint and key table in it. Raises RingFull, OSError."""
    changed = _changed(state.stored_items, state.items)
    moved = {extent_key(extent.extent_id) for extent in state.move.extents}
    kept = unchanged(state.leaves, changed | moved)

    def written(needed: set[int]) -> _Written:
        ring = _new_log(newest, state, kept, needed)
        writer = _CheckpointWriter(device, ring, state.operation, vault)
        items = {**state.items, **writer.write_data(state.move)}
        tables = writer.write_keys(items, turn)
        return ring, writer.write(items, kept), tables

    try:
        return written(state.needed | state.evidence)
    except RingFull:
        # Frames that what was lost is known from may go once it is known, as the last resort:
        # interrupted from here on, a second repair would know less.
        return written(state.needed)


def _changed(stored: dict[bytes, bytes], items: dict[bytes, bytes]) -> set[bytes]:
    keys = {key for key, value in items.items() if stored.get(key) != value}
    return keys | (stored.keys() - items.keys())


def _new_log(newest: Superblock, state: NewState, kept: list[Leaf], needed: set[int]) -> Ring:
    """A log that begins behind the old one, if that ended well, else in a free segment. Raises
    RingFull."""
    geometry = Geometry(newest.segment_size, newest.segment_count)
    # Its first frame names none before it: no frame there is leads into this log.
    start = Position(0, 0, NO_SEGMENT, state.sequence, 0)
    ring = Ring(geometry, newest.uuid, newest.epoch + 1, start)
    mark_disjoint(ring.liveness, geometry, [*state.extents, *(leaf.pointer for leaf in kept)])
    used = {int(segment) for segment in ring.liveness.live_blocks.nonzero()[0]} | needed
    for segment in used:
        ring.pin(geometry.address(segment))
    if state.end is not None and state.end.offset + BLOCK <= geometry.segment_size:
        ring.position = replace(start, segment=state.end.segment, offset=state.end.offset)
        return ring
    first = next((s for s in range(geometry.segment_count) if s not in used), None)
    if first is None:
        raise RingFull
    ring.position = replace(start, segment=first)
    return ring


@dataclass(slots=True)
class _CheckpointWriter:
    device: Device
    ring: Ring
    operation: int
    vault: Vault
    _nodes: list[Pointer] = field(default_factory=list)

    def write(self, items: dict[bytes, bytes], kept: list[Leaf]) -> Pointer:
        """The place of the checkpoint. Raises RingFull, OSError."""
        entries = sorted(items.items())
        names = self._write_tree(NAMES, entries, kept)
        extents = self._write_tree(EXTENTS, entries, kept)
        places = [*self._nodes, *(leaf.pointer for leaf in kept)]
        node_bytes = sum(round_up(place.stored) for place in places)
        checkpoint = Checkpoint(names, extents, node_bytes, self._write_bitmap())
        record = metadata.encode(RecordKind.CHECKPOINT, checkpoint.pack())
        return self._append([record])[0]

    def write_keys(self, items: dict[bytes, bytes], turn: Turn) -> tuple[Pointer, Pointer]:
        """A key table of what there is. Raises RingFull, OSError."""
        vault = self.vault
        if not vault.is_on:
            return Pointer(), Pointer()
        inodes = [key_owner(key) for key in items if key[KIND_BYTE] == ItemKind.INODE]
        vault.keys, vault.table = vault.keys.of(inodes, extents_in(items)), []

        def write(records: list[EncodedRecord]) -> Step[list[Pointer]]:
            return self._append(records)
            yield

        nowhere = (Pointer(), Pointer())
        return run(keytable.append(vault, turn, nowhere, InlineExecutor().submit, write)).roots

    def _write_tree(self, keys: Range, entries: list[Entry], kept: list[Leaf]) -> Pointer:
        """Leaves that are kept, new ones between them, and all that is above."""
        entries = [entry for entry in entries if entry[0] in keys]
        level, above = 0, list(self._leaves(keys, entries, kept))
        while len(above) > 1:
            level += 1
            above = self._write_nodes(level, above)
        return Pointer.unpack(above[0][1]) if above else Pointer()

    def _leaves(self, keys: Range, entries: list[Entry], kept: list[Leaf]) -> Iterator[Entry]:
        def between(low: bytes, high: bytes) -> list[Entry]:
            start = bisect_left(entries, low, key=lambda entry: entry[0])
            end = bisect_left(entries, high, key=lambda entry: entry[0])
            return entries[start:end]

        low = keys.low
        for leaf in kept:
            if leaf.first in keys:
                yield from self._write_nodes(0, between(low, leaf.keys.low))
                yield leaf.first, leaf.pointer.pack()
                low = leaf.keys.high
        yield from self._write_nodes(0, between(low, keys.high))

    def _write_nodes(self, level: int, entries: list[Entry]) -> list[Entry]:
        drafts = cut(level, entries, self.vault)
        places = self._append([draft.record for draft in drafts])
        self._nodes += places
        return [(draft.first, place.pack()) for draft, place in zip(drafts, places, strict=True)]

    def _write_bitmap(self) -> tuple[Pointer, ...]:
        """All parts with anything in them, without what only this does to them."""
        liveness = self.ring.liveness
        parts = [liveness.pack_part(part) for part in range(liveness.part_count)]
        used = [number for number, bits in enumerate(parts) if any(bits)]
        records = [metadata.encode(RecordKind.BITMAP, parts[number]) for number in used]
        places = dict(zip(used, self._append(records), strict=True))
        return tuple(places.get(number, Pointer()) for number in range(len(parts)))

    def write_data(self, move: Move) -> dict[bytes, bytes]:
        """The items of extents that lie elsewhere from now on. Raises RingFull, OSError."""
        items = {}
        old = {extent.extent_id: extent for extent in move.extents}
        for payloads in move.payloads():
            for frame, records in self._place(payloads):
                for record in records:
                    extent = extent_of(frame.header, record)
                    before = old[extent.extent_id]
                    self.ring.liveness.clear(before.address, before.stored)
                    self.ring.liveness.mark(extent.address, extent.stored)
                    items[extent_key(extent.extent_id)] = extent.pack()
        return items

    def _append(self, records: list[EncodedRecord]) -> list[Pointer]:
        payloads = [Payload(encoded.record, [encoded.stored]) for encoded in records]
        found = []
        for frame, group in self._place(payloads):
            for record in group:
                pointer = metadata.pointer_to(frame.header, record)
                self.ring.liveness.mark(pointer.address, pointer.stored)
                found.append(pointer)
        return found

    def _place(self, payloads: list[Payload]) -> list[tuple[PlacedFrame, list[RecordHeader]]]:
        if not payloads:
            return []
        placed = place_unit(self.ring, payloads, [], self.operation)
        for frame, _ in placed:
            self.device.write(frame.header.address, frame.buffers)
        return placed

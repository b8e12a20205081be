"""Checkpoints: the index as it is, the bitmap and the key table, then the superblock that leads
to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvfs.engine import keytable, metadata
from kvfs.engine.appender import Appender
from kvfs.engine.btree import Rewrite
from kvfs.engine.failover import Failover
from kvfs.engine.format import (
    Checkpoint,
    KeyPart,
    Pointer,
    RecordKind,
    Superblock,
    SuperblockFlag,
    TreeNode,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Step
from kvfs.engine.nodecache import NodeCache
from kvfs.engine.vault import Turn, Vault

_ERASED_SECONDS = 20.0


@dataclass(eq=False)
class Checkpoints:
    """Appended while nothing else is under way."""

    appender: Appender
    index: Index

    def __post_init__(self) -> None:
        self.time = self.erased_time = time.monotonic()

    @property
    def is_to_erase(self) -> bool:
        """Whether the device has held keys of what was removed for long enough."""
        is_late = time.monotonic() - self.erased_time > _ERASED_SECONDS
        return is_late and self.index.vault.keys.has_dead

    def rewrite_part(self, pointer: Pointer) -> None:
        """With the next one, of bitmap or key table; roots are written anew every time."""
        if pointer in self.index.checkpoint.bitmap:
            changed = self.appender.ring.liveness.changed
            changed.add(self.index.checkpoint.bitmap.index(pointer))
        vault = self.index.vault
        vault.keys.changed |= {n for n, part in enumerate(vault.table) if pointer in part.places}

    def append(self, id_floor: Callable[[], int], *, closing: bool) -> Step[None]:
        """It describes all that has its place in the ring; ids below `id_floor` may be taken
        until the next one. Raises OSError, UnreadableNode."""
        appender, ring = self.appender, self.appender.ring
        described = appender.operation
        update = yield from self.index.update(self._rewrite)
        for node in update.written:
            ring.liveness.mark(node.address, node.stored)
        for pointer in (*update.replaced, appender.superblock.checkpoint):
            self._release(pointer)
        keys = yield from self._append_keys()
        checkpoint = yield from self._append_bitmap(update.checkpoint)
        root = yield from self._append_root(checkpoint)
        following = appender.superblock.next(
            checkpoint=root,
            replay=ring.position,
            operation=described,
            id_floor=id_floor(),
            flags=SuperblockFlag.CLEAN if closing else SuperblockFlag(0),
        )
        if keys is not None:
            following = replace(following, key_tables=keys.roots, sealed_keys=keys.sealed)
        needed = yield from self._publish(following)
        self.index.checkpointed(checkpoint)
        if keys is not None:
            self.index.vault.began(keys.turn, keys.table)
            self.index.vault.keys.checkpointed()
            self.erased_time = time.monotonic()
        ring.checkpointed(needed)
        self.time = time.monotonic()
        appender.bytes_since_checkpoint = 0
        appender.counters.checkpoints += 1

    def _append_root(self, checkpoint: Checkpoint) -> Step[Pointer]:
        """Where it is, once that is durable."""
        appender, ring = self.appender, self.appender.ring
        record = metadata.encode(RecordKind.CHECKPOINT, checkpoint.pack())
        (root,) = yield from appender.append_metadata([record])
        ring.liveness.mark(root.address, root.stored)
        yield from appender.written_metadata()
        appender.committed_sequence = ring.position.sequence - 1
        yield from appender.failover.lasting(appender.flush)
        appender.check()
        return root

    def _publish(self, superblock: Superblock) -> Step[int]:
        """The sequence of the first frame that the older slot needs from now on."""
        previous = self.appender.superblock
        yield from self.appender.write_superblock(superblock)
        if self.index.vault.keys.has_dead:
            # The other slot still has what opens the dead keys.
            previous = superblock.next()
            yield from self.appender.write_superblock(previous)
        return previous.replay.sequence

    def _rewrite(self) -> Rewrite:
        appender = self.appender
        nodes = _PatientNodes(self.index.nodes, appender.failover)
        return Rewrite(nodes, appender.submit, appender.append_metadata)

    def _append_keys(self) -> Step[_Keys | None]:
        """The key table, without the keys that are dead."""
        appender, vault = self.appender, self.index.vault
        if not vault.is_on:
            return None
        turn = vault.next_turn()
        roots = appender.superblock.key_tables
        appended = yield from keytable.append(
            vault, turn, roots, appender.submit, appender.append_metadata
        )
        for pointer in appended.replaced:
            self._release(pointer)
        for pointer in appended.written:
            appender.ring.liveness.mark(pointer.address, pointer.stored)
        return _Keys(turn, appended.table, appended.roots, vault.sealed_keys(turn))

    def _append_bitmap(self, checkpoint: Checkpoint) -> Step[Checkpoint]:
        """The parts of the bitmap that changed, without what only this does to them."""
        liveness = self.appender.ring.liveness
        missing = liveness.part_count - len(checkpoint.bitmap)
        places = [*checkpoint.bitmap, *[Pointer()] * missing]
        changed: set[int] = set()
        while more := liveness.changed - changed:
            changed |= more
            for part in more:
                self._release(places[part])
        liveness.changed.clear()
        parts = sorted(changed)
        records = [metadata.encode(RecordKind.BITMAP, liveness.pack_part(n)) for n in parts]
        pointers = yield from self.appender.append_metadata(records)
        for part, pointer in zip(parts, pointers, strict=True):
            places[part] = pointer
            liveness.mark(pointer.address, pointer.stored)
        return replace(checkpoint, bitmap=tuple(places))

    def _release(self, pointer: Pointer) -> None:
        """The other superblock slot still needs it, until the checkpoint after this one."""
        ring = self.appender.ring
        if pointer.stored:
            ring.release(pointer.address, pointer.stored, ring.position.sequence)


@dataclass(slots=True)
class _PatientNodes:
    """Nodes that a checkpoint cannot do without: it waits for a device that is away."""

    nodes: NodeCache
    failover: Failover

    @property
    def vault(self) -> Vault:
        return self.nodes.vault

    def load(self, pointer: Pointer) -> Step[TreeNode]:
        return self.failover.read(lambda: self.nodes.load(pointer), is_needed=True)

    def keep(self, pointer: Pointer, node: TreeNode) -> None:
        self.nodes.keep(pointer, node)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The key table of a checkpoint that is being written, and what its superblock holds."""

    turn: Turn
    table: list[KeyPart]
    roots: tuple[Pointer, Pointer]
    sealed: bytes

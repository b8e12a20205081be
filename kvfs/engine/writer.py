"""The only one that appends to the ring: batches, checkpoints, flushes.

Changes are sealed into batches; a batch is encoded in a thread, placed in the ring
and written, and committed in order. Batches overlap: one is encoded while others are
written. A checkpoint is written while nothing else is under way.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from kvfs.engine import cleaner, journal, keytable, metadata
from kvfs.engine.btree import Rewrite
from kvfs.engine.buffer import Buffer
from kvfs.engine.buffers import BufferPool
from kvfs.engine.cleaner import LiveRecord, Unreadable
from kvfs.engine.codec import AutoCodec
from kvfs.engine.device import Device
from kvfs.engine.failover import Failover
from kvfs.engine.format import (
    BLOCK,
    Checkpoint,
    FormatError,
    KeyPart,
    Pointer,
    RecordKind,
    Superblock,
    SuperblockFlag,
    TreeNode,
    round_up,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Completion, Executor, Step, Urgency, wait, wait_all
from kvfs.engine.metadata import EncodedRecord
from kvfs.engine.nodecache import NodeCache, UnreadableNode
from kvfs.engine.nodes import error
from kvfs.engine.ring import PlacedFrame, Ring
from kvfs.engine.space import Purpose, Space
from kvfs.engine.state import State
from kvfs.engine.superblocks import write_superblock
from kvfs.engine.vault import Turn, Vault
from kvfs.engine.writeback import (
    BATCH_OPERATIONS,
    BATCH_SIZE,
    Batch,
    Encoded,
    Payload,
    Placed,
    in_ring,
    place,
    place_unit,
    start_encoding,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

# So many ids are handed out between two checkpoints, at most.
ID_WINDOW = 1 << 24
_METADATA_WRITES_MAX = 8
_WORTH_CLEANING = 97  # percent of a segment: one with more that is live is left alone
_BATCH_CHARGE_MAX = 4 * BATCH_SIZE
_IN_FLIGHT_MAX = 2
_BANDWIDTH_SAMPLE_MIN = 1024 * 1024
_ERASED_SECONDS = 20.0
_SHORT_OF_SPACE = 4  # less than one part in so many is free


@dataclass(slots=True)
class Counters:
    """What was done since the store was opened. Sizes in bytes."""

    operations: int = 0
    payload_written: int = 0
    device_written: int = 0
    frames: int = 0
    flushes: int = 0
    checkpoints: int = 0
    cleaned_segments: int = 0
    carried: int = 0
    reclaimed_units: int = 0
    reclaimed: int = 0
    recovered_operations: int = 0
    replayed_frames: int = 0


@dataclass(slots=True)
class _Open:
    """The operations since the last seal: their data, the space promised to them, when
    the first came (by the monotonic clock, in seconds)."""

    data_bytes: int = 0
    charge: int = 0
    since: float | None = None


@dataclass(eq=False)
class Writer:
    """`operation` is the last that was answered. Belongs to the loop's thread."""

    device: Device
    executor: Executor
    buffer: Buffer
    ring: Ring
    index: Index
    state: State
    space: Space
    superblock: Superblock
    operation: int
    on_blocks_changed: Callable[[list[int]], None]
    shadow_size: int
    deadline_seconds: float

    def __post_init__(self) -> None:
        self.failover = Failover(
            self.device, self.executor, self.shadow_size, self.deadline_seconds,
            lambda: self.superblock, lambda: self.committed_sequence, self._is_durable,
        )  # fmt: skip
        self.auto = AutoCodec()
        self.counters = Counters()
        self.failure: BaseException | None = None
        self.damage: str | None = None
        self.next_id = self.superblock.id_floor
        self.unsaved = 0
        self.committed_sequence = self.ring.position.sequence - 1
        self.flush_time = self.checkpoint_time = time.monotonic()
        self.erased_time = time.monotonic()
        self.bytes_since_checkpoint = 0
        self._open = _Open()
        self._sealed_operation = self._placed_operation = self.operation
        self._sealed: deque[Batch] = deque()  # not placed in the ring yet
        self._uncommitted: deque[Batch] = deque()  # those, and the ones being written
        self._arenas = BufferPool(BATCH_SIZE + BATCH_SIZE // 4, 4)
        self._working: Completion[None] | None = None
        self._flushing: Completion[None] | None = None
        self._checkpoint: _Checkpoint | None = None
        self._is_closing = False
        self._cleaning: Completion[None] | None = None
        self._metadata_writes: deque[Completion[None]] = deque()
        self._unreleased: deque[tuple[int, Batch]] = deque()  # with their last sequence

    # -- what the store asks for

    def new_id(self) -> int:
        return self.new_ids(1)

    def new_ids(self, count: int) -> int:
        """The first of so many."""
        self.next_id += count
        return self.next_id - count

    @property
    def ids_are_short(self) -> bool:
        """Whether so many were taken, also for what then failed, that a checkpoint should make
        it safe to take more."""
        return self.superblock.id_floor - self.next_id < ID_WINDOW // 2

    @property
    def is_to_erase(self) -> bool:
        """Whether the device has held keys of what was removed for long enough."""
        is_late = time.monotonic() - self.erased_time > _ERASED_SECONDS
        return is_late and self.index.vault.keys.has_dead

    @property
    def is_cut_off(self) -> bool:
        """Whether the device is away, and what is answered waits for it in memory."""
        return self.failover.failure is not None

    def check(self) -> None:
        """Raises EIO once the device has failed for good."""
        if self.failure is not None:
            raise error(errno.EIO, f"the device failed: {self.failure}")

    @property
    def promised(self) -> int:
        """Bytes of the ring that are promised to what is not in it yet."""
        return self._open.charge + sum(batch.charge for batch in self._uncommitted)

    @property
    def is_idle(self) -> bool:
        is_written = not self._uncommitted and self.operation == self._sealed_operation
        return is_written and not self._unreleased

    @property
    def waits_since(self) -> float | None:
        """When the oldest operation that is not sealed was answered."""
        return self._open.since

    def count(self, charge: int, length: int) -> None:
        """An operation was done, with `length` bytes of data: seal when there is enough."""
        self.operation += 1
        self.counters.operations += 1
        self.count_rewritten(charge, length)

    def count_rewritten(self, charge: int, length: int) -> None:
        """So many bytes of file data are to be written, which no operation has changed."""
        self.unsaved += length
        opened = self._open
        opened.charge += charge
        opened.data_bytes += length
        if opened.since is None:
            opened.since = time.monotonic()
        if (
            opened.data_bytes >= BATCH_SIZE
            or opened.charge >= _BATCH_CHARGE_MAX
            or self.operation - self._sealed_operation >= BATCH_OPERATIONS
        ):
            self.seal()

    def seal(self) -> None:
        """End the open batch and have it written."""
        if self.operation == self._sealed_operation and not self.state.has_changes:
            return
        # One head block for the frame, and one that a segment's end may cost.
        charge = self._open.charge + 2 * BLOCK
        sealed = self.state.seal(self.new_id)
        batch = Batch(sealed, self.operation, charge, self._open.data_bytes)
        self._sealed_operation = self.operation
        self._open = _Open()
        self._sealed.append(batch)
        self._uncommitted.append(batch)
        for waiting in islice(self._sealed, _IN_FLIGHT_MAX):
            self._encode(waiting)
        self._start()

    def relieve(self) -> Step[None]:
        """Wait until the buffer need not keep the oldest batch any longer. Raises EIO."""
        if not self._uncommitted:
            self.seal()
        if self._uncommitted:
            yield from self._until(self._uncommitted[0].committed)
        elif self._unreleased:
            yield from self.flush()
        self.check()

    def written(self) -> Step[None]:
        """Everything answered so far is in the ring, if not flushed."""
        self.check()
        self.seal()
        yield from self.arrived()

    def arrived(self) -> Step[None]:
        """Everything sealed so far is in the ring, if not flushed."""
        self.failover.check()
        if self._uncommitted:
            yield from self._until(self._uncommitted[-1].committed)
        self.check()

    def sync(self) -> Step[None]:
        """Everything answered so far is durable on return. Raises OSError EIO."""
        yield from self.written()
        target = self.committed_sequence
        while self.ring.flushed < target:
            if self._flushing is not None and not self._flushing.done:
                yield self.failover.gate(self._flushing)
            else:
                yield from self.flush()
            self.check()
            self.failover.check()

    def flush(self) -> Step[None]:
        """What is in the ring is durable on return. Raises OSError."""
        return self._flush_by(self.device.flush)

    def _flush_by(self, work: Callable[[], None]) -> Step[None]:
        """Flushes, and what ends with one, go one after the other: what one that fails has lost
        must not be confirmed by another. Raises OSError."""
        while self._flushing is not None and not self._flushing.done:
            yield self.failover.gate(self._flushing)
            self.failover.check()
        self.failover.check()
        covered, failures = self.committed_sequence, self.failover.counters.failures
        flushing = self._flushing = self.failover.submit(work)
        # Also when nobody waits for it any longer, its outcome counts.
        flushing.when_done(partial(self._flushed, flushing, covered, failures))
        yield from self._until(flushing)

    def _until(self, completion: Completion[T]) -> Step[T]:
        """For who waits from outside. Raises EIO when the device fails meanwhile."""
        gate = self.failover.gate(completion)
        if not gate.done:
            yield gate
        self.failover.check()
        return completion.result()

    def checkpoint(self, *, closing: bool = False) -> Step[None]:
        """The index on the device describes everything answered before. Raises OSError EIO, also
        when the index of before cannot be read: `damage` then says so, and no more is made."""
        self.check()
        self.failover.check()
        self.seal()
        if self.damage is not None:
            raise error(errno.EIO, self.damage)
        if self._checkpoint is None:
            self._checkpoint = _Checkpoint()
        wanted = self._checkpoint
        wanted.operation = self._sealed_operation
        # One that a tick asks for beside the last must not take the mark of a clean end away.
        self._is_closing |= closing
        wanted.closing = self._is_closing
        self._start()
        yield from self._until(wanted.written)

    def clean(self) -> Step[None]:
        """Carry what is live out of the segments that are cheapest to empty, as far as there
        is room for it; two checkpoints later they are free."""
        self.check()
        self.failover.check()
        if self._cleaning is None:
            self._cleaning = Completion()
        cleaning = self._cleaning
        self._start()
        yield from self._until(cleaning)

    def finished(self) -> Step[None]:
        """Nothing is under way any longer."""
        if self._working is not None:
            yield from self._until(self._working)

    # -- the work

    def _start(self) -> None:
        if self._working is None or self._working.done:
            self._working = self.executor.spawn(self._work())

    def _work(self) -> Step[None]:
        in_flight: deque[_InFlight] = deque()
        try:
            while self._sealed or in_flight or self._checkpoint or self._cleaning:
                self.check()
                yield from self._keep_little()
                alone = self._checkpoint_due or self._cleaning is not None
                if self._sealed and len(in_flight) < _IN_FLIGHT_MAX and not alone:
                    in_flight.append((yield from self._place_next()))
                elif in_flight:
                    yield from self._commit(in_flight.popleft())
                elif self._cleaning is not None:
                    cleaning, self._cleaning = self._cleaning, None
                    yield from self._clean(cleaning)
                elif self._checkpoint is not None:
                    wanted, self._checkpoint = self._checkpoint, None
                    yield from self._write_checkpoint(wanted)
        except Exception as failure:
            # A fault of ours counts like one of the device: nothing more is appended.
            log.exception("write-back stopped")
            self._fail(failure)

    @property
    def _checkpoint_due(self) -> bool:
        """One is wanted, and all that it was asked to describe has its place. A batch may
        be without an operation of its own: the root's."""
        wanted = self._checkpoint
        if wanted is None:
            return False
        return not self._sealed or self._sealed[0].operation > wanted.operation

    def _encode(self, batch: Batch) -> None:
        if batch.encoding is None:
            left = self.space.left_after_cleaning(self.promised)
            self.auto.space_is_short = left < self.space.total // _SHORT_OF_SPACE
            start_encoding(batch, self.auto, self._arenas, self.index.vault, self._submit)

    def _place_next(self) -> Step[_InFlight]:
        batch = self._sealed[0]
        self._encode(batch)
        assert batch.encoding is not None
        encoded: Encoded = yield from wait(batch.encoding)
        self._sealed.popleft()
        for following in islice(self._sealed, 1):
            self._encode(following)
        if encoded.encoded_bytes:
            self.auto.saw_encode(encoded.encoded_bytes, encoded.encoded_into, encoded.seconds)
        placed = place(batch, encoded, self.ring, self.state, self.index.vault)
        self._placed_operation = batch.operation
        return _InFlight(batch, placed, self._write(placed.frames))

    def _write(self, frames: list[PlacedFrame]) -> list[Completion[None]]:
        for frame in frames:
            self.counters.frames += 1
            self.counters.device_written += frame.header.frame_length
            self.bytes_since_checkpoint += frame.header.frame_length
        return [self.failover.write(frame, partial(self._write_frame, frame)) for frame in frames]

    def _keep_little(self) -> Step[None]:
        """Of frames that a device which fails may lose."""
        if self.failover.wants_flush:
            yield from self.failover.lasting(self.flush)

    def _submit(self, work: Callable[[], T]) -> Completion[T]:
        return self.executor.submit(work, Urgency.WRITE_BACK)

    def _write_frame(self, frame: PlacedFrame) -> None:
        """Runs in a thread; the smoothed bandwidth is one number, so a race is harmless."""
        started = time.perf_counter()
        self.device.write(frame.header.address, frame.buffers)
        if frame.header.frame_length >= _BANDWIDTH_SAMPLE_MIN:
            self.auto.saw_write(frame.header.frame_length, time.perf_counter() - started)

    def _commit(self, written: _InFlight) -> Step[None]:
        yield from wait_all(written.writes)
        self.check()
        batch, placed = written.batch, written.placed
        self.buffer.in_ring(in_ring(batch, placed))
        dead = self.state.committed(batch.sealed, placed.extents)
        journal.apply_unit(self.index, self.ring, placed.extents, placed.items, dead)
        self.buffer.forget(dead)
        self.index.settle(batch.sealed.batch, placed.items)
        self.counters.payload_written += sum(extent.size for extent in placed.extents)
        self.committed_sequence = placed.frames[-1].header.sequence
        self.unsaved -= batch.data_bytes
        assert self._uncommitted.popleft() is batch
        self._unreleased.append((self.committed_sequence, batch))
        if not self.failover.is_on:
            self._release_up_to(self.committed_sequence)
        self.on_blocks_changed(placed.changed_inodes)
        batch.committed.finish()

    def _flushed(self, flush: Completion[None], covered: int, failures: int) -> None:
        if flush.error is not None:
            if not self.failover.fail(flush.error):
                self._fail(flush.error)
        elif failures == self.failover.counters.failures:
            # Else what it was for may have been lost between: it says nothing.
            self._is_durable(covered)

    def _is_durable(self, covered: int) -> None:
        self.ring.flushed = max(self.ring.flushed, covered)
        self.flush_time = time.monotonic()
        self.counters.flushes += 1
        self.failover.flushed(covered)
        self._release_up_to(covered)

    def _release_up_to(self, sequence: int) -> None:
        """The buffer need not keep any longer what is in frames up to that one."""
        while self._unreleased and self._unreleased[0][0] <= sequence:
            _, batch = self._unreleased.popleft()
            self.buffer.release(batch.operation)
            self.failover.released(batch.operation)
            if batch.arena is not None:
                batch.arena.give_back()

    def _fail(self, failure: BaseException) -> None:
        """The device cannot be written: say so to everyone, and lose nothing. The buffer
        keeps what the ring lacks; the next mount finds it there."""
        self.failure = self.failure or failure
        fault = error(errno.EIO, f"the device failed: {failure}")
        for batch in self._uncommitted:
            batch.committed.finish(error=fault)
        self._uncommitted.clear()
        self._sealed.clear()
        if self._checkpoint is not None:
            self._checkpoint.written.finish(error=fault)
            self._checkpoint = None
        if self._cleaning is not None:
            self._cleaning.finish(error=fault)
            self._cleaning = None

    # -- cleaning

    def _clean(self, cleaning: Completion[None]) -> Step[None]:
        try:
            most = self.space.usable_segment * _WORTH_CLEANING // 100
            budget = max(most, self.space.left(self.promised, Purpose.CLEAN) // 2)
            while (victim := self.ring.victim()) is not None:
                live = self.ring.live_bytes(victim)
                budget -= live
                possible = self.space.left(self.promised, Purpose.CLEAN) >= live
                if live > most or budget < 0 or not possible:
                    break
                yield from self._clean_segment(victim)
        except Exception as failure:
            cleaning.finish(error=error(errno.EIO, f"the device failed: {failure}"))
            raise
        cleaning.finish()

    def _clean_segment(self, segment: int) -> Step[None]:
        try:
            yield from self._empty(segment)
        except Unreadable as fault:
            # It stays as it is; everything else can still be written and cleaned.
            log.error("segment %d cannot be cleaned: %s", segment, fault)
            self.ring.unmovable.add(segment)

    def _empty(self, segment: int) -> Step[None]:
        """Raises Unreadable."""
        ring = self.ring
        found = yield from self._read(partial(cleaner.survey, self.device, ring, segment))
        if found.taken != ring.live_bytes(segment):
            raise Unreadable("its frames cannot be read")
        taken = sum(round_up(node.stored) for node in found.nodes)
        keys = yield from self._read(partial(cleaner.first_keys, self.device, found.nodes))
        self.index.move(keys, taken)
        for pointer in found.others:
            self.rewrite_part(pointer)
        for group in cleaner.groups(found.data):
            yield from self._carry(group)
        ring.emptied(segment)
        self.counters.cleaned_segments += 1

    def rewrite_part(self, pointer: Pointer) -> None:
        """Of bitmap or key table; roots are written anew every time."""
        if pointer in self.index.checkpoint.bitmap:
            self.ring.liveness.changed.add(self.index.checkpoint.bitmap.index(pointer))
        vault = self.index.vault
        vault.keys.changed |= {n for n, part in enumerate(vault.table) if pointer in part.places}

    def _carry(self, group: list[LiveRecord]) -> Step[None]:
        carry = partial(cleaner.carry, self.device, self.executor, self.index, group)
        carried = yield from self._read_step(carry)
        items = self.index.vault.sealed(carried.items)
        frames = place_unit(self.ring, carried.payloads, items, self._placed_operation)
        yield from wait_all(self._write([frame for frame, _ in frames]))
        self.check()
        extents = [
            journal.extent_of(frame.header, record) for frame, group in frames for record in group
        ]
        journal.apply_unit(self.index, self.ring, extents, [], carried.old)
        for extent in extents:
            self.state.files.table.moved(extent)
        self.committed_sequence = frames[-1][0].header.sequence
        self.counters.carried += sum(payload.size for payload in carried.payloads)
        yield from self._keep_little()

    def _read(self, work: Callable[[], T]) -> Step[T]:
        return self._read_step(lambda: wait(self._submit(work)))

    def _read_step(self, make: Callable[[], Step[T]]) -> Step[T]:
        """Raises Unreadable."""
        try:
            return (yield from self.failover.read(make))
        except (OSError, FormatError) as fault:
            raise Unreadable(str(fault)) from fault

    # -- checkpoints

    def _write_checkpoint(self, wanted: _Checkpoint) -> Step[None]:
        try:
            yield from self._append_checkpoint(closing=wanted.closing)
        except UnreadableNode as fault:
            # The log goes on, so that what was answered has its place; new operations do not.
            yield from self._written_metadata(0)
            self.damage = (
                f"the index is damaged, so that nothing more can be changed: {fault.filename}; "
                f"unmount it, then repair it with kvfs fsck --repair"
            )
            log.error("%s", self.damage)
            wanted.written.finish(error=error(errno.EIO, self.damage))
            return
        except Exception as failure:
            wanted.written.finish(error=error(errno.EIO, f"the device failed: {failure}"))
            raise
        wanted.written.finish()

    def _append_checkpoint(self, *, closing: bool) -> Step[None]:
        described = self._placed_operation
        update = yield from self.index.update(self._rewrite)
        for node in update.written:
            self.ring.liveness.mark(node.address, node.stored)
        for pointer in (*update.replaced, self.superblock.checkpoint):
            self._release(pointer)
        keys = yield from self._append_keys()
        checkpoint = yield from self._append_bitmap(update.checkpoint)
        record = metadata.encode(RecordKind.CHECKPOINT, checkpoint.pack())
        (root,) = yield from self._append_metadata([record])
        self.ring.liveness.mark(root.address, root.stored)
        yield from self._written_metadata(0)
        self.committed_sequence = self.ring.position.sequence - 1
        yield from self.failover.lasting(self.flush)
        self.check()
        previous = self.superblock
        following = previous.next(
            checkpoint=root,
            replay=self.ring.position,
            operation=described,
            id_floor=self.next_id + (0 if closing else ID_WINDOW),
            flags=SuperblockFlag.CLEAN if closing else SuperblockFlag(0),
        )
        if keys is not None:
            following = replace(following, key_tables=keys.roots, sealed_keys=keys.sealed)
        yield from self._write_superblock(following)
        self.index.checkpointed(checkpoint)
        if self.index.vault.keys.has_dead:
            # The other slot still has what opens the dead keys.
            following = following.next()
            yield from self._write_superblock(following)
            previous = following
        if keys is not None:
            self.index.vault.began(keys.turn, keys.table)
            self.index.vault.keys.checkpointed()
            self.erased_time = time.monotonic()
        self.ring.checkpointed(previous.replay.sequence)
        self.checkpoint_time = time.monotonic()
        self.bytes_since_checkpoint = 0
        self.counters.checkpoints += 1

    def _write_superblock(self, superblock: Superblock) -> Step[None]:
        write = partial(write_superblock, self.device, superblock)
        self.failover.following = superblock
        yield from self.failover.lasting(lambda: self._flush_by(write))
        self.superblock, self.failover.following = superblock, None

    def _append_keys(self) -> Step[_Keys | None]:
        """The key table, without the keys that are dead."""
        vault = self.index.vault
        if not vault.is_on:
            return None
        turn = vault.next_turn()
        roots = self.superblock.key_tables
        appended = yield from keytable.append(
            vault, turn, roots, self._submit, self._append_metadata
        )
        for pointer in appended.replaced:
            self._release(pointer)
        for pointer in appended.written:
            self.ring.liveness.mark(pointer.address, pointer.stored)
        return _Keys(turn, appended.table, appended.roots, vault.sealed_keys(turn))

    def _rewrite(self) -> Rewrite:
        nodes = _PatientNodes(self.index.nodes, self.failover)
        return Rewrite(nodes, self._submit, self._append_metadata)

    def _append_bitmap(self, checkpoint: Checkpoint) -> Step[Checkpoint]:
        """The parts of the bitmap that changed, without what only this does to them."""
        liveness = self.ring.liveness
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
        pointers = yield from self._append_metadata(records)
        for part, pointer in zip(parts, pointers, strict=True):
            places[part] = pointer
            liveness.mark(pointer.address, pointer.stored)
        return replace(checkpoint, bitmap=tuple(places))

    def _release(self, pointer: Pointer) -> None:
        """The other superblock slot still needs it, until the checkpoint after this one."""
        if pointer.stored:
            self.ring.release(pointer.address, pointer.stored, self.ring.position.sequence)

    def _append_metadata(self, records: list[EncodedRecord]) -> Step[list[Pointer]]:
        """Append records; they are on their way to the device, not there yet."""
        payloads = [Payload(encoded.record, [encoded.stored]) for encoded in records]
        if not payloads:
            return []
        frames = place_unit(self.ring, payloads, [], self._placed_operation)
        self._metadata_writes += self._write([frame for frame, _ in frames])
        yield from self._written_metadata(_METADATA_WRITES_MAX)
        return [
            metadata.pointer_to(frame.header, record) for frame, group in frames for record in group
        ]

    def _written_metadata(self, left: int) -> Step[None]:
        """At most `left` of the writes are still under way."""
        while len(self._metadata_writes) > left:
            yield from wait(self._metadata_writes.popleft())


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


@dataclass(slots=True, eq=False)
class _InFlight:
    """A placed batch whose frames are being written."""

    batch: Batch
    placed: Placed
    writes: list[Completion[None]]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The key table of a checkpoint that is being written, and what its superblock holds."""

    turn: Turn
    table: list[KeyPart]
    roots: tuple[Pointer, Pointer]
    sealed: bytes


class _Checkpoint:
    """One that is wanted: it describes all up to `operation`."""

    def __init__(self) -> None:
        self.operation = 0
        self.closing = False
        self.written: Completion[None] = Completion()

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
from dataclasses import dataclass
from functools import partial
from itertools import islice

from kvfs.engine import journal
from kvfs.engine.buffer import Buffer
from kvfs.engine.buffers import BufferPool
from kvfs.engine.codec import AutoCodec
from kvfs.engine.device import Device
from kvfs.engine.format import BLOCK, Pointer, Superblock, SuperblockFlag, round_up
from kvfs.engine.index import Index
from kvfs.engine.io import Completion, Executor, Step, wait, wait_all
from kvfs.engine.nodes import error
from kvfs.engine.ring import PlacedFrame, Ring
from kvfs.engine.space import Space
from kvfs.engine.state import State
from kvfs.engine.superblocks import write_superblock
from kvfs.engine.writeback import (
    BATCH_OPERATIONS,
    BATCH_SIZE,
    Batch,
    Encoded,
    Payload,
    Placed,
    place,
    place_unit,
    start_encoding,
)

log = logging.getLogger(__name__)

ID_WINDOW = 1 << 32
_BATCH_CHARGE_MAX = 4 * BATCH_SIZE
_IN_FLIGHT_MAX = 2
_BANDWIDTH_SAMPLE_MIN = 1024 * 1024
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
    checkpoint_places: list[Pointer]
    on_blocks_changed: Callable[[list[int]], None]

    def __post_init__(self) -> None:
        self.auto = AutoCodec()
        self.counters = Counters()
        self.failure: BaseException | None = None
        self.next_id = self.superblock.id_floor
        self.unsaved = 0
        self.committed_sequence = self.ring.position.sequence - 1
        self.flush_time = self.checkpoint_time = time.monotonic()
        self.bytes_since_checkpoint = 0
        self._open = _Open()
        self._sealed_operation = self._placed_operation = self.operation
        self._sealed: deque[Batch] = deque()  # not placed in the ring yet
        self._uncommitted: deque[Batch] = deque()  # those, and the ones being written
        self._arenas = BufferPool(BATCH_SIZE + BATCH_SIZE // 4, 4)
        self._working: Completion[None] | None = None
        self._flushing: Completion[None] | None = None
        self._checkpoint: _Checkpoint | None = None

    # -- what the store asks for

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def check(self) -> None:
        """Raises EIO once the device has failed."""
        if self.failure is not None:
            raise error(errno.EIO, f"the device failed: {self.failure}")

    @property
    def promised(self) -> int:
        """Bytes of the ring that are promised to what is not in it yet."""
        return self._open.charge + sum(batch.charge for batch in self._uncommitted)

    @property
    def is_idle(self) -> bool:
        return not self._uncommitted and self.operation == self._sealed_operation

    @property
    def waits_since(self) -> float | None:
        """When the oldest operation that is not sealed was answered."""
        return self._open.since

    def count(self, charge: int, length: int) -> None:
        """An operation was done, with `length` bytes of data: seal when there is enough."""
        self.operation += 1
        self.counters.operations += 1
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
        """Wait until the oldest batch is in the ring."""
        if not self._uncommitted:
            self.seal()
        if self._uncommitted:
            yield from wait(self._uncommitted[0].committed)
        self.check()

    def written(self) -> Step[None]:
        """Everything answered so far is in the ring, if not flushed."""
        self.check()
        self.seal()
        if self._uncommitted:
            yield from wait(self._uncommitted[-1].committed)
        self.check()

    def sync(self) -> Step[None]:
        """Everything answered so far is durable on return. Raises OSError EIO."""
        yield from self.written()
        target = self.committed_sequence
        while self.ring.flushed < target:
            if self._flushing is not None and not self._flushing.done:
                yield self._flushing
            else:
                yield from self.flush()
            self.check()

    def flush(self) -> Step[None]:
        """What is in the ring is durable on return. Raises OSError."""
        covered = self.committed_sequence
        self._flushing = self.executor.submit(self.device.flush)
        # Also when nobody waits for it any longer, its outcome counts.
        self._flushing.when_done(partial(self._flushed, self._flushing, covered))
        yield from wait(self._flushing)

    def checkpoint(self, *, closing: bool = False) -> Step[None]:
        """The index on the device describes everything answered before."""
        self.check()
        self.seal()
        if self._checkpoint is None:
            self._checkpoint = _Checkpoint()
        wanted = self._checkpoint
        wanted.operation = self._sealed_operation
        wanted.closing |= closing
        self._start()
        yield from wait(wanted.written)

    def finished(self) -> Step[None]:
        """Nothing is under way any longer."""
        if self._working is not None:
            yield from wait(self._working)

    # -- the work

    def _start(self) -> None:
        if self._working is None or self._working.done:
            self._working = self.executor.spawn(self._work())

    def _work(self) -> Step[None]:
        in_flight: deque[_InFlight] = deque()
        try:
            while self._sealed or in_flight or self._checkpoint:
                self.check()
                if self._sealed and len(in_flight) < _IN_FLIGHT_MAX and not self._checkpoint_due:
                    in_flight.append((yield from self._place_next()))
                elif in_flight:
                    yield from self._commit(in_flight.popleft())
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
            left = self.space.left(self.promised, frees=False)
            self.auto.space_is_short = left < self.space.total // _SHORT_OF_SPACE
            start_encoding(batch, self.auto, self._arenas, self.executor.submit)

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
        placed = place(batch, encoded, self.ring, self.state)
        self._placed_operation = batch.operation
        return _InFlight(batch, placed, self._write(placed.frames))

    def _write(self, frames: list[PlacedFrame]) -> list[Completion[None]]:
        for frame in frames:
            self.counters.frames += 1
            self.counters.device_written += frame.header.frame_length
            self.bytes_since_checkpoint += frame.header.frame_length
        return [self.executor.submit(partial(self._write_frame, frame)) for frame in frames]

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
        journal.apply_unit(self.index, self.ring, placed.extents, placed.items)
        self.index.settle(batch.sealed.batch, placed.items)
        self.state.committed(batch.sealed)
        self.buffer.release(batch.operation)
        if batch.arena is not None:
            batch.arena.give_back()
        self.counters.payload_written += sum(extent.size for extent in placed.extents)
        self.committed_sequence = placed.frames[-1].header.sequence
        self.unsaved -= batch.data_bytes
        assert self._uncommitted.popleft() is batch
        self.on_blocks_changed(placed.changed_inodes)
        batch.committed.finish()

    def _flushed(self, flush: Completion[None], covered: int) -> None:
        if flush.error is not None:
            self._fail(flush.error)
            return
        self.ring.flushed = max(self.ring.flushed, covered)
        self.flush_time = time.monotonic()
        self.counters.flushes += 1

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

    # -- checkpoints

    def _write_checkpoint(self, wanted: _Checkpoint) -> Step[None]:
        try:
            yield from self._append_checkpoint(closing=wanted.closing)
        except Exception as failure:
            wanted.written.finish(error=error(errno.EIO, f"the device failed: {failure}"))
            raise
        wanted.written.finish()

    def _append_checkpoint(self, *, closing: bool) -> Step[None]:
        described = self._placed_operation
        # Not longer than extents: how well a segment is filled depends on the longest.
        limit = min(journal.CHUNK_SIZE_MAX, self.space.extent_max)
        encode = partial(journal.encode_chunks, self.index.snapshot(), limit)
        pointers = yield from self._append_chunks((yield from wait(self.executor.submit(encode))))
        (root,) = yield from self._append_chunks([journal.encode_root(pointers)])
        self.committed_sequence = self.ring.position.sequence - 1
        yield from self.flush()
        self.check()
        previous = self.superblock
        following = previous.next(
            checkpoint=root,
            replay=self.ring.position,
            operation=described,
            id_floor=self.next_id + (0 if closing else ID_WINDOW),
            flags=SuperblockFlag.CLEAN if closing else SuperblockFlag(0),
        )
        write = partial(write_superblock, self.device, following)
        yield from wait(self.executor.submit(write))
        self._checkpointed(previous, following, [root, *pointers])

    def _append_chunks(self, chunks: list[journal.EncodedChunk]) -> Step[list[Pointer]]:
        payloads = [Payload(chunk.record, [chunk.stored]) for chunk in chunks]
        if not payloads:
            return []
        frames = place_unit(self.ring, payloads, [], self._placed_operation)
        pointers = [
            journal.pointer_to(frame.header, record) for frame, group in frames for record in group
        ]
        for pointer in pointers:
            self.ring.liveness.mark(pointer.address, pointer.stored)
        yield from wait_all(self._write([frame for frame, _ in frames]))
        return pointers

    def _checkpointed(
        self, previous: Superblock, following: Superblock, places: list[Pointer]
    ) -> None:
        self.superblock = following
        for pointer in self.checkpoint_places:
            # The other slot still points there, until the next checkpoint takes it.
            self.ring.release(pointer.address, pointer.stored, following.replay.sequence - 1)
        self.space.held = sum(
            round_up(pointer.stored) for pointer in (*self.checkpoint_places, *places)
        )
        self.checkpoint_places = places
        self.ring.checkpointed(previous.replay.sequence)
        self.checkpoint_time = time.monotonic()
        self.bytes_since_checkpoint = 0
        self.counters.checkpoints += 1


@dataclass(slots=True, eq=False)
class _InFlight:
    """A placed batch whose frames are being written."""

    batch: Batch
    placed: Placed
    writes: list[Completion[None]]


class _Checkpoint:
    """One that is wanted: it describes all up to `operation`."""

    def __init__(self) -> None:
        self.operation = 0
        self.closing = False
        self.written: Completion[None] = Completion()

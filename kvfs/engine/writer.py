"""What is answered, on its way into the ring: who decides what is appended next.

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
from dataclasses import dataclass, field
from itertools import islice

from kvfs.engine import journal
from kvfs.engine.appender import Appender
from kvfs.engine.buffer import Buffer
from kvfs.engine.buffers import BufferPool
from kvfs.engine.checkpoints import Checkpoints
from kvfs.engine.cleaner import Cleaner
from kvfs.engine.format import BLOCK
from kvfs.engine.index import Index
from kvfs.engine.io import Completion, Step, wait, wait_all
from kvfs.engine.nodecache import UnreadableNode
from kvfs.engine.nodes import error
from kvfs.engine.space import Space
from kvfs.engine.state import State
from kvfs.engine.writeback import (
    BATCH_OPERATIONS,
    BATCH_SIZE,
    Batch,
    Encoded,
    Placed,
    in_ring,
    place,
    start_encoding,
)

log = logging.getLogger(__name__)

# So many ids are handed out between two checkpoints, at most.
ID_WINDOW = 1 << 24
_BATCH_CHARGE_MAX = 4 * BATCH_SIZE
_IN_FLIGHT_MAX = 2
_SHORT_OF_SPACE = 4  # less than one part in so many is free


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

    appender: Appender
    buffer: Buffer
    index: Index
    state: State
    space: Space
    on_blocks_changed: Callable[[list[int]], None] = field(default=lambda inodes: None)

    def __post_init__(self) -> None:
        self.appender.on_durable = self._release_up_to
        self.appender.on_failure = self._failed
        self.checkpoints = Checkpoints(self.appender, self.index)
        self._cleaner = Cleaner(
            self.appender, self.index, self.space, self.checkpoints,
            lambda: self.promised, self.state.files.table.moved,
        )  # fmt: skip
        self.damage: str | None = None
        self.operation = self.appender.operation
        self.next_id = self.appender.superblock.id_floor
        self.unsaved = 0
        self._open = _Open()
        self._sealed_operation = self.operation
        self._sealed: deque[Batch] = deque()  # not placed in the ring yet
        self._uncommitted: deque[Batch] = deque()  # those, and the ones being written
        self._unreleased: deque[tuple[int, Batch]] = deque()  # with their last sequence
        self._arenas = BufferPool(BATCH_SIZE + BATCH_SIZE // 4, 4)
        self._working: Completion[None] | None = None
        self._checkpoint: _Checkpoint | None = None
        self._is_closing = False
        self._cleaning: Completion[None] | None = None

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
        return self.appender.superblock.id_floor - self.next_id < ID_WINDOW // 2

    @property
    def is_cut_off(self) -> bool:
        """Whether the device is away, and what is answered waits for it in memory."""
        return self.appender.failover.failure is not None

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
        self.appender.counters.operations += 1
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
            yield from self.appender.until(self._uncommitted[0].committed)
        elif self._unreleased:
            yield from self.appender.flush()
        self.appender.check()

    def written(self) -> Step[None]:
        """Everything answered so far is in the ring, if not flushed."""
        self.appender.check()
        self.seal()
        yield from self.arrived()

    def arrived(self) -> Step[None]:
        """Everything sealed so far is in the ring, if not flushed."""
        self.appender.failover.check()
        if self._uncommitted:
            yield from self.appender.until(self._uncommitted[-1].committed)
        self.appender.check()

    def sync(self) -> Step[None]:
        """Everything answered so far is durable on return. Raises OSError EIO."""
        yield from self.written()
        yield from self.appender.sync()

    def checkpoint(self, *, closing: bool = False) -> Step[None]:
        """The index on the device describes everything answered before. Raises OSError EIO, also
        when the index of before cannot be read: `damage` then says so, and no more is made."""
        self.appender.check()
        self.appender.failover.check()
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
        yield from self.appender.until(wanted.written)

    def clean(self) -> Step[None]:
        """Carry what is live out of the segments that are cheapest to empty, as far as there
        is room for it; two checkpoints later they are free."""
        self.appender.check()
        self.appender.failover.check()
        if self._cleaning is None:
            self._cleaning = Completion()
        cleaning = self._cleaning
        self._start()
        yield from self.appender.until(cleaning)

    def finished(self) -> Step[None]:
        """Nothing is under way any longer."""
        if self._working is not None:
            yield from self.appender.until(self._working)

    # -- the work

    def _start(self) -> None:
        if self._working is None or self._working.done:
            self._working = self.appender.executor.spawn(self._work())

    def _work(self) -> Step[None]:
        in_flight: deque[_InFlight] = deque()
        try:
            while self._sealed or in_flight or self._checkpoint or self._cleaning:
                self.appender.check()
                yield from self.appender.keep_little()
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
            self.appender.fail(failure)

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
            self.appender.auto.space_is_short = left < self.space.total // _SHORT_OF_SPACE
            start_encoding(
                batch, self.appender.auto, self._arenas, self.index.vault, self.appender.submit
            )

    def _place_next(self) -> Step[_InFlight]:
        batch = self._sealed[0]
        self._encode(batch)
        assert batch.encoding is not None
        encoded: Encoded = yield from wait(batch.encoding)
        batch.arena = encoded.arena
        self._sealed.popleft()
        for following in islice(self._sealed, 1):
            self._encode(following)
        if encoded.encoded_bytes:
            self.appender.auto.saw_encode(
                encoded.encoded_bytes, encoded.encoded_into, encoded.seconds
            )
        placed = place(batch, encoded, self.appender.ring, self.state, self.index.vault)
        self.appender.operation = batch.operation
        return _InFlight(batch, placed, self.appender.write(placed.frames))

    def _commit(self, written: _InFlight) -> Step[None]:
        yield from wait_all(written.writes)
        self.appender.check()
        batch, placed = written.batch, written.placed
        self.buffer.in_ring(in_ring(batch, placed))
        dead = self.state.committed(batch.sealed, placed.extents)
        journal.apply_unit(self.index, self.appender.ring, placed.extents, placed.items, dead)
        self.buffer.forget(dead)
        self.index.settle(batch.sealed.batch, placed.items)
        self.appender.counters.payload_written += sum(extent.size for extent in placed.extents)
        self.appender.committed_sequence = placed.frames[-1].header.sequence
        self.unsaved -= batch.data_bytes
        assert self._uncommitted.popleft() is batch
        self._unreleased.append((self.appender.committed_sequence, batch))
        if not self.appender.failover.is_on:
            self._release_up_to(self.appender.committed_sequence)
        self.on_blocks_changed(placed.changed_inodes)
        batch.committed.finish()

    def _release_up_to(self, sequence: int) -> None:
        """The buffer need not keep any longer what is in frames up to that one."""
        while self._unreleased and self._unreleased[0][0] <= sequence:
            _, batch = self._unreleased.popleft()
            self.buffer.release(batch.operation)
            self.appender.failover.released(batch.operation)
            if batch.arena is not None:
                batch.arena.give_back()

    def _failed(self) -> None:
        """The device cannot be written: say so to everyone, and lose nothing. The buffer
        keeps what the ring lacks; the next mount finds it there."""
        fault = error(errno.EIO, f"the device failed: {self.appender.failure}")
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

    def _clean(self, cleaning: Completion[None]) -> Step[None]:
        try:
            yield from self._cleaner.clean()
        except Exception as failure:
            cleaning.finish(error=error(errno.EIO, f"the device failed: {failure}"))
            raise
        cleaning.finish()

    def _write_checkpoint(self, wanted: _Checkpoint) -> Step[None]:
        try:
            window = 0 if wanted.closing else ID_WINDOW
            yield from self.checkpoints.append(
                lambda: self.next_id + window, closing=wanted.closing
            )
        except UnreadableNode as fault:
            # The log goes on, so that what was answered has its place; new operations do not.
            yield from self.appender.written_metadata()
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

"""The one face of the engine: a tree of files on a ring.

Every method that may wait is a step (see io.py). An operation is admitted (is there
space?), prepared, logged in the buffer, done, and thereby answered; write-back brings
it into the ring later, in order. `sync` makes everything that was answered durable.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kvfs.engine import journal, ops
from kvfs.engine.buffer import Buffer
from kvfs.engine.buffers import BufferPool
from kvfs.engine.codec import AutoCodec, CodecChoice
from kvfs.engine.device import Device, DeviceError
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    FIRST_FREE_ID,
    KIND_BYTE,
    NO_SEGMENT,
    ROOT_INODE,
    SEGMENT_COUNT_MIN,
    SEGMENT_SIZE_MAX,
    SEGMENT_SIZE_MIN,
    Dentry,
    Extent,
    FormatError,
    Inode,
    ItemKind,
    Pointer,
    Position,
    Superblock,
    SuperblockFlag,
    key_owner,
    round_up,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Completion, Executor, Step, run, wait, wait_all
from kvfs.engine.reader import Chunk, ExtentReader
from kvfs.engine.ring import RESERVED_SEGMENTS, PlacedFrame
from kvfs.engine.state import CODEC_XATTR, Hole, Node, Part, State, Stored, error
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

WRITE_SIZE_MAX = 1024 * 1024
_ID_WINDOW = 1 << 32
_IN_FLIGHT_MAX = 2
_OPERATION_COST = 2048
_BATCH_CHARGE_MAX = 4 * BATCH_SIZE
_WRITE_SECONDS = 5.0
_FLUSH_SECONDS = 30.0
_DIRTY_SECONDS = 5.0
_DIRTY_MIN = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Limits of a mounted store. Sizes in bytes, times in seconds."""

    cache_size: int = 128 * 1024 * 1024
    checkpoint_seconds: float = 300.0
    checkpoint_bytes: int = 1024 * 1024 * 1024
    uid: int = field(default_factory=os.geteuid)
    gid: int = field(default_factory=os.getegid)


@dataclass(slots=True)
class Counters:
    """What the store did since it was opened."""

    operations: int = 0
    payload_written: int = 0
    device_written: int = 0
    frames: int = 0
    flushes: int = 0
    checkpoints: int = 0
    recovered_operations: int = 0
    replayed_frames: int = 0


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the ring. `live` counts each shared extent once."""

    total: int
    free: int
    live: int
    inodes: int


def format_device(device: Device, segment_size: int, *, uuid: bytes | None = None) -> Superblock:
    """Write an empty ring. Raises DeviceError when the device is too small."""
    if not SEGMENT_SIZE_MIN <= segment_size <= SEGMENT_SIZE_MAX or segment_size % SEGMENT_SIZE_MIN:
        raise DeviceError("the segment size must be 1 MiB to 1 GiB, in whole MiB")
    count = (device.size - DATA_START) // segment_size
    if count < SEGMENT_COUNT_MIN:
        needed = (DATA_START + SEGMENT_COUNT_MIN * segment_size) // 2**20
        raise DeviceError(
            f"the device is too small: {SEGMENT_COUNT_MIN} segments of "
            f"{segment_size // 2**20} MiB need {needed} MiB; choose a smaller --segment-size"
        )
    superblock = Superblock(
        uuid=uuid or secrets.token_bytes(16),
        generation=0,
        epoch=0,
        epoch_start=0,
        created_ns=time.time_ns(),
        device_size=DATA_START + count * segment_size,
        segment_size=segment_size,
        segment_count=count,
        id_floor=FIRST_FREE_ID,
        hash_key=secrets.token_bytes(16),
        oplog_token=secrets.token_bytes(16),
        flags=SuperblockFlag.CLEAN,
        operation=0,
        checkpoint=Pointer(),
        replay=Position(segment=0, offset=0, next_segment=1, sequence=1, previous_checksum=0),
    )
    # Both slots, the older one first: one alone that gets lost must not lose the ring.
    for generation in (superblock, superblock.next()):
        journal.write_superblock(device, generation)
    return generation


class Store:
    """Use `Store.open`. All methods belong to one thread, the loop's."""

    def __init__(
        self,
        device: Device,
        executor: Executor,
        buffer: Buffer,
        superblock: Superblock,
        options: StoreOptions,
    ) -> None:
        self._device = device
        self._executor = executor
        self._buffer = buffer
        self._options = options
        self._superblock = superblock
        self._ring = journal.open_ring(superblock)
        self._index = Index()
        self._extent_max = superblock.segment_size // 8
        self._state = State(self._index, superblock.hash_key, self._extent_max)
        self._reader = ExtentReader(device, executor, options.cache_size)
        self._reply = self._zeros = memoryview(b"")
        self._arenas = BufferPool(BATCH_SIZE + BATCH_SIZE // 4, 4)
        self._auto = AutoCodec()
        self._checkpoint_places: list[Pointer] = []
        self._next_id = superblock.id_floor
        self._operation = superblock.operation
        self._sealed_operation = superblock.operation
        self._sealed: deque[Batch] = deque()  # not placed in the ring yet
        self._uncommitted: deque[Batch] = deque()  # those and the ones being written
        self._placed_operation = superblock.operation
        self._writer: Completion[None] | None = None
        self._flushing: Completion[None] | None = None
        self._checkpoint_wanted: Completion[None] | None = None
        self._checkpoint_operation = superblock.operation
        self._open_bytes = self._open_charge = self._unsaved = 0
        self._committed_sequence = superblock.replay.sequence - 1
        self._bytes_at_checkpoint = 0
        self._checkpoint_time = self._opened_time = self._flush_time = time.monotonic()
        self._open_since: float | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self.read_only = device.read_only
        self.damage: str | None = None
        self.counters = Counters()
        self.on_blocks_changed: Callable[[list[int]], None] = lambda inodes: None

    # -- opening and closing

    @classmethod
    def open(
        cls,
        device: Device,
        name: str,
        executor: Executor,
        buffer: Buffer,
        options: StoreOptions | None = None,
    ) -> Store:
        """Read the checkpoint, replay the ring and then the buffer. Waits in place.

        Raises DeviceError with what to do when the device cannot be trusted. When the
        log is damaged the store is read-only and `damage` says why.
        """
        superblocks = journal.read_superblocks(device, name)
        store = cls(device, executor, buffer, superblocks.newest, options or StoreOptions())
        try:
            store._load(name)
        except FormatError as fault:
            raise DeviceError(f"{name}: {fault}; the index cannot be read") from None
        store._make_root()
        if not store.read_only:
            store._begin(lost=superblocks.one_is_lost)
        return store

    def close(self) -> Step[None]:
        """Everything into the ring, a checkpoint, and the mark of a clean end. Raises
        OSError when the device fails; the buffer then keeps what the ring lacks."""
        if self.read_only:
            return
        if self._failure is not None:
            self._buffer.close(keep=True)
            self._check_writable()
        try:
            yield from self._drop_orphans()
            self._seal()
            self._closing = True
            yield from self.checkpoint()
        except OSError:
            self._buffer.close(keep=True)
            raise
        self._buffer.close(keep=False)

    def _load(self, name: str) -> None:
        superblock, ring = self._superblock, self._ring
        items, places = journal.read_checkpoint(self._device, superblock.checkpoint)
        self._index.apply(items)
        self._checkpoint_places = places
        for pointer in places:
            ring.liveness.mark(pointer.address, pointer.stored)
        for key, value in items:
            if key[KIND_BYTE] == ItemKind.EXTENT and value is not None:
                extent = Extent.unpack(key_owner(key), value)
                ring.liveness.mark(extent.address, extent.stored)
        replayed = journal.replay(self._device, ring, self._index, superblock)
        self._operation = self._sealed_operation = self._placed_operation = replayed.operation
        self.counters.replayed_frames = replayed.frames
        self._state.inodes = self._index.inodes
        if replayed.damage:
            self.damage = f"{name} is damaged: {replayed.damage}; mounted read-only"
            self.read_only = True

    def _begin(self, *, lost: bool) -> None:
        """A new epoch: ids and frames of this mount cannot be taken for older ones. A lost
        superblock may have begun an epoch, with ids, that this one does not tell of."""
        old = self._superblock
        recovered = list(self._buffer.open(old.uuid, old.oplog_token, self._operation))
        token = old.oplog_token if recovered else secrets.token_bytes(16)
        self._next_id = old.id_floor + (_ID_WINDOW if lost else 0)
        self._write_superblock(
            old.next(
                epoch=old.epoch + (2 if lost else 1),
                epoch_start=self._ring.position.sequence,
                flags=SuperblockFlag(0),
                id_floor=self._next_id + _ID_WINDOW,
                oplog_token=token,
            )
        )
        self._ring.epoch = self._superblock.epoch
        self._committed_sequence = self._ring.flushed = self._ring.position.sequence - 1
        self._ring.checkpointed(old.replay.sequence)
        self._buffer.begin(token)
        for record in recovered:
            self._redo(record.sequence, ops.unpack(record.operation), record.data)
        self.counters.recovered_operations = len(recovered)
        self._executor.spawn(self._drop_orphans())

    def _make_root(self) -> None:
        try:
            run(self._state.node(ROOT_INODE))
        except OSError:
            options = self._options
            self._state.make_root(options.uid, options.gid, time.time_ns())

    def _redo(self, sequence: int, op: ops.Operation, data: memoryview) -> None:
        # It was prepared on this very state before it was logged, so it succeeds again.
        run(self._state.prepare(op, lambda: data))()
        self._operation = sequence
        self._count(_cost(op), len(data))

    def _write_superblock(self, superblock: Superblock) -> None:
        journal.write_superblock(self._device, superblock)
        self._superblock = superblock

    # -- looking

    @property
    def superblock(self) -> Superblock:
        return self._superblock

    @property
    def reader(self) -> ExtentReader:
        return self._reader

    def node(self, ino: int) -> Step[Node]:
        """Raises ENOENT."""
        return self._state.node(ino)

    def lookup(self, directory: int, name: bytes) -> Step[Node]:
        """Raises ENOENT, ENOTDIR, ENAMETOOLONG."""
        parent = yield from self._state.node(directory)
        if not parent.is_directory:
            raise error(errno.ENOTDIR)
        if name == b".":
            return parent
        if name == b"..":
            return (yield from self._state.node(parent.inode.parent))
        dentry = yield from self._state.lookup(directory, name)
        if dentry is None:
            raise error(errno.ENOENT)
        return (yield from self._state.node(dentry.ino))

    def list_directory(
        self, directory: int, after: int, limit: int
    ) -> Step[list[tuple[int, Dentry]]]:
        """Entries with a cookie above `after` (start with 0), by cookie."""
        return self._state.list_directory(directory, after, limit)

    def readlink(self, ino: int) -> Step[bytes]:
        return self._state.readlink(ino)

    def xattr(self, ino: int, name: bytes) -> Step[bytes | None]:
        return self._state.xattr(ino, name)

    def xattr_names(self, ino: int) -> Step[list[bytes]]:
        return self._state.xattr_names(ino)

    def read(self, ino: int, offset: int, length: int) -> Step[memoryview]:
        """Bytes of a file, short at its end only. Raises EIO for what fails its checksum.

        The result is valid until the loop runs other code: copy it if it has to last.
        """
        pinned: list[Chunk] = []
        try:
            while True:
                parts = yield from self._state.parts(ino, offset, length)
                missing = [
                    part.extent
                    for part in parts
                    if isinstance(part, Stored) and self._reader.find(part.extent.extent_id) is None
                ]
                if not missing:
                    return self._assemble(parts)
                chunks = self._reader.fetch(missing)
                self._reader.pin(chunks)
                pinned += chunks
                yield from wait_all(chunk.read for chunk in chunks)
                # What was dirty may have moved while we waited: look again.
        finally:
            self._reader.unpin(pinned)

    def parts(self, ino: int, offset: int, length: int) -> Step[list[Part]]:
        """What a part of a file is made of: bytes in memory, holes, slices of extents."""
        return self._state.parts(ino, offset, length)

    def extents(self, ino: int, offset: int, length: int) -> Step[list[Extent]]:
        """The extents in the ring that hold a part of a file, in order."""
        parts = yield from self._state.parts(ino, offset, length)
        return [part.extent for part in parts if isinstance(part, Stored)]

    @property
    def has_room(self) -> bool:
        """False when device work that can wait should not be added."""
        return self._executor.has_room

    def space(self) -> Space:
        superblock = self._superblock
        others = superblock.segment_count - RESERVED_SEGMENTS - 1
        total = others * self._usable_segment() + superblock.segment_size - BLOCK
        free = max(0, self._space_left(frees=False) + self._reclaimable_bytes())
        return Space(total, min(free, total), self._ring.liveness.live_bytes, self._state.inodes)

    @property
    def failure(self) -> str | None:
        """Why nothing more can be written, if so."""
        return None if self._failure is None else str(self._failure)

    @property
    def unsaved(self) -> int:
        """Bytes of file data that are answered and not in the ring yet."""
        return self._unsaved

    # -- operations

    def create(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        *,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Step[Node]:
        """A file, directory, symlink or special file, by the type in `mode`."""
        op = ops.Create(time.time_ns(), parent, name, self._new_id(), mode, uid, gid, rdev, target)
        inode = yield from self._perform(op)
        assert inode is not None
        return (yield from self._state.node(inode.ino))

    def link(self, ino: int, parent: int, name: bytes) -> Step[Node]:
        yield from self._perform(ops.Link(time.time_ns(), ino, parent, name))
        return (yield from self._state.node(ino))

    def unlink(self, parent: int, name: bytes) -> Step[int]:
        """Returns the inode that lost the name."""
        return (yield from self._remove(ops.Unlink(time.time_ns(), parent, name)))

    def rmdir(self, parent: int, name: bytes) -> Step[int]:
        return (yield from self._remove(ops.Rmdir(time.time_ns(), parent, name)))

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        *,
        replace: bool = True,
        exchange: bool = False,
    ) -> Step[None]:
        op = ops.Rename(time.time_ns(), parent, name, new_parent, new_name, replace, exchange)
        replaced = yield from self._perform(op, frees=True)
        if replaced is not None:
            yield from self._drop_if_free(replaced.ino)

    def set_attributes(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
    ) -> Step[Node]:
        op = ops.SetAttributes(time.time_ns(), ino, mode, uid, gid, size, atime_ns, mtime_ns)
        yield from self._perform(op, frees=size is not None)
        return (yield from self._state.node(ino))

    def write(self, ino: int, offset: int, data: bytes | memoryview) -> Step[int]:
        """All of `data`, as one operation for each MiB. Raises ENOSPC, EFBIG, EIO."""
        for start in range(0, len(data), WRITE_SIZE_MAX):
            part = data if len(data) <= WRITE_SIZE_MAX else data[start : start + WRITE_SIZE_MAX]
            op = ops.Write(time.time_ns(), ino, offset + start, len(part))
            yield from self._perform(op, part)
        return len(data)

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> Step[None]:
        """Raises EINVAL for a codec that is unknown."""
        if name == CODEC_XATTR and value not in [choice.value.encode() for choice in CodecChoice]:
            raise error(errno.EINVAL)
        yield from self._perform(ops.SetXattr(time.time_ns(), ino, name, value))

    def remove_xattr(self, ino: int, name: bytes) -> Step[None]:
        yield from self._perform(ops.RemoveXattr(time.time_ns(), ino, name), frees=True)

    def pin(self, ino: int) -> Step[None]:
        """Somebody holds the inode (an open file, the kernel's memory of it)."""
        (yield from self._state.node(ino)).pins += 1

    def unpin(self, ino: int) -> Step[None]:
        """One holder less; without holders and names the inode is gone."""
        node = yield from self._state.node(ino)
        node.pins -= 1
        yield from self._drop_if_free(ino)

    def _remove(self, op: ops.Operation) -> Step[int]:
        inode = yield from self._perform(op, frees=True)
        assert inode is not None
        yield from self._drop_if_free(inode.ino)
        return inode.ino

    def _drop_if_free(self, ino: int) -> Step[None]:
        node = yield from self._state.node(ino)
        if node.inode.nlink == 0 and node.pins == 0 and not self.read_only:
            yield from self._perform(ops.Drop(time.time_ns(), ino), frees=True)

    def _drop_orphans(self) -> Step[None]:
        for ino in (yield from self._state.orphans()):
            yield from self._perform(ops.Drop(time.time_ns(), ino), frees=True)

    def _perform(
        self, op: ops.Operation, data: bytes | memoryview = b"", *, frees: bool = False
    ) -> Step[Inode | None]:
        self._check_writable()
        cost = _cost(op)
        yield from self._admit(cost, len(data), frees=frees)
        kept = memoryview(b"")
        done = yield from self._state.prepare(op, lambda: kept)
        kept = self._buffer.append(self._operation + 1, ops.pack(op), data)
        self._operation += 1
        inode = done()
        self._count(cost, len(data))
        return inode

    def _count(self, cost: int, length: int) -> None:
        """An operation was done: promise it space, and seal when there is enough."""
        self.counters.operations += 1
        self._open_charge += cost
        self._open_bytes += length
        self._unsaved += length
        if self._open_since is None:
            self._open_since = time.monotonic()
        operations = self._operation - self._sealed_operation
        if (
            self._open_bytes >= BATCH_SIZE
            or operations >= BATCH_OPERATIONS
            or self._open_charge >= _BATCH_CHARGE_MAX
        ):
            self._seal()

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise error(errno.EIO, f"the device failed: {self._failure}")
        if self.read_only:
            raise error(errno.EROFS)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # -- space

    def _admit(self, cost: int, length: int, *, frees: bool) -> Step[None]:
        """Wait until the buffer has room; raise ENOSPC when the ring has not."""
        while self._unsaved + length > self._dirty_max() or not self._buffer.has_room(cost):
            if not self._uncommitted and self._operation == self._sealed_operation:
                raise error(errno.ENOSPC, "the operation log has no room (is the tmpfs full?)")
            yield from self._relieve()
        if self._space_left(frees=frees) < cost:
            yield from self._make_space(cost, frees=frees)

    def _relieve(self) -> Step[None]:
        """Wait until the oldest batch is in the ring."""
        if not self._uncommitted:
            self._seal()
        if self._uncommitted:
            yield from wait(self._uncommitted[0].committed)
        self._check_writable()

    def _dirty_max(self) -> int:
        """Dirty bytes are bounded by what the device takes in 5 s."""
        return max(_DIRTY_MIN, int(self._auto.device * _DIRTY_SECONDS))

    def _make_space(self, cost: int, *, frees: bool) -> Step[None]:
        # What is dead becomes free once both superblock slots have moved on.
        yield from self._written()
        for _ in range(2):
            if self._space_left(frees=frees) >= cost:
                return
            if self._reclaimable_bytes():
                yield from self.checkpoint()
        if self._space_left(frees=frees) < cost:
            raise error(errno.ENOSPC)

    def _space_left(self, *, frees: bool) -> int:
        """Bytes that operations may still be promised."""
        ring, usable = self._ring, self._usable_segment()
        segments = ring.free_segments + (ring.position.next_segment != NO_SEGMENT)
        promised = self._open_charge + sum(batch.charge for batch in self._uncommitted)
        reserve = 2 * self._index.size + (0 if frees else RESERVED_SEGMENTS * usable)
        return max(0, ring.room) + segments * usable - promised - reserve

    def _reclaimable_bytes(self) -> int:
        dead = self._ring.dead_segments - self._ring.free_segments
        return dead * self._usable_segment()

    def _usable_segment(self) -> int:
        """What a segment surely takes: the rest may be too short for the next extent."""
        return self._superblock.segment_size - self._extent_max - 4 * BLOCK

    # -- write-back

    def sync(self) -> Step[None]:
        """Everything that was answered is durable on return. Raises OSError EIO."""
        yield from self._written()
        target = self._committed_sequence
        while self._ring.flushed < target:
            if self._flushing is not None and not self._flushing.done:
                yield self._flushing
                continue
            yield from self._flush()
        self._check_writable()

    def tick(self) -> Step[None]:
        """Call about once a second: what is answered is written within 5 s, flushed
        within 30 s, and checkpointed as the options say."""
        if self.read_only or self._failure:
            return
        now = time.monotonic()
        if self._open_since is not None and now - self._open_since > _WRITE_SECONDS - 1:
            self._seal()
        flush_due = now - self._flush_time > _FLUSH_SECONDS - 5
        if flush_due and self._ring.flushed < self._committed_sequence:
            yield from self._flush()
        written = self.counters.device_written - self._bytes_at_checkpoint
        due = now - self._checkpoint_time > self._options.checkpoint_seconds
        if (due and written) or written > self._options.checkpoint_bytes:
            yield from self.checkpoint()

    def checkpoint(self) -> Step[None]:
        """The index on the device describes everything answered before."""
        self._check_writable()
        self._seal()
        self._checkpoint_operation = self._sealed_operation
        if self._checkpoint_wanted is None:
            self._checkpoint_wanted = Completion()
        wanted = self._checkpoint_wanted
        self._kick()
        yield from wait(wanted)

    def _written(self) -> Step[None]:
        """Everything answered so far is in the ring, if not flushed."""
        self._check_writable()
        self._seal()
        if self._uncommitted:
            yield from wait(self._uncommitted[-1].committed)
        self._check_writable()

    def _flush(self) -> Step[None]:
        covered = self._committed_sequence
        self._flushing = self._executor.submit(self._device.flush)
        try:
            yield from wait(self._flushing)
        except OSError as failure:
            self._fail(failure)
            raise
        self._ring.flushed = max(self._ring.flushed, covered)
        self._flush_time = time.monotonic()
        self.counters.flushes += 1

    def _seal(self) -> None:
        """End the open batch and have it written."""
        if self._operation == self._sealed_operation and not self._state.has_changes:
            return
        # One head block for the frame, and one that a segment's end may cost.
        charge = self._open_charge + 2 * BLOCK
        sealed = self._state.seal(self._new_id)
        batch = Batch(sealed, self._operation, charge, self._open_bytes)
        self._sealed_operation = self._operation
        self._open_bytes = self._open_charge = 0
        self._open_since = None
        self._sealed.append(batch)
        self._uncommitted.append(batch)
        for waiting in islice(self._sealed, _IN_FLIGHT_MAX):
            self._encode(waiting)
        self._kick()

    def _encode(self, batch: Batch) -> None:
        if batch.encoding is None:
            short = self._space_left(frees=False) < self._superblock.device_size // 4
            self._auto.space_is_short = short
        start_encoding(batch, self._auto, self._arenas, self._executor.submit)

    def _kick(self) -> None:
        if self._writer is None or self._writer.done:
            self._writer = self._executor.spawn(self._write_batches())

    def _write_batches(self) -> Step[None]:
        """The only one that appends to the ring. Batches overlap: one is encoded while
        others are written."""
        in_flight: deque[tuple[Batch, Placed, list[Completion[None]]]] = deque()
        try:
            while self._sealed or in_flight or self._checkpoint_wanted:
                if self._sealed and len(in_flight) < _IN_FLIGHT_MAX and not self._checkpoint_due:
                    in_flight.append((yield from self._place_next()))
                elif in_flight:
                    yield from self._commit(*in_flight.popleft())
                elif self._checkpoint_wanted is not None:
                    yield from self._checkpoint(self._checkpoint_wanted)
        except Exception as failure:
            # A fault of ours counts like one of the device: nothing more is appended.
            log.exception("write-back stopped")
            self._fail(failure)

    @property
    def _checkpoint_due(self) -> bool:
        """One is wanted, and all that it was asked to describe has its place."""
        wanted = self._checkpoint_wanted is not None
        return wanted and self._placed_operation >= self._checkpoint_operation

    def _place_next(self) -> Step[tuple[Batch, Placed, list[Completion[None]]]]:
        batch = self._sealed[0]
        self._encode(batch)
        assert batch.encoding is not None
        encoded: Encoded = yield from wait(batch.encoding)
        self._sealed.popleft()
        for waiting in islice(self._sealed, 1):
            self._encode(waiting)
        if encoded.encoded_bytes:
            self._auto.saw_encode(encoded.encoded_bytes, encoded.encoded_into, encoded.seconds)
        placed = place(batch, encoded, self._ring, self._state)
        self._placed_operation = batch.operation
        return batch, placed, self._write_frames(placed.frames)

    def _write_frames(self, frames: list[PlacedFrame]) -> list[Completion[None]]:
        writes = []
        for frame in frames:
            self.counters.frames += 1
            self.counters.device_written += frame.header.frame_length
            writes.append(self._executor.submit(partial(self._write_frame, frame)))
        return writes

    def _write_frame(self, frame: PlacedFrame) -> None:
        """Runs in a thread; the smoothed bandwidth is one number, so a race is harmless."""
        started = time.perf_counter()
        self._device.write(frame.header.address, frame.buffers)
        if frame.header.frame_length >= 1024 * 1024:
            self._auto.saw_write(frame.header.frame_length, time.perf_counter() - started)

    def _commit(self, batch: Batch, placed: Placed, writes: list[Completion[None]]) -> Step[None]:
        yield from wait_all(writes)
        journal.apply_unit(self._index, self._ring, placed.extents, placed.items)
        self._index.settle(batch.sealed.batch, placed.items)
        self._state.committed(batch.sealed)
        self._buffer.release(batch.operation)
        if batch.arena is not None:
            batch.arena.give_back()
        self.counters.payload_written += sum(extent.size for extent in placed.extents)
        self._committed_sequence = placed.frames[-1].header.sequence
        self._unsaved -= batch.data_bytes
        assert self._uncommitted.popleft() is batch
        self.on_blocks_changed(placed.changed_inodes)
        batch.committed.finish()

    def _checkpoint(self, wanted: Completion[None]) -> Step[None]:
        """Runs in the writer while nothing else is on its way to the ring."""
        started = self._placed_operation
        chunks = yield from wait(
            self._executor.submit(partial(journal.encode_chunks, self._index.snapshot()))
        )
        pointers = yield from self._append_chunks(chunks)
        (root,) = yield from self._append_chunks([journal.encode_root(pointers)])
        yield from wait(self._executor.submit(self._device.flush))
        self._committed_sequence = self._ring.flushed = self._ring.position.sequence - 1
        previous = self._superblock
        following = previous.next(
            checkpoint=root,
            replay=self._ring.position,
            operation=started,
            id_floor=self._next_id + (0 if self._closing else _ID_WINDOW),
            flags=SuperblockFlag.CLEAN if self._closing else SuperblockFlag(0),
        )
        yield from wait(
            self._executor.submit(partial(journal.write_superblock, self._device, following))
        )
        self._checkpointed(previous, following, [root, *pointers])
        self._checkpoint_wanted = None
        wanted.finish()

    def _append_chunks(self, chunks: list[journal.EncodedChunk]) -> Step[list[Pointer]]:
        payloads = [Payload(chunk.record, [chunk.stored]) for chunk in chunks]
        frames = place_unit(self._ring, payloads, [], self._placed_operation)
        pointers = [
            journal.pointer_to(frame.header, record) for frame, group in frames for record in group
        ]
        for pointer in pointers:
            self._ring.liveness.mark(pointer.address, pointer.stored)
        yield from wait_all(self._write_frames([frame for frame, _ in frames]))
        return pointers

    def _checkpointed(
        self, previous: Superblock, following: Superblock, places: list[Pointer]
    ) -> None:
        self._superblock = following
        for pointer in self._checkpoint_places:
            self._ring.release(pointer.address, pointer.stored)
        self._checkpoint_places = places
        self._ring.checkpointed(previous.replay.sequence)
        self._checkpoint_time = self._flush_time = time.monotonic()
        self._bytes_at_checkpoint = self.counters.device_written
        self.counters.checkpoints += 1

    def _fail(self, failure: BaseException) -> None:
        """The device cannot be written: say so to everyone, and lose nothing. The buffer
        keeps what the ring lacks; the next mount finds it there."""
        self._failure = self._failure or failure
        fault = error(errno.EIO, f"the device failed: {failure}")
        for batch in self._uncommitted:
            batch.committed.finish(error=fault)
        self._uncommitted.clear()
        self._sealed.clear()
        if self._checkpoint_wanted is not None:
            self._checkpoint_wanted.finish(error=fault)
            self._checkpoint_wanted = None

    # -- reading

    def _assemble(self, parts: list[Part]) -> memoryview:
        """The parts as one run of memory, without a copy where they already are one."""
        runs = _adjacent([self._located(part) for part in parts])
        if not runs:
            return memoryview(b"")
        if len(runs) == 1:
            return runs[0].view
        length = sum(len(run.view) for run in runs)
        if length > len(self._reply):
            self._reply = BufferPool(round_up(length), 0).take()
        at = 0
        for located in runs:
            end = at + len(located.view)
            self._reply[at:end] = located.view
            at = end
        return self._reply[:length]

    def _located(self, part: Part) -> _Located:
        if isinstance(part, Stored):
            found = self._reader.find(part.extent.extent_id)
            assert found is not None
            buffer, start = found
            start += part.skew
            return _Located(buffer, start, start + part.length)
        if isinstance(part, Hole):
            if part.length > len(self._zeros):
                self._zeros = BufferPool(round_up(part.length), 0).take()
            return _Located(self._zeros, 0, part.length)
        return _Located(part, 0, len(part))


@dataclass(frozen=True, slots=True)
class _Located:
    """Bytes [start, end) of a buffer."""

    buffer: memoryview
    start: int
    end: int

    @property
    def view(self) -> memoryview:
        return self.buffer[self.start : self.end]


def _adjacent(parts: list[_Located]) -> list[_Located]:
    """Parts that follow each other in one buffer are joined."""
    joined: list[_Located] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.buffer is part.buffer and last.end == part.start:
            joined[-1] = _Located(last.buffer, last.start, part.end)
        else:
            joined.append(part)
    return joined


def _cost(op: ops.Operation) -> int:
    """The bytes of the ring that an operation may take, at most: in its own frame, and
    its items in two checkpoints. What it frees apart."""
    match op:
        case ops.Write():
            return _OPERATION_COST + round_up(op.length) + 2 * BLOCK
        case ops.SetXattr():
            return _OPERATION_COST + 3 * len(op.value)
        case ops.Create():
            return _OPERATION_COST + 3 * len(op.target)
        case ops.Rename():
            return 4 * _OPERATION_COST
    return _OPERATION_COST

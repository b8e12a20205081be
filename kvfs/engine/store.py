"""The one face of the engine: a tree of files on a ring.

Every method that may wait is a step (see io.py). An operation is admitted (is there
space?), prepared, logged in the buffer, done, and thereby answered; the writer brings
it into the ring later, in order. `sync` makes everything that was answered durable.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from kvfs.engine import ops
from kvfs.engine.admission import Admission
from kvfs.engine.appender import Appender, Counters
from kvfs.engine.assembly import Assembler
from kvfs.engine.buffer import NOTHING, Buffer, Kept, Place, cut
from kvfs.engine.codec import CodecChoice
from kvfs.engine.device import Device, DeviceError
from kvfs.engine.failover import Failover
from kvfs.engine.files import Part, Stored, extent_limit
from kvfs.engine.format import (
    NO_SEGMENT,
    ROOT_INODE,
    Dentry,
    Extent,
    Inode,
    Superblock,
    SuperblockFlag,
)
from kvfs.engine.io import (
    DeadlineExceeded,
    Executor,
    Step,
    run,
    settled,
    together,
    wait_all,
)
from kvfs.engine.latency import Latencies
from kvfs.engine.loading import Loaded, load_newest
from kvfs.engine.nodecache import UnreadableNode
from kvfs.engine.nodes import Node, error, nearest_time
from kvfs.engine.policy import Policy
from kvfs.engine.reader import Chunk, ExtentReader
from kvfs.engine.reclaim import Reclaimer
from kvfs.engine.ring import Ring, Survey
from kvfs.engine.scrub import Scrub
from kvfs.engine.space import Purpose, Space, changes, cost
from kvfs.engine.state import CODEC_XATTR, Done
from kvfs.engine.superblocks import read_superblocks, write_superblock
from kvfs.engine.units import Units
from kvfs.engine.writer import ID_WINDOW, Writer

log = logging.getLogger(__name__)

WRITE_SIZE_MAX = 1024 * 1024
_WRITE_SECONDS = 5.0
_FLUSH_SECONDS = 30.0
_TICK_SECONDS = 1.0
_BOOKED_SECONDS = 10.0
_TO_BOOK_MAX = 20_000
_BOOKED_A_TICK = 2000  # after a crash there may be very many: requests do not wait for all
_DROPPED_AT_ONCE = 64  # inodes: an operation that frees more would hold up others


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Limits of a mounted store. Sizes in bytes, times in seconds.

    `cache_size` is for file data, `index_cache_size` for nodes of the index; `nodes_max`
    counts inodes and extents in use; `checkpoint_changes` items of the index. `reclaim`:
    units may be removed, those that live too long and, when the ring is full, those that
    `policy` names first, without one the oldest; while it is filling up those that were unused
    for `unused_seconds`. `shadow`: so much is answered while the device is away, 0 for an end of
    all writing when it fails; one that does not answer within `deadline_seconds` is away.
    """

    cache_size: int = 128 * 1024 * 1024
    index_cache_size: int = 32 * 1024 * 1024
    nodes_max: int = 40_000
    checkpoint_seconds: float = 300.0
    checkpoint_bytes: int = 1024 * 1024 * 1024
    checkpoint_changes: int = 100_000
    reclaim: bool = True
    policy: Policy | None = None
    unused_seconds: int = 7 * 24 * 3600
    shadow: int = 0
    deadline_seconds: float = 30.0
    uid: int = field(default_factory=os.geteuid)
    gid: int = field(default_factory=os.getegid)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of the ring, and inodes. `live` counts each shared extent once; `available` is
    what is free and what reclaim may remove now."""

    total: int
    free: int
    available: int
    live: int
    inodes: int


@dataclass(frozen=True, slots=True)
class Segments:
    """How the ring is filled. `size` of a segment in bytes; the log goes on at `head_offset` of
    segment `head`, then in `next`; a mount would replay it from segment `tail` on."""

    size: int
    head: int
    head_offset: int
    next: int | None
    tail: int
    survey: Survey


class Store:
    """Use `Store.open`. All methods belong to one thread, the loop's."""

    def __init__(
        self,
        device: Device,
        executor: Executor,
        buffer: Buffer,
        options: StoreOptions,
        loaded: Loaded,
    ) -> None:
        self._executor = executor
        self._buffer = buffer
        self._options = options
        self._state = loaded.state
        self._space = Space(loaded.ring, loaded.index, loaded.extent_max)
        self._appender = Appender(
            device, executor, loaded.ring, loaded.superblock, loaded.operation, options.shadow,
            options.deadline_seconds,
        )  # fmt: skip
        self._writer = Writer(self._appender, buffer, loaded.index, loaded.state, self._space)
        self._appender.counters.replayed_frames = loaded.frames
        self._reader = ExtentReader(
            device, executor, loaded.ring, buffer, options.cache_size, loaded.index.vault
        )
        self._failover = self._appender.failover
        self._reader.is_silent = loaded.index.nodes.is_silent = lambda: self._failover.is_silent
        self._assembler = Assembler(self._reader)
        self._units = Units(loaded.index, loaded.state, lambda: self._space.total, options.policy)
        self._reclaimer = Reclaimer(
            self._units, self._perform, self._appender.counters, options.reclaim,
            options.unused_seconds,
        )  # fmt: skip
        self._admission = Admission(
            self._writer, self._space, buffer, self._reclaimer, self.drop_free
        )
        self.scrub = Scrub(
            device, self._writer, self._reader, buffer, self._units, self.rewrite,
            lambda: not self.read_only,
        )  # fmt: skip
        self._freed = 0
        self._booked = time.monotonic()
        self._found_damage = loaded.damage
        self._is_fixed = device.read_only or loaded.damage is not None

    # -- opening and closing

    @classmethod
    def open(
        cls,
        device: Device,
        name: str,
        executor: Executor,
        buffer: Buffer,
        options: StoreOptions = StoreOptions(),
        key: bytes | None = None,
    ) -> Store:
        """Read the checkpoint, replay the ring and then the buffer. Waits in place. `key` is
        what the operator of an encrypted ring keeps.

        Raises DeviceError with what to do when the device cannot be trusted. When the
        log is damaged the store is read-only and `damage` says why.
        """
        superblocks = read_superblocks(device, name)
        loaded = load_newest(
            device, name, superblocks, options.index_cache_size, options.nodes_max, key
        )
        store = cls(device, executor, buffer, options, loaded)
        _check_no_log_elsewhere(superblocks.newest, buffer, name)
        store._make_root()
        if not store.read_only:
            if superblocks.one_is_lost:
                log.warning("%s: one of its two superblocks could not be read", name)
            store._begin(device, loaded.ring)
        loaded.index.nodes.executor = executor
        return store

    def close(self) -> Step[None]:
        """Everything into the ring, a checkpoint, and the mark of a clean end. Raises
        OSError when the device fails; the buffer then keeps what the ring lacks."""
        if self._is_fixed:
            self._buffer.close(keep=False)
            return
        try:
            self._appender.check()
            self._failover.check()
            for step in (self._drop_orphans, self._units.book):
                with suppress(UnreadableNode):
                    yield from step()
            yield from self._last_checkpoint()
            yield from self._writer.finished()
            self._appender.check()
        except BaseException:
            self._failover.close()
            self._buffer.close(keep=True)
            raise
        self._buffer.close(keep=False)

    def _last_checkpoint(self) -> Step[None]:
        """Where the index of before cannot be read the log has it all."""
        try:
            yield from self._writer.checkpoint(closing=True)
        except OSError:
            if self._writer.damage is None:
                raise
            yield from self._writer.sync()

    def _begin(self, device: Device, ring: Ring) -> None:
        """A new epoch: ids and frames of this mount cannot be taken for older ones."""
        old, writer = self.superblock, self._writer
        recovered = list(self._buffer.open(old.uuid, old.oplog_token, writer.operation))
        token = old.oplog_token if recovered else secrets.token_bytes(16)
        writer.next_id = old.id_floor
        begun = old.next(
            epoch=old.epoch + 1,
            epoch_start=ring.position.sequence,
            flags=SuperblockFlag(0),
            id_floor=writer.next_id + ID_WINDOW,
            oplog_token=token,
            oplog_home=self._buffer.home,
        )
        # What was replayed may lie in the device's cache alone; the superblock calls it durable.
        device.flush()
        # Both slots, one after the other: each alone knows the epoch and all ids of it.
        for superblock in (begun, begun.next()):
            write_superblock(device, superblock)
            self._appender.superblock = superblock
        ring.epoch = begun.epoch
        ring.flushed = ring.position.sequence - 1
        ring.checkpointed(old.replay.sequence)
        # What was used is noted with checkpoints only: after a crash, take it from the log.
        for inode in self._writer.index.recent_inodes():
            self._units.touch(inode.ino, inode.ctime_ns)
        self._buffer.begin(token)
        for record in recovered:
            self._redo(ops.unpack(record.operation), record.kept)
        self._appender.counters.recovered_operations = len(recovered)
        self._executor.spawn(self._drop_orphans())

    def _make_root(self) -> None:
        try:
            run(self._state.nodes.node(ROOT_INODE))
        except FileNotFoundError:
            # Until it is in the ring each mount makes it anew: always with the same times.
            created_ns = self.superblock.created_ns
            self._state.make_root(self._options.uid, self._options.gid, created_ns)

    def _redo(self, op: ops.Operation, kept: Kept) -> None:
        # It was prepared on this very state before it was logged, so it succeeds again.
        if isinstance(op, ops.Fork):
            self._writer.seal()
        inode = run(self._state.prepare(op, lambda: kept))()
        if inode is not None:
            self._units.touch(inode.ino, op.time_ns)
        self._writer.count(cost(op), len(kept.data))

    # -- looking

    @property
    def superblock(self) -> Superblock:
        return self._appender.superblock

    @property
    def damage(self) -> str | None:
        """Why nothing can be changed, if the ring is damaged."""
        return self._found_damage or self._writer.damage

    @property
    def read_only(self) -> bool:
        return self._is_fixed or self._writer.damage is not None

    @property
    def reader(self) -> ExtentReader:
        return self._reader

    def node(self, ino: int) -> Step[Node]:
        """Raises ENOENT."""
        return self._state.nodes.node(ino)

    def load(self, inos: Iterable[int]) -> Step[None]:
        """Bring inodes into memory, if they are still there: at once, where asking for one
        after the other would wait for the device each time."""
        return together(self._load(ino) for ino in inos)

    def _load(self, ino: int) -> Step[None]:
        with suppress(FileNotFoundError):
            yield from self._state.nodes.node(ino)

    def lookup(self, directory: int, name: bytes) -> Step[Node]:
        """Raises ENOENT, ENOTDIR, ENAMETOOLONG. `.` of a file is itself: so the kernel asks
        for what it knows by its number alone."""
        return settled(lambda: self._lookup(directory, name))

    def _lookup(self, directory: int, name: bytes) -> Step[Node]:
        parent = yield from self._state.nodes.node(directory)
        if name == b".":
            if not parent.inode.nlink and not self.is_pinned(directory):
                raise error(errno.ENOENT)  # it is still to be dropped
            return parent
        if not parent.is_directory:
            raise error(errno.ENOTDIR)
        if name == b"..":
            return (yield from self._state.nodes.node(parent.inode.parent))
        _, dentry = yield from self._state.names.existing(directory, name)
        return (yield from self._state.nodes.node(dentry.ino))

    def list_directory(
        self, directory: int, after: int, limit: int
    ) -> Step[list[tuple[int, Dentry]]]:
        """Entries with a cookie above `after` (start with 0), by cookie."""
        return self._state.names.entries(directory, after, limit)

    def list_children(
        self, directory: int, after: int, limit: int
    ) -> Step[list[tuple[int, bytes, Node]]]:
        """The same as cookie, name and node, all as of one moment; at most `limit`, and none only
        when there are no more."""
        nodes = self._state.nodes
        while True:
            entries = yield from self._state.names.entries(directory, after, limit)
            children = [
                (cookie, entry.name, node)
                for cookie, entry in entries
                if (node := nodes.in_use(entry.ino)) is not None
            ]
            if len(children) == len(entries):
                return children
            if limit == 1:
                # Raises ENOENT where a damaged ring has a name and no inode.
                ((cookie, entry),) = entries
                return [(cookie, entry.name, (yield from nodes.node(entry.ino)))]
            yield from self.load(entry.ino for _, entry in entries)
            # So many may not stay in memory together.
            limit = limit // 2 or 1

    def readlink(self, ino: int) -> Step[bytes]:
        return self._state.names.readlink(ino)

    def xattr(self, ino: int, name: bytes) -> Step[bytes | None]:
        return self._state.names.xattr(ino, name)

    def xattr_names(self, ino: int) -> Step[list[bytes]]:
        return self._state.names.xattr_names(ino)

    def read(self, ino: int, offset: int, length: int) -> Step[memoryview]:
        """Bytes of a file, short at its end only. Raises EIO for what fails its checksum.

        The result is valid until the loop runs other code: copy it if it has to last.
        """
        self._units.touch(ino, time.time_ns())
        pinned: list[Chunk] = []
        try:
            while True:
                parts = yield from self._state.files.parts(ino, offset, length)
                missing = [
                    part.extent
                    for part in parts
                    if isinstance(part, Stored) and self._reader.find(part.extent) is None
                ]
                if not missing:
                    data = self._assembler.join(parts)
                    self._reader.counters.payload_read += len(data)
                    for part in parts:
                        if isinstance(part, Stored):
                            self._reader.gave_out(part.extent, part.length)
                    return data
                if self._reader.reads.is_reached:
                    yield from self._reader.reads.room()
                    continue
                chunks = self._reader.fetch(missing)
                self._reader.pin(chunks)
                pinned += chunks
                yield from wait_all(chunk.read for chunk in chunks)
                # What was dirty may have moved while we waited: look again.
        finally:
            self._reader.unpin(pinned)

    def parts(self, ino: int, offset: int, length: int) -> Step[list[Part]]:
        """What a part of a file is made of: bytes in memory, holes, slices of extents."""
        return self._state.files.parts(ino, offset, length)

    def extents(self, ino: int, offset: int, length: int) -> Step[list[Extent]]:
        """The extents in the ring that hold a part of a file, in order."""
        parts = yield from self._state.files.parts(ino, offset, length)
        return [part.extent for part in parts if isinstance(part, Stored)]

    def extent_size(self, file_size: int) -> int:
        """How long the extents of a file become, in bytes, where it is written in order."""
        return extent_limit(file_size, self._space.extent_max)

    def extent_ids(self, ino: int) -> Step[list[int]]:
        """Of all extents that a file is made of. Raises ENOENT."""
        return self._state.files.extent_ids(ino)

    def is_dead(self, extent_id: int) -> Step[bool]:
        """Whether no file has this extent any longer."""
        known = yield from self._state.files.table.find(extent_id)
        return known.extent is None and known.new is None

    @property
    def has_room(self) -> bool:
        """False when device work that can wait should not be added."""
        return self._executor.has_room

    def usage(self) -> Usage:
        space = self._space
        left = space.left_after_cleaning(self._writer.promised)
        # Who removes files until enough is free must not have to wait for the ring to say so.
        free = max(0, left + self._state.files.table.given_up)
        live = space.ring.liveness.live_bytes
        available = free + (self._units.removable if self._options.reclaim else 0)
        return Usage(
            space.total, min(free, space.total), min(available, space.total), live,
            self._state.nodes.count,
        )  # fmt: skip

    def segments(self) -> Segments:
        ring = self._space.ring
        position = ring.position
        return Segments(
            size=ring.geometry.segment_size,
            head=position.segment,
            head_offset=position.offset,
            next=None if position.next_segment == NO_SEGMENT else position.next_segment,
            tail=self.superblock.replay.segment,
            survey=ring.survey(),
        )

    @property
    def free_segments(self) -> int:
        return self._space.ring.free_segments

    @property
    def write_latencies(self) -> Latencies:
        """Of frames; of each MiB of those that are longer."""
        return self._appender.latencies

    @property
    def counters(self) -> Counters:
        return self._appender.counters

    @property
    def index_errors(self) -> int:
        """Nodes of the index that could not be read, each once."""
        return self._writer.index.nodes.errors

    @property
    def failure(self) -> str | None:
        """Why the device cannot be written, if so."""
        failure = self._appender.failure or self._failover.failure
        return None if failure is None else str(failure)

    @property
    def failover(self) -> Failover:
        return self._failover

    @property
    def unsaved(self) -> int:
        """Bytes of file data that are answered and not in the ring yet."""
        return self._writer.unsaved

    def watch_blocks(self, changed: Callable[[list[int]], None]) -> None:
        """Have it called with the inodes whose block count changed."""
        self._writer.on_blocks_changed = changed

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
        ino = self._state.number_for(parent, mode, self._writer.new_id())
        op = ops.Create(time.time_ns(), parent, name, ino, mode, uid, gid, rdev, target)
        inode = yield from self._perform(op)
        assert inode is not None
        self._units.touch(inode.ino, op.time_ns)
        return (yield from self._state.nodes.node(inode.ino))

    def link(self, ino: int, parent: int, name: bytes) -> Step[Node]:
        yield from self._perform(ops.Link(time.time_ns(), ino, parent, name))
        return (yield from self._state.nodes.node(ino))

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
        replaced = yield from self._perform(op, purpose=Purpose.REMOVE)
        if replaced is not None:
            yield from self._drop([replaced.ino])

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
        op = ops.SetAttributes(
            time.time_ns(), ino, mode, uid, gid, size,
            nearest_time(atime_ns), nearest_time(mtime_ns),
        )  # fmt: skip
        yield from self._perform(op, purpose=Purpose.STORE if size is None else Purpose.REMOVE)
        return (yield from self._state.nodes.node(ino))

    def write(self, ino: int, offset: int, data: bytes | memoryview) -> Step[int]:
        """All of `data`, as one operation for each MiB. Raises ENOSPC, EFBIG, EIO."""
        for start in range(0, len(data), WRITE_SIZE_MAX):
            part = data if len(data) <= WRITE_SIZE_MAX else data[start : start + WRITE_SIZE_MAX]
            op = ops.Write(time.time_ns(), ino, offset + start, len(part))
            place = Place((yield from self._units.session_of(ino)), ino, op.offset)
            yield from self._perform(op, part, place)
            self._units.touch(ino, op.time_ns)
        return len(data)

    def write_back(self) -> Step[None]:
        """Everything that was answered is in the ring on return, if not durable."""
        if self._is_fixed:
            return
        if self._failover.is_on:
            # Before, what it holds cannot be given up.
            yield from self._writer.sync()
        else:
            yield from self._writer.written()

    def rewrite(self, ino: int, offset: int, length: int) -> Step[bool]:
        """Have what the ring holds of a part of a file, all of it in memory, written to the ring
        anew, packed: the content stays as it is. False when it is not in memory."""
        self._appender.check()
        if self.read_only:
            return False
        yield from self._writer.arrived()
        op = ops.Write(0, ino, offset, length)  # as such a write would need
        charge = cost(op)

        def prepared() -> Step[tuple[Node, list[tuple[int, Kept]]] | None]:
            yield from self._admission.admit(charge, changes(op), length, Purpose.STORE)
            node = yield from self._state.files.node(ino)
            parts = yield from self._state.files.parts(ino, offset, length)
            kept = self._in_memory(parts, offset)
            return None if kept is None else (node, kept)

        found = yield from settled(prepared, self._writer.index.nodes.gathering)
        if found is None:
            return False
        node, kept = found
        for start, part in kept:
            self._state.files.write(node, start, part)
        self._state.nodes.touch(node)
        self._writer.count_rewritten(charge, sum(len(part) for _, part in kept))
        return True

    def _in_memory(self, parts: list[Part], at: int) -> list[tuple[int, Kept]] | None:
        """The parts from the offset `at` on that are in the ring, with their offsets, if the
        buffer has all of them. What is not there yet is on its way; its memory may be that of
        the log, which is used again when it has arrived."""
        found = []
        for part in parts:
            length = len(part) if isinstance(part, Kept) else part.length
            if isinstance(part, Stored):
                held = self._buffer.find(part.extent, is_use=False)
                if held is None:
                    return None
                start = at
                for piece in cut(held, part.skew, length):
                    found.append((start, piece))
                    start += len(piece)
            at += length
        return found

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> Step[None]:
        """Raises EINVAL for a codec that is unknown."""
        if name == CODEC_XATTR and value not in [choice.value.encode() for choice in CodecChoice]:
            raise error(errno.EINVAL)
        yield from self._perform(ops.SetXattr(time.time_ns(), ino, name, value))
        self._units.touch(ino, time.time_ns())

    def remove_xattr(self, ino: int, name: bytes) -> Step[None]:
        yield from self._perform(ops.RemoveXattr(time.time_ns(), ino, name), purpose=Purpose.REMOVE)

    def fork(self, ino: int, name: bytes) -> Step[Node]:
        """A copy-on-write copy of a directory tree, beside it. Raises EEXIST, ENOTDIR;
        EFBIG for one that is too large."""
        # All of the tree is looked at in one moment, several times.
        with self._writer.index.nodes.gathering():
            return (yield from self._fork(ino, name))

    def _fork(self, ino: int, name: bytes) -> Step[Node]:
        while True:
            tree = yield from settled(lambda: self._state.read_tree(ino))
            serials = len(tree.originals)
            serial = self._writer.new_ids(serials)
            op = ops.Fork(time.time_ns(), ino, name, serial, serials, tree.items, tree.item_bytes)
            try:
                inode = yield from self._perform(op)
            except BlockingIOError:
                continue  # it grew meanwhile
            assert inode is not None
            self._units.touch(inode.ino, op.time_ns)
            return (yield from self._state.nodes.node(inode.ino))

    @property
    def units(self) -> Units:
        return self._units

    @property
    def reclaimer(self) -> Reclaimer:
        return self._reclaimer

    def opened(self, ino: int) -> None:
        """A file is open: it is not reclaimed. Each call wants one of `closed`."""
        self._units.touch(ino, time.time_ns())
        self._units.opened[ino] += 1

    def closed(self, ino: int) -> None:
        self._units.opened[ino] -= 1
        if not self._units.opened[ino]:
            del self._units.opened[ino]

    def pin(self, ino: int) -> None:
        """Somebody holds the inode (an open file, the kernel's memory of it)."""
        self._state.nodes.pins.add(ino)

    def is_pinned(self, ino: int) -> bool:
        return ino in self._state.nodes.pins

    def unpin(self, ino: int, count: int = 1) -> Step[None]:
        """So many holders less; without holders and names the inode will be gone: with others,
        or at the next tick."""
        is_held = self._state.nodes.pins.remove(ino, count)
        if not is_held and ino in self._state.nodes.nameless:
            self._freed += 1
            if self._freed >= _DROPPED_AT_ONCE:
                yield from self.drop_free()

    def drop_free(self) -> Step[None]:
        """The inodes that have neither names nor holders are gone on return, and their space
        is free as soon as that is in the ring."""
        self._freed = 0
        if self.read_only:
            return
        nodes = self._state.nodes
        free = [ino for ino in nodes.nameless if ino not in nodes.pins]
        while free:
            op = ops.Drop(0, free[:_DROPPED_AT_ONCE])
            # One after the other where the ring is full: each makes room.
            has_space = self._admission.has_space(cost(op), changes(op), Purpose.REMOVE)
            count = len(op.inos) if has_space else 1
            yield from self._drop(free[:count])
            del free[:count]

    def _remove(self, op: ops.Operation) -> Step[int]:
        inode = yield from self._perform(op, purpose=Purpose.REMOVE)
        assert inode is not None
        yield from self._drop([inode.ino])
        return inode.ino

    def _drop(self, inos: list[int]) -> Step[None]:
        """Free those of them that have neither names nor holders."""

        def are_free() -> list[int]:
            nodes = self._state.nodes
            return [ino for ino in inos if ino in nodes.nameless and ino not in nodes.pins]

        def are_still_free() -> Step[bool]:
            return op.inos == are_free()
            yield

        op = ops.Drop(time.time_ns(), are_free())
        if not op.inos:
            return
        try:
            yield from self._perform(op, purpose=Purpose.REMOVE, is_allowed=are_still_free)
        except (OSError, DeadlineExceeded) as failure:
            # The names are gone all the same; the inodes are dropped later.
            log.info("%d inodes are kept for now: %s", len(op.inos), failure)

    def _drop_orphans(self) -> Step[None]:
        for ino in (yield from self._state.orphans()):
            # Others drop what they find of them meanwhile.
            yield from self._load(ino)
        yield from self.drop_free()

    def _perform(
        self,
        op: ops.Operation,
        data: bytes | memoryview = b"",
        place: Place | None = None,
        *,
        purpose: Purpose = Purpose.STORE,
        is_allowed: Callable[[], Step[bool]] | None = None,
    ) -> Step[Inode | None]:
        """Raises EBUSY when it is no longer allowed once there is room for it."""
        writer = self._writer
        self._appender.check()
        if self.read_only:
            raise error(errno.EROFS)
        charge = cost(op)
        kept = NOTHING

        def prepared() -> Step[Done]:
            yield from self._admission.admit(charge, changes(op), len(data), purpose)
            if isinstance(op, ops.Fork):
                writer.seal()
            if is_allowed is not None and not (yield from is_allowed()):
                raise error(errno.EBUSY)
            return (yield from self._state.prepare(op, lambda: kept))

        done = yield from settled(prepared, self._writer.index.nodes.gathering)
        packed = ops.pack(op)
        kept = self._buffer.append(writer.operation + 1, packed, data, place)
        inode = done()
        writer.count(charge, len(data))
        self._failover.answered(writer.operation, len(packed) + len(data))
        return inode

    # -- durability

    def sync(self) -> Step[None]:
        """Everything that was answered is durable on return. Raises OSError EIO."""
        if not self._is_fixed:
            yield from self._writer.sync()

    def checkpoint(self) -> Step[None]:
        """The index on the device describes everything answered before."""
        yield from self._units.book()
        yield from self._writer.checkpoint()

    def clean(self) -> Step[None]:
        """Carry what is live out of the emptiest segments, at most about a segment of it."""
        return self._writer.clean()

    def look(self) -> None:
        """Call about once a second, whatever waits: has the device failed, is it back?"""
        if not self.read_only and self._appender.failure is None:
            self._failover.look()

    def tick(self) -> Step[None]:
        """Call about once a second: what is answered is written within 5 s, flushed
        within 30 s, and checkpointed as the options say."""
        writer, appender, options = self._writer, self._appender, self._options
        if self._is_fixed or self.failure is not None:
            return
        now = time.monotonic()
        waits_since = writer.waits_since
        if waits_since is not None and now - waits_since > _WRITE_SECONDS - _TICK_SECONDS:
            writer.seal()
        unflushed = self._space.ring.flushed < appender.committed_sequence
        if unflushed and now - appender.flush_time > _FLUSH_SECONDS - _WRITE_SECONDS:
            yield from appender.flush()
        if writer.damage is not None:
            return
        written = appender.bytes_since_checkpoint
        due = now - writer.checkpoints.time > options.checkpoint_seconds
        long = written > options.checkpoint_bytes
        many = writer.index.changes > options.checkpoint_changes
        if (
            (due and written)
            or long
            or many
            or writer.ids_are_short
            or writer.checkpoints.is_to_erase
        ):
            yield from writer.checkpoint()
        for step in (self.drop_free, self._book, self._expire):
            with suppress(UnreadableNode):  # what is damaged does not keep up the rest
                yield from step()
        if self._space.is_short and self._space.is_worth_cleaning:
            yield from writer.clean()
            yield from writer.checkpoint()

    def book_uses(self) -> Step[None]:
        """Have `units` tell of what was used a moment ago too, unless that is very much."""
        if not self.read_only and self.failure is None:
            with suppress(UnreadableNode):
                yield from self._units.book(_BOOKED_A_TICK)

    def _book(self) -> Step[None]:
        now = time.monotonic()
        if now - self._booked > _BOOKED_SECONDS or self._units.to_book > _TO_BOOK_MAX:
            self._booked = now
            yield from self._units.book(_BOOKED_A_TICK)

    def _expire(self) -> Step[None]:
        usage = self.usage()
        yield from self._reclaimer.expire(is_filling=usage.free < usage.total * 3 // 10)


def _check_no_log_elsewhere(superblock: Superblock, buffer: Buffer, name: str) -> None:
    """Without it, answered operations would be lost in silence. Raises DeviceError."""
    if superblock.flags & SuperblockFlag.CLEAN:
        return
    place = buffer.left_at(superblock.oplog_home)
    if place is not None:
        raise DeviceError(
            f"{name} was not unmounted, and what it had answered lies in {place}; mount it with "
            f"the --warm-dir of before, or remove that directory to give it up"
        )

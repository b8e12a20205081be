"""Reads extents from the device: neighbours in one I/O, verified, decoded, kept a while.

An extent's id is never reused and its bytes never change, so what is kept cannot
go stale. Chunks (one device read each) live in pooled buffers; those that were given out
whole are given up soon, then the least recently used. All state belongs to the loop's
thread; a chunk's work touches only the device and its own buffers.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cachetools import LRUCache

from kvfs.engine import codec
from kvfs.engine.buffer import Buffer, Kept
from kvfs.engine.buffers import BufferPool, is_aligned
from kvfs.engine.device import Device
from kvfs.engine.format import EXTENT_SIZE_MAX, Extent, FormatError, checksum, round_up
from kvfs.engine.io import Completion, Executor, Limit, Read, Urgency
from kvfs.engine.latency import Latencies
from kvfs.engine.nodecache import refuse_if
from kvfs.engine.ring import Ring
from kvfs.engine.vault import Vault

log = logging.getLogger(__name__)

_ROTTEN_MAX = 65_536
_BUFFER_SIZES = (64 * 1024, EXTENT_SIZE_MAX)
# Who reads all of a chunk has it, or the kernel has; its memory, which is in the processor's
# cache, is worth more to the next read than fresh memory.
_GIVEN_OUT_MAX = 8
_READS_MAX = 128  # each has a buffer, and keeps it where the device does not answer


@dataclass(slots=True, eq=False)
class Chunk:
    """Neighbouring extents, read at once. `starts` says where the decoded bytes of each lie that
    was good; `bad` are those whose bytes are not what was written, `unread` those that the device
    did not give."""

    extents: list[Extent]
    read: Completion[None]
    buffer: memoryview
    starts: dict[int, int] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    given_out: int = 0  # bytes
    users: int = 0
    evicted: bool = False
    given_back: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def is_given_out(self) -> bool:
        return self.given_out >= sum(extent.size for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Target:
    """An extent, and memory that is to have its decoded bytes at its start."""

    extent: Extent
    memory: memoryview

    @property
    def is_in_place(self) -> bool:
        """Whether its stored bytes are what is to lie there, and direct I/O can take it."""
        extent, memory = self.extent, self.memory
        is_raw = extent.is_raw and len(memory) == round_up(extent.stored)
        return is_raw and is_aligned(memory)


@dataclass(slots=True)
class ReadErrors:
    """Counters: reads that the device refused; extents that are not what was written, each once."""

    device: int = 0
    checksum: int = 0


@dataclass(slots=True)
class ReadCounters:
    """Since the store was opened, in bytes: what was read of files, wherever it lay, and what
    was read from the device for them."""

    payload_read: int = 0
    device_read: int = 0


class ExtentReader:
    """A bounded cache of decoded extents over the device, and under what `buffer` holds of
    them. `cache_size` in bytes; `reads` is how many reads are under way; `asked_for` counts the
    bytes that were read from the device for a reader."""

    def __init__(
        self,
        device: Device,
        executor: Executor,
        ring: Ring,
        buffer: Buffer,
        cache_size: int,
        vault: Vault,
    ) -> None:
        self._buffer = buffer
        self._vault = vault
        self._device = device
        self._ring = ring
        self._executor = executor
        self._chunks_max = max(4, cache_size // EXTENT_SIZE_MAX)
        # A fragmented file is read in many small chunks, which must not take a large
        # buffer each.
        self._pools = [BufferPool(size, self._chunks_max) for size in _BUFFER_SIZES]
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._by_extent: dict[int, Chunk] = {}
        self._given_out: dict[int, Chunk] = {}
        self.errors = ReadErrors()
        self.counters = ReadCounters()
        self._rotten: LRUCache[int, None] = LRUCache(_ROTTEN_MAX)
        self.latencies = Latencies()
        self.asked_for = 0
        self.reads = Limit(_READS_MAX)
        self.is_silent: Callable[[], bool] = lambda: False

    @property
    def capacity(self) -> int:
        """Bytes of decoded extents that are kept."""
        return self._chunks_max * EXTENT_SIZE_MAX

    def make_ready(self, size: int) -> None:
        """Touch memory for so many bytes of what will be read. In a thread."""
        self._pools[-1].stock(min(size // EXTENT_SIZE_MAX, self._chunks_max))

    def fetch(self, extents: Sequence[Extent]) -> list[Chunk]:
        """The chunks that hold, or will hold, these extents; reads what is missing. Raises EIO
        for what a device has that `is_silent`."""
        refuse_if(self.is_silent())
        chunks: list[Chunk] = []
        missing: list[Extent] = []
        for extent in extents:
            chunk = self._by_extent.get(extent.extent_id)
            if chunk is None:
                missing.append(extent)
                continue
            self._chunks.move_to_end(id(chunk))
            if not chunks or chunks[-1] is not chunk:
                chunks.append(chunk)
        return chunks + [self._start(group) for group in neighbours(missing)]

    def read_ahead(self, extents: Sequence[Extent], chunks_max: int) -> None:
        """Start to read what is missing of these, in at most `chunks_max` reads."""
        missing = [
            extent
            for extent in extents
            if extent.extent_id not in self._by_extent and self.warm(extent) is None
        ]
        for group in neighbours(missing)[:chunks_max]:
            self._start(group)

    def read_into(self, targets: list[Target], urgency: Urgency) -> Completion[list[Extent]]:
        """Have neighbours, as `neighbours` groups them, read at once and decoded where each is
        wanted, past what is kept here. The result are those that are good. Raises EIO for a
        device that `is_silent`."""
        refuse_if(self.is_silent())
        scratch, buffers = self._read_where(targets)
        address = targets[0].extent.address
        self._ring.pin(address)
        self.counters.device_read += targets[-1].extent.blocks_end - address
        in_place = all(target.memory is at for target, at in zip(targets, buffers, strict=True))
        use = _ReadInto(self._device, targets, buffers, self._vault)
        read = Read(self._device, address, buffers, use, in_place, use.salvage)
        reading = self._executor.submit(read, urgency)

        def finished() -> None:
            self._ring.unpin(address)
            if scratch is not None:
                self._give(scratch)
            if reading.error is not None:
                self.errors.device += 1
                return
            good = reading.result()
            for target in targets:
                if target.extent not in good:
                    self.saw_rot(target.extent)

        reading.when_done(finished)
        return reading

    def _read_where(self, targets: list[Target]) -> tuple[memoryview | None, list[memoryview]]:
        """Memory for the stored bytes of each: its own, or a part of the scratch buffer."""
        if all(target.is_in_place for target in targets):
            return None, [target.memory for target in targets]
        scratch = self._buffer_for([target.extent for target in targets])
        buffers, used = [], 0
        for target in targets:
            if target.is_in_place:
                buffers.append(target.memory)
                continue
            taken = round_up(target.extent.stored)
            buffers.append(scratch[used : used + taken])
            used += taken
        return scratch, buffers

    def find(self, extent: Extent) -> Sequence[Kept] | None:
        """An extent's decoded bytes, in pieces; None when they are not here (yet). Raises
        OSError EIO when they were read and are not good."""
        kept = self._buffer.find(extent, is_use=True)
        return self._read(extent) if kept is None else kept

    def warm(self, extent: Extent) -> Sequence[Kept] | None:
        """The same, without what is kept here, and not as a use of it."""
        return self._buffer.find(extent, is_use=False)

    def _read(self, extent: Extent) -> Sequence[Kept] | None:
        chunk = self._by_extent.get(extent.extent_id)
        if chunk is None or not chunk.read.done:
            return None
        if extent.extent_id in chunk.bad:
            raise OSError(errno.EIO, f"extent {extent.extent_id} fails its checksum")
        start = chunk.starts[extent.extent_id]
        return [Kept(chunk.buffer, start, start + extent.size, None)]

    def gave_out(self, extent: Extent, length: int) -> None:
        """Who asked for it got so many of its bytes."""
        chunk = self._by_extent.get(extent.extent_id)
        if chunk is None:
            return
        chunk.given_out += length
        if chunk.is_given_out:
            self._given_out[id(chunk)] = chunk
            if len(self._given_out) > _GIVEN_OUT_MAX:
                self._evict(next(iter(self._given_out.values())))

    def saw_rot(self, extent: Extent) -> bool:
        """An extent is not what was written. Counted and told once; whether it is new."""
        if extent.extent_id in self._rotten:
            return False
        self._rotten[extent.extent_id] = None
        self.errors.checksum += 1
        log.error(
            "extent %d at byte %d of the device fails its checksum",
            extent.extent_id, extent.address,
            extra={"extent": extent.extent_id, "address": extent.address},
        )  # fmt: skip
        return True

    def pin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.users += 1

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.users -= 1
            self._give_back(chunk)

    def _start(self, extents: list[Extent]) -> Chunk:
        self._make_room()
        raw = all(extent.is_raw for extent in extents)
        buffer = self._buffer_for(extents)
        scratch = None if raw else self._buffer_for(extents)
        chunk = Chunk(extents, Completion(), buffer)
        into = buffer if scratch is None else scratch
        first, end = extents[0].address, extents[-1].blocks_end
        self._ring.pin(first)
        use = _ReadChunk(self._device, chunk, into, self._vault)
        read = Read(self._device, first, [into[: end - first]], use, raw, use.salvage)
        chunk.read = self._executor.submit(read)
        self.reads.began(chunk.read)
        self.asked_for += end - first
        self.counters.device_read += end - first
        chunk.users += 1
        self._chunks[id(chunk)] = chunk
        for extent in extents:
            self._by_extent[extent.extent_id] = chunk
        chunk.read.when_done(lambda: self._finished(chunk, scratch))
        return chunk

    def _buffer_for(self, extents: list[Extent]) -> memoryview:
        stored = sum(round_up(extent.stored) for extent in extents)
        needed = max(stored, sum(extent.size for extent in extents))
        for pool in self._pools:
            if pool.size >= needed:
                return pool.take()
        raise FormatError("extents that fit in no buffer")

    def _give(self, buffer: memoryview) -> None:
        next(pool for pool in self._pools if pool.size == len(buffer)).give(buffer)

    def _finished(self, chunk: Chunk, scratch: memoryview | None) -> None:
        self._ring.unpin(chunk.extents[0].address)
        self.latencies.saw(time.monotonic() - chunk.started)
        if scratch is not None:
            self._give(scratch)
        for extent in chunk.extents:
            if extent.extent_id in chunk.bad:
                self.saw_rot(extent)
        if chunk.unread:
            self.errors.device += 1
        for extent in chunk.extents:
            # Who asks for it again asks the device.
            if extent.extent_id in chunk.unread and self._by_extent[extent.extent_id] is chunk:
                del self._by_extent[extent.extent_id]
        if chunk.read.error is not None:
            self.errors.device += 1
            self._evict(chunk)
        self.unpin([chunk])

    def _make_room(self) -> None:
        excess = len(self._chunks) - self._chunks_max + 1
        if excess > 0:
            idle = (chunk for chunk in self._chunks.values() if chunk.users == 0)
            for chunk in list(islice(idle, excess)):
                self._evict(chunk)

    def _evict(self, chunk: Chunk) -> None:
        if chunk.evicted:
            return
        chunk.evicted = True
        del self._chunks[id(chunk)]
        self._given_out.pop(id(chunk), None)
        for extent in chunk.extents:
            if self._by_extent.get(extent.extent_id) is chunk:
                del self._by_extent[extent.extent_id]
        self._give_back(chunk)

    def _give_back(self, chunk: Chunk) -> None:
        if chunk.evicted and chunk.users == 0 and not chunk.given_back:
            chunk.given_back = True
            self._give(chunk.buffer)


@dataclass(slots=True)
class _ReadChunk:
    """What is done with a chunk that was read. `into` has the stored bytes: the chunk's buffer
    itself when all of them are raw."""

    device: Device
    chunk: Chunk
    into: memoryview
    vault: Vault

    def salvage(self, failure: OSError) -> None:
        """One bad place must not take what lies beside it."""
        chunk = self.chunk
        for extent in chunk.extents:
            start = extent.address - chunk.extents[0].address
            if not _could_read(self.device, extent, self.into[start:]):
                chunk.unread.add(extent.extent_id)
        if len(chunk.unread) == len(chunk.extents):
            chunk.unread.clear()
            raise failure
        self()

    def __call__(self) -> None:
        chunk, vault = self.chunk, self.vault
        decoded_at = 0
        for extent, start, stored in _stored(chunk.extents, self.into):
            if extent.extent_id in chunk.unread:
                continue
            if stored is None:
                chunk.bad.add(extent.extent_id)
            elif self.into is chunk.buffer:
                chunk.starts[extent.extent_id] = start
            elif _decoded(
                extent, stored, chunk.buffer[decoded_at : decoded_at + extent.size], vault
            ):
                chunk.starts[extent.extent_id] = decoded_at
                decoded_at += extent.size
            else:
                chunk.bad.add(extent.extent_id)


@dataclass(frozen=True, slots=True)
class _ReadInto:
    """What is done with what was read for targets. `buffers` have the stored bytes: the memory of
    a target itself when they are what is to lie there."""

    device: Device
    targets: list[Target]
    buffers: list[memoryview]
    vault: Vault

    def salvage(self, failure: OSError) -> list[Extent]:
        """What can be read of it alone."""
        arrived = zip(self.targets, self.buffers, strict=True)
        read = [pair for pair in arrived if _could_read(self.device, pair[0].extent, pair[1])]
        if not read:
            raise failure
        return [target.extent for target, buffer in read if self._is_good(target, buffer)]

    def __call__(self) -> list[Extent]:
        arrived = zip(self.targets, self.buffers, strict=True)
        return [target.extent for target, buffer in arrived if self._is_good(target, buffer)]

    def _is_good(self, target: Target, buffer: memoryview) -> bool:
        extent = target.extent
        stored = buffer[: extent.stored]
        if checksum(stored) != extent.checksum:
            return False
        out = target.memory[: extent.size]
        return buffer is target.memory or _decoded(extent, stored, out, self.vault)


def _stored(
    extents: list[Extent], into: memoryview
) -> Iterator[tuple[Extent, int, memoryview | None]]:
    """Neighbours, read at once: where each lies in `into`, and its stored bytes if they are
    what was written."""
    first = extents[0].address
    for extent in extents:
        start = extent.address - first
        stored = into[start : start + extent.stored]
        yield extent, start, stored if checksum(stored) == extent.checksum else None


def _could_read(device: Device, extent: Extent, into: memoryview) -> bool:
    try:
        device.read(extent.address, [into[: round_up(extent.stored)]])
    except OSError:
        return False
    return True


def _decoded(extent: Extent, stored: memoryview, out: memoryview, vault: Vault) -> bool:
    try:
        if extent.cipher:
            stored = vault.open_extent(extent, stored, out)
        if stored is not out:
            codec.decode(extent.codec, extent.item_size, stored, out)
    except FormatError:
        return False
    return True


def neighbours(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Groups of extents that lie one behind the other and fit in one buffer, stored
    and decoded."""
    groups: list[list[Extent]] = []
    stored = decoded = 0
    end = -1
    for extent in extents:
        taken = round_up(extent.stored)
        fits = stored + taken <= EXTENT_SIZE_MAX and decoded + extent.size <= EXTENT_SIZE_MAX
        if extent.address == end and fits:
            groups[-1].append(extent)
        else:
            groups.append([extent])
            stored = decoded = 0
        stored += taken
        decoded += extent.size
        end = extent.blocks_end
    return groups

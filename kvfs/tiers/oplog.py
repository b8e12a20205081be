"""The operation log in tmpfs: what is answered survives the daemon.

Chunk files of one size lie in a directory of a tmpfs and are mapped. An operation
is a record: lengths, sequence, checksum, the operation, its data. When the process
is killed the files stay, and the next mount finds every record that was whole.
Chunks whose records are all in the ring are used again: their pages are touched.

The data of a write stands behind its operation, or lies in a warm file that the record
refers to (see warm.py).
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.engine.buffer import NOTHING, BufferedOperation, InRing, Kept, Place
from kvfs.engine.buffers import copy
from kvfs.engine.format import (
    BLOCK,
    OPLOG_ALIGN,
    OPLOG_ALIGNED_MIN,
    OPLOG_HOME_MAX,
    OPLOG_RECORD,
    OPLOG_RECORD_SIZE,
    OPLOG_REFERENCE,
    Extent,
    FormatError,
    OplogChunkHeader,
    OplogData,
    checksum,
    round_up,
)

CHUNK_SIZE = 8 * 1024 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FIRST_RECORD = round_up(OplogChunkHeader.SIZE, OPLOG_ALIGN)


def current_boot() -> str:
    return _BOOT_ID.read_text().strip()


@dataclass(slots=True)
class _Chunk:
    """A mapped chunk file. `last` is the sequence of its last record."""

    path: Path
    view: memoryview
    end: int = _FIRST_RECORD
    last: int = -1

    @property
    def room(self) -> int:
        return len(self.view) - self.end


@dataclass(frozen=True, slots=True)
class Reference:
    """Data in a warm file, and its checksum."""

    serial: int
    offset: int
    length: int
    digest: int


Resolve = Callable[[Reference, int], "Kept | None"]


@dataclass(slots=True)
class OperationLog:
    """Implements kvfs.engine.buffer.Buffer in `directory`, with at most `limit` bytes.
    `idle_max` chunks are kept to be used again.
    `boot` names the machine's boot, which a tmpfs does not outlive. `resolve` finds what a
    record, with that sequence, refers to; what it does not find ends the log."""

    directory: Path
    limit: int
    boot: str = field(default_factory=current_boot)
    resolve: Resolve = field(default=lambda reference, sequence: None)
    idle_max: int = 4
    _uuid: bytes = b""
    _token: bytes = b""
    _used: deque[_Chunk] = field(default_factory=deque)
    _idle: list[_Chunk] = field(default_factory=list)

    @property
    def home(self) -> bytes:
        """The boot and the directory."""
        home = self.boot.encode() + b" " + os.fsencode(self.directory)
        if len(home) > OPLOG_HOME_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), self.directory)
        return home

    def left_at(self, home: bytes) -> str | None:
        directory = log_at(home, self.boot)
        return None if directory in (None, self.directory) else str(directory)

    def open(self, uuid: bytes, token: bytes, sequence: int) -> Iterator[BufferedOperation]:
        self._make_directory()
        self._uuid, self._token = uuid, token
        expected = sequence + 1
        for first, chunk in self._left_behind():
            if first > expected or expected < 0:
                self._discard(chunk)
                continue
            for record in _records(chunk, first, sequence, self.resolve):
                chunk.last = record.sequence
                if record.sequence == expected:
                    expected += 1
                    yield record
            if chunk.last > sequence:
                # What comes next is put there: what lies behind must not follow it.
                chunk.view[chunk.end :] = bytes(chunk.room)
                self._used.append(chunk)
            else:
                self._discard(chunk)

    def begin(self, token: bytes) -> None:
        self._token = token
        # No request is to wait for the memory of the first one.
        if not self._used and not self._idle and self.has_room(0):
            with suppress(OSError):
                self._idle.append(self._create())

    def append(
        self,
        sequence: int,
        operation: bytes,
        data: bytes | bytearray | memoryview = b"",
        place: Place | None = None,
    ) -> Kept:
        length = len(data)
        chunk = self._chunk_with_room(sequence, len(operation) + BLOCK + length)
        view, start = chunk.view, chunk.end
        body = start + OPLOG_RECORD_SIZE
        operation_end = body + len(operation)
        data_start = round_up(operation_end) if length >= OPLOG_ALIGNED_MIN else operation_end
        end = data_start + length
        kept = view[data_start:end]
        copy(memoryview(data), kept)
        padding = data_start - operation_end
        lengths = OPLOG_RECORD.pack(len(operation), padding, length, OplogData.HERE, sequence)
        # Of what was handed in: that is in the processor's cache, the copy may not be.
        digest = checksum(data)
        check = _record_checksum(lengths, operation, digest)
        view[start:operation_end] = lengths + check + operation
        chunk.end = round_up(end, OPLOG_ALIGN)
        chunk.last = sequence
        return Kept(view, data_start, end, digest)

    def append_reference(self, sequence: int, operation: bytes, data: Reference) -> None:
        """Keep an operation whose data is in a warm file."""
        body = operation + OPLOG_REFERENCE.pack(data.serial, data.offset, data.digest)
        chunk = self._chunk_with_room(sequence, len(body))
        lengths = OPLOG_RECORD.pack(len(operation), 0, data.length, OplogData.WARM, sequence)
        record = lengths + _record_checksum(lengths, body, data.digest) + body
        end = chunk.end + len(record)
        chunk.view[chunk.end : end] = record
        chunk.end = round_up(end, OPLOG_ALIGN)
        chunk.last = sequence

    @property
    def taken(self) -> int:
        """Bytes of the tmpfs that it takes."""
        return CHUNK_SIZE * (len(self._used) + len(self._idle))

    @property
    def takes_next(self) -> int:
        """What it takes more when its chunk is full, in bytes."""
        return 0 if self._idle else CHUNK_SIZE

    def release(self, sequence: int) -> None:
        while self._used and self._used[0].last <= sequence:
            chunk = self._used.popleft()
            if len(self._idle) < self.idle_max:
                self._idle.append(chunk)
            else:
                self._discard(chunk)

    def in_ring(self, extents: Iterable[InRing]) -> None:
        """What is in the ring does not stay here."""

    def find(self, extent: Extent, *, is_use: bool) -> Sequence[Kept] | None:
        return None

    def forget(self, extents: Iterable[Extent]) -> None:
        pass

    def close(self, *, keep: bool) -> None:
        if keep:
            return
        for chunk in [*self._used, *self._idle]:
            self._discard(chunk)
        self._used.clear()
        self._idle.clear()
        with suppress(OSError):  # who only reads leaves what an earlier process left
            self.directory.rmdir()

    def has_room(self, size: int) -> bool:
        if self._idle or (self._used and self._used[-1].room >= size + 2 * BLOCK):
            return True
        # Whoever tidies up a tmpfs may have removed it under us.
        self._make_directory()
        allowed = self.limit - CHUNK_SIZE * len(self._used)
        status = os.statvfs(self.directory)
        return min(allowed, status.f_bavail * status.f_frsize) >= CHUNK_SIZE

    # -- chunks

    def _make_directory(self) -> None:
        for directory in (self.directory.parent, self.directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _chunk_with_room(self, sequence: int, size: int) -> _Chunk:
        needed = OPLOG_RECORD_SIZE + size
        if self._used and self._used[-1].room >= needed:
            return self._used[-1]
        return self._next_chunk(sequence, needed)

    def _next_chunk(self, sequence: int, size: int) -> _Chunk:
        if size > CHUNK_SIZE - _FIRST_RECORD:
            raise OSError(errno.EFBIG, "an operation is larger than a chunk of the log")
        chunk = self._idle.pop() if self._idle else self._create()
        chunk.view[:_FIRST_RECORD] = (
            OplogChunkHeader(self._uuid, self._token, sequence).pack().ljust(_FIRST_RECORD, b"\0")
        )
        chunk.end = _FIRST_RECORD
        chunk.last = sequence - 1
        self._used.append(chunk)
        return chunk

    def _create(self) -> _Chunk:
        # Not by process id: the one before, whose chunks are still here, may have had it.
        path = self.directory / f"chunk.{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Space is taken before it is mapped: a full tmpfs is an errno, never SIGBUS.
            os.posix_fallocate(fd, 0, CHUNK_SIZE)
            return _Chunk(path, memoryview(mmap.mmap(fd, CHUNK_SIZE, mmap.MAP_SHARED)))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)

    def _left_behind(self) -> list[tuple[int, _Chunk]]:
        found = []
        for path in self.directory.iterdir():
            chunk = _map_existing(path)
            try:
                if chunk is None:
                    raise FormatError("no chunk")
                header = OplogChunkHeader.unpack(chunk.view)
                if (header.uuid, header.token) != (self._uuid, self._token):
                    raise FormatError("of another mount")
                found.append((header.first, chunk))
            except FormatError:
                path.unlink()
        return sorted(found, key=lambda pair: pair[0])

    def _discard(self, chunk: _Chunk) -> None:
        # Views of it may still be in use: the memory goes with the last of them.
        chunk.path.unlink(missing_ok=True)


def log_at(home: bytes, boot: str) -> Path | None:
    """The directory of a log, if it was made in this boot and something is left in it."""
    made_in, _, name = home.partition(b" ")
    directory = Path(os.fsdecode(name))
    if made_in != boot.encode() or not directory.is_dir():
        return None
    return directory if any(directory.iterdir()) else None


def _map_existing(path: Path) -> _Chunk | None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != CHUNK_SIZE:
            return None
        return _Chunk(path, memoryview(mmap.mmap(fd, CHUNK_SIZE, mmap.MAP_SHARED)))
    finally:
        os.close(fd)


def _records(
    chunk: _Chunk, first: int, after: int, resolve: Resolve
) -> Iterator[BufferedOperation]:
    """The whole records of a chunk, without the data of those up to `after`; its `end` is
    left behind the last of them."""
    expected = first
    while (found := _record_at(chunk, after, resolve)) is not None:
        record, end = found
        if record.sequence != expected:
            return
        yield record
        chunk.end = round_up(end, OPLOG_ALIGN)
        expected += 1


def _record_at(chunk: _Chunk, after: int, resolve: Resolve) -> tuple[BufferedOperation, int] | None:
    """The record at a chunk's end, if it is whole, and where it ends."""
    view, start = chunk.view, chunk.end
    if chunk.room < OPLOG_RECORD_SIZE:
        return None
    lengths = bytes(view[start : start + OPLOG_RECORD.size])
    operation_length, padding, length, lies, sequence = OPLOG_RECORD.unpack(lengths)
    body_start = start + OPLOG_RECORD_SIZE
    body_end = operation_end = body_start + operation_length
    if lies == OplogData.WARM:
        body_end = end = operation_end + OPLOG_REFERENCE.size
    else:
        data_start = operation_end + padding
        end = data_start + length
    if end > len(view):
        return None
    if lies == OplogData.WARM:
        serial, offset, digest = OPLOG_REFERENCE.unpack(view[operation_end:end])
        data = Reference(serial, offset, length, digest)
        found = resolve(data, sequence) if sequence > after else NOTHING
        if found is None:
            return None
        kept = found
    else:
        digest = checksum(view[data_start:end])
        kept = Kept(view, data_start, end, digest)
    check = _record_checksum(lengths, bytes(view[body_start:body_end]), digest)
    if check != view[start + OPLOG_RECORD.size : body_start]:
        return None
    return BufferedOperation(sequence, bytes(view[body_start:operation_end]), kept), end


def _record_checksum(lengths: bytes, operation: bytes, digest: int) -> bytes:
    return checksum(lengths + operation + digest.to_bytes(8, "little")).to_bytes(8, "little")

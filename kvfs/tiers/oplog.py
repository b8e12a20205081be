"""The operation log in tmpfs: what is answered survives the daemon.

Chunk files of one size lie in a directory of a tmpfs and are mapped. An operation
is a record: lengths, sequence, checksum, the operation, its data. When the process
is killed the files stay, and the next mount finds every record that was whole.
Chunks whose records are all in the ring are used again: their pages are touched.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.engine.buffer import BufferedOperation, Kept
from kvfs.engine.buffers import copy
from kvfs.engine.format import (
    BLOCK,
    OPLOG_ALIGN,
    OPLOG_ALIGNED_MIN,
    OPLOG_HOME_MAX,
    OPLOG_RECORD,
    OPLOG_RECORD_SIZE,
    FormatError,
    OplogChunkHeader,
    checksum,
    round_up,
)

CHUNK_SIZE = 8 * 1024 * 1024
_KEPT_CHUNKS = 16
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


@dataclass(slots=True)
class OperationLog:
    """Implements kvfs.engine.buffer.Buffer in `directory`, with at most `limit` bytes.
    `boot` names the machine's boot, which a tmpfs does not outlive."""

    directory: Path
    limit: int
    boot: str = field(default_factory=current_boot)
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
            for record in _records(chunk, first):
                chunk.last = record.sequence
                if record.sequence == expected:
                    expected += 1
                    yield record
            if chunk.last > sequence:
                self._used.append(chunk)
            else:
                self._discard(chunk)

    def begin(self, token: bytes) -> None:
        self._token = token

    def append(
        self, sequence: int, operation: bytes, data: bytes | bytearray | memoryview = b""
    ) -> Kept:
        length = len(data)
        worst = OPLOG_RECORD_SIZE + len(operation) + BLOCK + length
        chunk = self._used[-1] if self._used else None
        if chunk is None or chunk.room < worst:
            chunk = self._next_chunk(sequence, worst)
        view, start = chunk.view, chunk.end
        body = start + OPLOG_RECORD_SIZE
        operation_end = body + len(operation)
        data_start = round_up(operation_end) if length >= OPLOG_ALIGNED_MIN else operation_end
        end = data_start + length
        kept = view[data_start:end]
        copy(memoryview(data), kept)
        lengths = OPLOG_RECORD.pack(len(operation), data_start - operation_end, length, sequence)
        # Of what was handed in: that is in the processor's cache, the copy may not be.
        digest = checksum(data)
        check = _record_checksum(lengths, operation, digest)
        view[start:operation_end] = lengths + check + operation
        chunk.end = round_up(end, OPLOG_ALIGN)
        chunk.last = sequence
        return Kept(kept, digest)

    def release(self, sequence: int) -> None:
        while self._used and self._used[0].last <= sequence:
            chunk = self._used.popleft()
            if len(self._idle) < _KEPT_CHUNKS:
                self._idle.append(chunk)
            else:
                self._discard(chunk)

    def close(self, *, keep: bool) -> None:
        if keep:
            return
        for chunk in [*self._used, *self._idle]:
            self._discard(chunk)
        self._used.clear()
        self._idle.clear()
        with suppress(FileNotFoundError):
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


def _records(chunk: _Chunk, first: int) -> Iterator[BufferedOperation]:
    """The whole records of a chunk; its `end` is left behind the last of them."""
    view, expected = chunk.view, first
    while chunk.room >= OPLOG_RECORD_SIZE:
        start = chunk.end
        lengths = bytes(view[start : start + OPLOG_RECORD.size])
        operation_length, padding, data_length, sequence = OPLOG_RECORD.unpack(lengths)
        body = start + OPLOG_RECORD_SIZE
        data_start = body + operation_length + padding
        end = data_start + data_length
        if sequence != expected or end > len(view):
            return
        operation = bytes(view[body : body + operation_length])
        kept = Kept(view[data_start:end], checksum(view[data_start:end]))
        assert kept.digest is not None
        check = _record_checksum(lengths, operation, kept.digest)
        if check != view[start + OPLOG_RECORD.size : body]:
            return
        yield BufferedOperation(sequence, operation, kept)
        chunk.end = round_up(end, OPLOG_ALIGN)
        expected += 1


def _record_checksum(lengths: bytes, operation: bytes, digest: int) -> bytes:
    return checksum(lengths + operation + digest.to_bytes(8, "little")).to_bytes(8, "little")

"""A session as a stream of frames, for a pipe.

    | magic | begin | entry | data | data | entry | ... | end |

The magic is `KVFSMOVE`. Each frame is a header (28 bytes, little-endian) and its payload:

| field | bytes | |
|---|---|---|
| kind | 1 | 1 begin, 2 entry, 3 data, 4 end |
| codec, element size | 1 + 1 | of data: as of an extent in the ring |
| padding | 1 | 0 |
| stored, size | 4 + 4 | of the payload as it is here, and decoded; 4 MiB at most |
| offset | 8 | of data: in the file of the entry before |
| checksum | 8 | xxh3-64 of header and the payload, seeded with that of the frame before |

So what is cut, flipped, left out or put elsewhere is noticed at the frame where it happens. Begin,
entry and end are msgpack maps. After the end nothing follows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import msgpack
import xxhash

from kvfs.engine import codec
from kvfs.engine.codec import Codec, Layout
from kvfs.engine.format import FormatError
from mount_tools.moving.bytes import CHUNK, buffers, read_upto, write_all
from mount_tools.moving.content import BLOCK, Content
from mount_tools.moving.entries import Entry, Kind, RefusedError

MAGIC = b"KVFSMOVE"
VERSION = 1
_DIGEST = 16
_NOT_WHOLE = "the stream ends before its end: was the sender stopped, or the connection cut?"


class FrameKind(IntEnum):
    BEGIN = 1
    ENTRY = 2
    DATA = 3
    END = 4


@dataclass(frozen=True, slots=True)
class Begin:
    """`size`: bytes of data that will come. `base`: name and content of the session that this one
    is told as a difference of."""

    size: int
    base: tuple[bytes, Content] | None = None


@dataclass(frozen=True, slots=True)
class Entered:
    """An entry. A file that `keeps` has the bytes of the base's file of that path, but for
    what comes."""

    entry: Entry
    keeps: bool


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of the file that was entered last, whole blocks up to its end. `data` is valid until
    the frame after the next one is asked for."""

    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class End:
    """How many entries and bytes of data there were, and what the session's content is."""

    entries: int
    size: int
    content: Content


@dataclass(frozen=True, slots=True)
class Header:
    """Of a frame, before its checksum."""

    kind: int
    codec: int
    item_size: int
    stored: int
    size: int
    offset: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<BBBxIIQ")
    CHECKSUM: ClassVar[struct.Struct] = struct.Struct("<Q")

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            self.kind, self.codec, self.item_size, self.stored, self.size, self.offset
        )

    def check(self) -> None:
        """Raises RefusedError where lengths are impossible."""
        if self.stored > CHUNK or self.size > CHUNK or not self.stored:
            raise RefusedError("the stream is damaged: a frame of impossible length")


HEADER_SIZE = Header.STRUCT.size + Header.CHECKSUM.size
Frame = Begin | Entered | Data | End


# -- out


class StreamWriter:
    """Writes frames to a descriptor. Raises BrokenPipeError when nobody reads any more."""

    def __init__(self, fd: int, *, compress: bool = False) -> None:
        self._fd = fd
        self._compress = compress
        self._chain = 0
        self._entries = 0
        self._size = 0
        self.written = 0
        """Bytes that went out."""

    def begin(self, begin: Begin) -> None:
        self._write([MAGIC])
        base = begin.base and {"name": begin.base[0], "content": _packed(begin.base[1])}
        self._tell(FrameKind.BEGIN, {"version": VERSION, "size": begin.size, "base": base})

    def enter(self, entry: Entry, *, keeps: bool) -> None:
        self._entries += 1
        told = {
            "path": entry.path,
            "kind": entry.kind.value,
            "mode": entry.mode,
            "mtime_ns": entry.mtime_ns,
            "size": entry.size,
            "target": entry.target,
            "xattrs": entry.xattrs,
            "names": entry.names,
            "keeps": keeps,
        }
        self._tell(FrameKind.ENTRY, told)

    def data(self, offset: int, data: memoryview, layout: Layout) -> None:
        self._size += len(data)
        stored, chosen = None, Codec.NONE
        if self._compress:
            chosen = Codec.PLANES if layout.item_size > 1 else Codec.ZSTD
            stored = codec.encode(chosen, layout, data)
        if stored is None:
            chosen = Codec.NONE
        payload = data if stored is None else memoryview(stored)
        header = Header(FrameKind.DATA, chosen, layout.item_size, len(payload), len(data), offset)
        self._frame(header, payload)

    def end(self, content: Content) -> None:
        told = {"entries": self._entries, "size": self._size, "content": _packed(content)}
        self._tell(FrameKind.END, told)

    def _tell(self, kind: FrameKind, document: dict[str, Any]) -> None:
        payload = memoryview(msgpack.packb(document))
        if len(payload) > CHUNK:
            raise RefusedError("a file's name and attributes are too long to be sent")
        self._frame(Header(kind, Codec.NONE, 1, len(payload), len(payload), 0), payload)

    def _frame(self, header: Header, payload: memoryview) -> None:
        packed = header.pack()
        self._chain = _checksum(self._chain, packed, payload)
        self._write([packed, Header.CHECKSUM.pack(self._chain), payload])

    def _write(self, parts: list[bytes | memoryview]) -> None:
        write_all(self._fd, parts)
        self.written += sum(map(len, parts))


# -- in


def read_stream(fd: int) -> Iterator[Frame]:
    """The frames of a stream, the first of them Begin, the last End. Raises RefusedError for all
    that is not what a StreamWriter wrote; what came before counts for nothing then."""
    magic = bytearray(len(MAGIC))
    if read_upto(fd, memoryview(magic)) < len(MAGIC) or magic != MAGIC:
        raise RefusedError("this is no session: feed it what kvfs send writes")
    chain, entries, size = 0, 0, 0
    memory, decoded = buffers(), buffers()
    has_begun = False
    while True:
        header, chain, payload = _read_frame(fd, chain, next(memory))
        if has_begun == (header.kind == FrameKind.BEGIN):
            raise RefusedError("the stream is damaged: frames in a wrong order")
        match header.kind:
            case FrameKind.BEGIN:
                has_begun = True
                yield _begin(_document(payload))
            case FrameKind.ENTRY:
                entries += 1
                yield _entered(_document(payload))
            case FrameKind.DATA:
                data = _decoded(header, payload, decoded)
                size += len(data)
                yield Data(header.offset, data)
            case FrameKind.END:
                end = _end(_document(payload))
                if (end.entries, end.size) != (entries, size) or _has_more(fd):
                    raise RefusedError("the stream is damaged: its end tells of other frames")
                yield end
                return
            case _:
                raise RefusedError("the stream is damaged: a frame of an unknown kind")


def _read_frame(fd: int, chain: int, buffer: memoryview) -> tuple[Header, int, memoryview]:
    head = bytearray(HEADER_SIZE)
    if read_upto(fd, memoryview(head)) < HEADER_SIZE:
        raise RefusedError(_NOT_WHOLE)
    header = Header(*Header.STRUCT.unpack_from(head))
    header.check()
    payload = buffer[: header.stored]
    if read_upto(fd, payload) < header.stored:
        raise RefusedError(_NOT_WHOLE)
    chain = _checksum(chain, bytes(head[: Header.STRUCT.size]), payload)
    if (chain,) != Header.CHECKSUM.unpack_from(head, Header.STRUCT.size):
        raise RefusedError("the stream is damaged: a checksum is wrong")
    return header, chain, payload


def _decoded(header: Header, payload: memoryview, memory: Iterator[memoryview]) -> memoryview:
    if header.offset % BLOCK or not header.size:
        raise RefusedError("the stream is damaged: data that begins in a block")
    if header.codec == Codec.NONE:
        if header.size != header.stored:
            raise RefusedError("the stream is damaged: sizes differ")
        return payload
    data = next(memory)[: header.size]
    try:
        codec.decode(header.codec, header.item_size, payload, data)
    except FormatError as failure:
        raise RefusedError(f"the stream is damaged: {failure}") from None
    return data


def _has_more(fd: int) -> bool:
    return read_upto(fd, memoryview(bytearray(1))) > 0


def _checksum(chain: int, header: bytes, payload: memoryview) -> int:
    hashed = xxhash.xxh3_64(header, seed=chain)
    hashed.update(payload)
    return hashed.intdigest()


# -- documents


def _document(payload: memoryview) -> dict[str, Any]:
    try:
        document = msgpack.unpackb(payload)
    except (ValueError, TypeError, msgpack.UnpackException):
        document = None
    if not isinstance(document, dict):
        raise RefusedError("the stream is damaged: a frame that says nothing")
    return document


def _begin(told: dict[str, Any]) -> Begin:
    if told.get("version") != VERSION:
        raise RefusedError(
            f"the stream is of another version of KVFS ({told.get('version')!r:.20}): "
            "have the same on both ends"
        )
    base, size = told.get("base"), _number(told, "size")
    if base is None:
        return Begin(size)
    if not isinstance(base, dict):
        raise _wrong("base")
    return Begin(size, (_bytes(base, "name"), _content(base)))


def _entered(told: dict[str, Any]) -> Entered:
    xattrs = told.get("xattrs")
    if not isinstance(xattrs, dict) or not all(
        isinstance(part, bytes) for pair in xattrs.items() for part in pair
    ):
        raise _wrong("xattrs")
    try:
        kind = Kind(told.get("kind"))
    except ValueError:
        raise _wrong("kind") from None
    entry = Entry(
        path=_bytes(told, "path"),
        kind=kind,
        mode=_number(told, "mode"),
        mtime_ns=_number(told, "mtime_ns"),
        size=_number(told, "size"),
        target=_bytes(told, "target"),
        xattrs=xattrs,
        names=_number(told, "names"),
    )
    entry.check()
    return Entered(entry, told.get("keeps") is True)


def _end(told: dict[str, Any]) -> End:
    return End(_number(told, "entries"), _number(told, "size"), _content(told))


def _packed(content: Content) -> bytes:
    return int(content).to_bytes(_DIGEST, "little")


def _content(told: dict[str, Any]) -> Content:
    packed = _bytes(told, "content")
    if len(packed) != _DIGEST:
        raise _wrong("content")
    return Content(int.from_bytes(packed, "little"))


def _number(told: dict[str, Any], name: str) -> int:
    value = told.get(name)
    # Not bool, which is an int too.
    if type(value) is not int:
        raise _wrong(name)
    return value


def _bytes(told: dict[str, Any], name: str) -> bytes:
    value = told.get(name)
    if not isinstance(value, bytes):
        raise _wrong(name)
    return value


def _wrong(name: str) -> RefusedError:
    return RefusedError(f"the stream is damaged: {name} is not what it should be")

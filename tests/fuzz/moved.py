"""Streams, archives and headers of tensors as others may send them."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from random import Random

from kvfs.engine.codec import Layout
from mount_tools.moving.archive import _read
from mount_tools.moving.content import Content
from mount_tools.moving.entries import Entry, Kind, RefusedError
from mount_tools.moving.safetensors import _entries, is_tensors
from mount_tools.moving.source import Source
from mount_tools.moving.stream import (
    HEADER_SIZE,
    MAGIC,
    Begin,
    Header,
    StreamWriter,
    _checksum,
    read_stream,
)
from mount_tools.moving.tensors import Tensor, header_length, pack_header, parse_header

_DATA = bytes(range(256)) * 64


@contextmanager
def _file(data: bytes = b"") -> Iterator[int]:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


# -- streams


@cache
def streams() -> list[bytes]:
    found = []
    for compress in (False, True):
        for base in (None, (b"base", Content(7))):
            with _file() as fd:
                writer = StreamWriter(fd, compress=compress)
                writer.begin(Begin(2 * len(_DATA), base))
                writer.enter(Entry(b"", Kind.DIRECTORY, 0o700, 1), keeps=False)
                xattrs = {b"user.kvfs.dtype": b"bfloat16", b"user.x": b"\xff"}
                entry = Entry(b"layer.000", Kind.FILE, 0o600, 1, len(_DATA), b"", xattrs)
                writer.enter(entry, keeps=base is not None)
                writer.data(0, memoryview(_DATA), Layout(2, 64))
                writer.enter(Entry(b"l", Kind.SYMLINK, 0o777, 1, target=b"layer.000"), keeps=False)
                writer.enter(Entry(b"d", Kind.LINK, 0o600, 1, target=b"layer.000"), keeps=False)
                writer.end(Content(9))
                found.append(os.pread(fd, 1 << 20, 0))
    return found


def seal_stream(data: bytes) -> bytes:
    """Its checksums, as far as there are frames."""
    sealed, at, chain = bytearray(data), len(MAGIC), 0
    while at + HEADER_SIZE <= len(sealed):
        packed = bytes(sealed[at : at + Header.STRUCT.size])
        header = Header(*Header.STRUCT.unpack(packed))
        end = at + HEADER_SIZE + header.stored
        if end > len(sealed):
            break
        chain = _checksum(chain, packed, memoryview(sealed)[at + HEADER_SIZE : end])
        sealed[at + Header.STRUCT.size : at + HEADER_SIZE] = Header.CHECKSUM.pack(chain)
        at = end
    return bytes(sealed)


def read_as_stream(data: bytes) -> None:
    with _file(data) as fd, closing(read_stream(fd)) as frames:
        try:
            for _ in frames:
                pass
        except RefusedError:
            pass


# -- archives


@cache
def archives() -> list[bytes]:
    found = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
            for name, kind, data in [
                ("a", tarfile.DIRTYPE, b""), ("a/x", tarfile.REGTYPE, _DATA[:700]),
                ("a/l", tarfile.SYMTYPE, b""), ("a/h", tarfile.LNKTYPE, b""),
                ("a/" + "n" * 200, tarfile.REGTYPE, b"z"),
            ]:  # fmt: skip
                member = tarfile.TarInfo(name)
                member.type, member.size = kind, len(data)
                member.linkname = "x" if kind == tarfile.SYMTYPE else "a/x"
                member.pax_headers = {"SCHILY.xattr.user.a": "\udcff", "mtime": "1.5"}
                archive.addfile(member, io.BytesIO(data))
            places = b"2\n0\n512\n2048\n88\n".ljust(512, b"\0")
            member = tarfile.TarInfo("a/GNUSparseFile.0/s")
            member.size = len(places) + 600
            member.pax_headers = {
                "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a/s",
                "GNU.sparse.realsize": "4096",
            }  # fmt: skip
            archive.addfile(member, io.BytesIO(places + _DATA[:600]))
        found.append(packed.getvalue().rstrip(b"\0") + bytes(1024))
    return found


def seal_archive(data: bytes) -> bytes:
    """The checksums of all blocks that look like headers."""
    sealed = bytearray(data)
    for at in range(0, len(sealed) - 511, 512):
        if sealed[at + 257 : at + 262] == b"ustar":
            sealed[at + 148 : at + 156] = b" " * 8
            sealed[at + 148 : at + 156] = b"%06o\0 " % sum(sealed[at : at + 512])
    return bytes(sealed)


def read_as_archive(data: bytes) -> None:
    with _file(data) as fd, closing(_read(Source(fd))) as pieces:
        try:
            for entry, offset, piece in pieces:
                entry_is_right(entry)
                assert offset + len(piece) <= entry.size or not piece
        except RefusedError:
            pass


# -- tensors


@cache
def headers() -> list[bytes]:
    random = Random(0)
    tensors = [
        Tensor("layer.000", "BF16", (5, 2, 2, 16)),
        Tensor("tokens", "I32", (5,)),
        Tensor("e", "U8", (0,)),
    ]
    told = '{"": {"mode": 448, "mtime_ns": 5, "xattrs": {}}, "tokens": {"mode": 384, "mtime_ns":'
    told += ' 5, "xattrs": {"user.a": "\\udcff"}}}'
    whole = {"kvfs": "1", "entries": told, "session.json": "{}", "tokens": "5"}
    found = [pack_header(tensors, whole), pack_header(tensors[:1], {"format": "pt"})]
    random.shuffle(tensors)
    return [*found, pack_header(tensors, {})]


def seal_header(data: bytes) -> bytes:
    """The length of the JSON."""
    return len(data[8:]).to_bytes(8, "little") + data[8:]


def read_as_header(data: bytes) -> None:
    if len(data) < 8 or not is_tensors(data):
        return
    try:
        length = header_length(data[:8])
        tensors, metadata = parse_header(data[8 : 8 + length])
        for entry in _entries(tensors, metadata).values():
            entry_is_right(entry)
    except RefusedError:
        return
    assert [tensor.size >= 0 for tensor in tensors]


def entry_is_right(entry: Entry) -> None:
    """No path that leads anywhere else comes so far as to be made."""
    try:
        entry.check()
    except RefusedError:
        return
    names = entry.path.split(b"/") if entry.path else []
    assert not any(name in (b"", b".", b"..") or b"\0" in name for name in names)

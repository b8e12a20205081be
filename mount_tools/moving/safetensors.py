"""A session as a safetensors file: files are tensors, what says what they are is metadata."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from kvfs.engine.codec import ITEM_SIZES, elements
from mount_tools.moving.bytes import ahead, buffers, pieces, write_all
from mount_tools.moving.content import Laid, filled
from mount_tools.moving.entries import Entry, Kind, RefusedError, open_below, shown
from mount_tools.moving.landing import Landing
from mount_tools.moving.meter import Begins
from mount_tools.moving.reading import read_runs
from mount_tools.moving.source import Source
from mount_tools.moving.tensors import (
    LENGTH_SIZE,
    TYPE_OF,
    TYPES,
    Tensor,
    header_length,
    pack_header,
    parse_header,
)
from mount_tools.paths import opened

_VERSION = "1"
_DTYPE, _SHAPE, _MODEL = b"user.kvfs.dtype", b"user.kvfs.shape", b"user.kvfs.model"
# Short texts that say what the tensors are.
_TEXT = re.compile(r"session\.json|fingerprint\.r\d+")
_TEXT_MAX = 1024 * 1024
_TOKEN_BYTES = 4


# -- out


def write_tensors(session: Laid, fd: int, begins: Begins) -> int:
    """Write all of a session. Returns how many bytes that were. Raises RefusedError for what has
    no place in such a file."""
    texts = {entry.path: text for entry in session.files if (text := _text(session, entry))}
    tensors = [(_tensor(entry), entry) for entry in session.files if entry.path not in texts]
    # As the library does: so that elements lie at multiples of their size.
    tensors.sort(key=lambda one: (-TYPES[one[0].dtype][1], one[0].name))
    header = pack_header([tensor for tensor, _ in tensors], _metadata(session, texts))
    size = len(header) + sum(entry.size for _, entry in tensors)
    advance = begins(size)
    write_all(fd, [header])
    whole = [(entry, [(0, entry.size)] if entry.size else []) for _, entry in tensors]
    with read_runs(session, whole) as read:
        for _, _, data in read:
            write_all(fd, [data])
            advance(len(data))
    return size


def _text(session: Laid, entry: Entry) -> str | None:
    """What a file says that is metadata; None where it is none, or too strange."""
    if not _TEXT.fullmatch(_name(entry)) or not 0 < entry.size <= _TEXT_MAX:
        return None
    with (
        opened(session.path) as root,
        open(open_below(root, entry.path, os.O_RDONLY), "rb") as file,
    ):
        try:
            return file.read().decode()
        except UnicodeDecodeError:
            return None


def _tensor(entry: Entry) -> Tensor:
    """Rows of the file's shape; plain bytes where it has none, or is no whole number of rows."""
    name = _name(entry)
    dtype = TYPE_OF.get(entry.xattrs.get(_DTYPE, b"").decode("ascii", "replace"))
    row = entry.xattrs.get(_SHAPE, b"")
    if dtype is not None and elements(row) is not None:
        shape = tuple(map(int, row.split(b",")))
        one = Tensor(name, dtype, shape)
        if entry.size % one.size == 0:
            rows = entry.size // one.size
            return Tensor(name, dtype, (rows,) if shape == (1,) else (rows, *shape))
    return Tensor(name, "U8", (entry.size,))


def _metadata(session: Laid, texts: dict[bytes, str]) -> dict[str, str]:
    described: dict[str, Any] = {}
    for entry in session.entries.values():
        if (
            entry.kind is Kind.SYMLINK
            or entry.kind is Kind.LINK
            or (entry.kind is Kind.DIRECTORY and entry.path)
        ):
            raise RefusedError(
                f"{shown(entry.path)} is no plain file of the session: export it with --tar"
            )
        described[_name(entry)] = {
            "mode": entry.mode,
            "mtime_ns": entry.mtime_ns,
            "xattrs": {os.fsdecode(k): os.fsdecode(v) for k, v in entry.xattrs.items()},
        }
    metadata = {"kvfs": _VERSION, "entries": json.dumps(described)}
    root, tokens = session.entries[b""], session.entries.get(b"tokens")
    if _MODEL in root.xattrs:
        metadata["model"] = root.xattrs[_MODEL].decode(errors="replace")
    if tokens is not None:
        metadata["tokens"] = str(tokens.size // _TOKEN_BYTES)
    return metadata | {path.decode(): text for path, text in texts.items()}


def _name(entry: Entry) -> str:
    try:
        return entry.path.decode()
    except UnicodeDecodeError:
        raise RefusedError(
            f"{shown(entry.path)} is a name that is no UTF-8: export the session with --tar"
        ) from None


# -- in


def is_tensors(head: bytes) -> bool:
    """Whether a file begins like one."""
    return head[LENGTH_SIZE : LENGTH_SIZE + 1] == b"{"


def read_tensors(source: Source, new: Landing, begins: Begins) -> None:
    """Fill a session from what `write_tensors` wrote, or from another file of that format: then
    its tensors are files of their names. Raises RefusedError."""
    length = header_length(_exactly(source, LENGTH_SIZE))
    tensors, metadata = parse_header(_exactly(source, length))
    entries = _entries(tensors, metadata)
    advance = begins(LENGTH_SIZE + length + sum(tensor.size for tensor in tensors))
    new.add(entries.pop(""))
    for name, text in metadata.items():
        if _TEXT.fullmatch(name):
            new.add(entries[name])
            new.write(0, memoryview(text.encode()))
    last = None
    with ahead(_pieces(source, tensors)) as read:
        for tensor, offset, data in read:
            if tensor is not last:
                new.add(entries[tensor.name])
                last = tensor
            write_filled(new, offset, data)
            advance(len(data))
    if source.read(1):
        raise RefusedError("there is more in the file than its header tells of")


def write_filled(new: Landing, offset: int, data: memoryview) -> None:
    """Bytes of the file that was added last. Blocks of zeros stay holes."""
    for start, end in filled(data):
        new.write(offset + start, data[start:end])


def _exactly(source: Source, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise RefusedError("the file ends before its header says")
    return data


def _pieces(source: Source, tensors: list[Tensor]) -> Iterator[tuple[Tensor, int, memoryview]]:
    """All bytes, in the order of the file; at least one piece of each tensor."""
    memory = buffers()
    for tensor in tensors:
        for offset, length in pieces([(0, tensor.size)]) if tensor.size else [(0, 0)]:
            data = next(memory)[:length]
            if source.fill(data) < length:
                raise RefusedError("the file ends before its header says")
            yield tensor, offset, data


def _entries(tensors: list[Tensor], metadata: dict[str, str]) -> dict[str, Entry]:
    """The session itself, its texts and its tensors, by name."""
    described = _described(metadata)
    now = time.time_ns()
    sizes = {tensor.name: tensor.size for tensor in tensors}
    texts = {name: len(text.encode()) for name, text in metadata.items() if _TEXT.fullmatch(name)}
    if sizes.keys() & texts.keys() or "" in sizes:
        raise RefusedError("a tensor and a text of one name")
    attributes = {tensor.name: _attributes(tensor) for tensor in tensors}
    entries = {}
    for name, size in {"": 0, **texts, **sizes}.items():
        told = described.get(name)
        kind = Kind.FILE if name else Kind.DIRECTORY
        if told is None:
            mode = 0o600 if name else 0o700
            told = mode, now, attributes.get(name, {})
        entries[name] = Entry(os.fsencode(name), kind, told[0], told[1], size, xattrs=told[2])
    for entry in entries.values():
        entry.check()
        if b"/" in entry.path:
            raise RefusedError(f"{shown(entry.path)} is no name of a file")
    return entries


def _attributes(tensor: Tensor) -> dict[bytes, bytes]:
    """What a file's rows are, for one that nothing else is told of."""
    name = TYPES[tensor.dtype][0]
    row = ",".join(map(str, tensor.shape[1:])).encode() or b"1"
    if name is None or name not in ITEM_SIZES or elements(row) is None:
        return {}
    return {_DTYPE: name.encode(), _SHAPE: row}


def _described(metadata: dict[str, str]) -> dict[str, tuple[int, int, dict[bytes, bytes]]]:
    """Mode, time and attributes by name."""
    if "kvfs" not in metadata:
        return {}
    if metadata["kvfs"] != _VERSION:
        raise RefusedError("the file was exported by a later release of KVFS: import it with that")
    try:
        told = json.loads(metadata.get("entries", ""))
        return {
            str(name): (int(one["mode"]), int(one["mtime_ns"]), _xattrs(one["xattrs"]))
            for name, one in told.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise RefusedError(
            "the file's metadata are damaged: nothing tells what was exported"
        ) from None


def _xattrs(told: dict[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in told.items()}

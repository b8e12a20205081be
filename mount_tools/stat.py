"""`kvfs stat`: what a mount, a session or a file is made of."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any

import numpy as np
import typer

from kvfs.engine.codec import ITEM_SIZES, elements
from mount_tools.arguments import complete_mountpoint
from mount_tools.common import (
    CommandError,
    format_size,
    parse_path,
    print_facts,
    print_json,
    print_table,
)
from mount_tools.mountpoints import read_stats
from mount_tools.paths import opened
from mount_tools.sessions import (
    Session,
    locate,
    ratio,
    read_session,
    read_xattr,
    stored_bytes,
)

_VALUES_SHOWN = 6
_FACT_MAX = 200
_DESCRIPTION_MAX = 16 * 1024 * 1024
_BYTE_COUNTS = {
    "available",
    "carried",
    "reclaimed",
    "total",
    "free",
    "live",
    "segment_size",
    "unsaved",
    "payload_written",
    "device_written",
    "limit",
    "taken",
    "leased",
    "spare",
    "hit_bytes",
    "evicted",
    "promoted",
    "taken_over",
    "right_bytes",
    "wrong_bytes",
}
_EXTENT_COLUMNS = ("offset", "length", "stored", "codec", "address")


def stat(
    path: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="PATH",
            autocompletion=complete_mountpoint,
            help="A mountpoint, a session or a file.",
        ),
    ],
    extents: Annotated[
        bool, typer.Option("--extents", help="Show where the bytes of a file are in the ring.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a mount's state and counters, a session, or a layer with its first values.

    \b
    Examples:
      kvfs stat /mnt/kv
      kvfs stat /mnt/kv/agent-7
      kvfs stat /mnt/kv/agent-7/layer.000 --extents
    """
    mount, path = locate(path)
    if extents and not path.is_file():
        raise CommandError(f"{path} is not a file: --extents is for files")
    if path == mount.mountpoint:
        _show_mount(path, json_output)
    elif path.is_dir():
        _show_session(path, json_output)
    elif path.is_file():
        _show_file(path, extents, json_output)
    else:
        raise CommandError(f"{path} is neither a directory nor a regular file")


# -- a mount


def _show_mount(mountpoint: Path, json_output: bool) -> None:
    document = read_stats(mountpoint).document
    if json_output:
        print_json(document)
    else:
        print_facts(_flat(document))


def _flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif name in _BYTE_COUNTS:
            yield prefix + name, format_size(value)
        else:
            yield prefix + name, "-" if value is None else str(value)


# -- a session


def _show_session(directory: Path, json_output: bool) -> None:
    session = read_session(directory, directory.name)
    if session is None:
        raise CommandError(
            f"{directory} is no session; list those below it with: kvfs ls {directory}"
        )
    description = _read_description(directory)
    if json_output:
        print_json({"kind": "session", **session.as_json(), "description": description})
        return
    print_facts(_session_facts(session, description))
    typer.echo()
    rows = [
        [f.name, format_size(f.size), format_size(f.stored), _ratio_text(f.size, f.stored)]
        for f in session.files
    ]
    print_table(("file", "size", "stored", "ratio"), rows, ("size", "stored", "ratio"))


def _read_description(directory: Path) -> dict[str, Any] | None:
    """`session.json`; None where there is none, or it is something else: another user may have
    put a pipe there, a link, or a file of any length."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with opened(directory) as fd, open(os.open("session.json", flags, dir_fd=fd), "rb") as file:
            is_file = S_ISREG(os.fstat(file.fileno()).st_mode)
            return parse_description(file.read(_DESCRIPTION_MAX)) if is_file else None
    except OSError:
        return None


def parse_description(content: bytes) -> dict[str, Any] | None:
    """What a `session.json` says; None where it is none."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _session_facts(
    session: Session, description: dict[str, Any] | None
) -> Iterator[tuple[str, str]]:
    yield "session", str(session.path)
    yield "model", session.model or "-"
    yield "tokens", "-" if session.tokens is None else str(session.tokens)
    yield "layers", str(session.layers)
    if description is not None:
        yield from described(description)
    yield from _size_facts(session.size, session.stored)
    yield "tier", session.tier or "-"
    yield "last use", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.last_use))


def described(description: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts of a `session.json`, as far as they are what they should be."""
    rounds, fingerprint = description.get("rounds"), description.get("fingerprint")
    if isinstance(rounds, list):
        yield "rounds", str(len(rounds))
    if isinstance(fingerprint, dict):
        for name in ("layers", "kv_heads", "head_dim", "dtype", "layout"):
            if isinstance(fingerprint.get(name), (str, int)):
                yield f"model's {name}", str(fingerprint[name])[:_FACT_MAX]


# -- a file


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file and, as far as its dtype and shape tell, its rows of KV."""

    path: Path
    size: int
    stored: int
    codec: str | None
    tier: str | None
    codecs: dict[str, int]
    dtype: str | None
    shape: list[int] | None
    tokens: int | None
    first_values: dict[str, list[float]]
    extents: list[dict[str, Any]]


def _show_file(path: Path, with_extents: bool, json_output: bool) -> None:
    layer = _read_file(path)
    if json_output:
        document = asdict(layer) | {"path": str(path), "kind": "file"}
        document["ratio"] = ratio(layer.size, layer.stored)
        if not with_extents:
            del document["extents"]
        print_json(document)
        return
    print_facts(_file_facts(layer))
    if with_extents:
        typer.echo()
        rows = [[str(extent[column]) for column in _EXTENT_COLUMNS] for extent in layer.extents]
        print_table(_EXTENT_COLUMNS, rows, ("offset", "length", "stored", "address"))


def _read_file(path: Path) -> LayerFile:
    status = path.stat()
    extents = list(extents_of(path))
    dtype, shape = read_xattr(path, "dtype"), _parse_shape(read_xattr(path, "shape"))
    row_bytes = _row_bytes(dtype, shape)
    return LayerFile(
        path=path,
        size=status.st_size,
        stored=stored_bytes(status),
        codec=read_xattr(path, "codec"),
        tier=read_xattr(path, "tier"),
        codecs=dict(Counter(extent["codec"] for extent in extents)),
        dtype=dtype,
        shape=shape,
        tokens=status.st_size // row_bytes if row_bytes else None,
        first_values=_first_values(path, dtype, shape),
        extents=extents,
    )


def _file_facts(layer: LayerFile) -> Iterator[tuple[str, str]]:
    yield "file", str(layer.path)
    yield from _size_facts(layer.size, layer.stored)
    yield "tier", layer.tier or "-"
    if layer.codec is not None:
        yield "codec set", layer.codec
    if layer.codecs:
        yield "stored with", ", ".join(f"{name} ({n} extents)" for name, n in layer.codecs.items())
    if layer.dtype is not None:
        yield "dtype", layer.dtype
    if layer.shape is not None:
        yield "shape of a row", " x ".join(map(str, layer.shape))
    if layer.tokens is not None:
        yield "tokens", str(layer.tokens)
    for name, values in layer.first_values.items():
        yield name, " ".join(f"{value:.6g}" for value in values)


def _parse_shape(text: str | None) -> list[int] | None:
    """`2,3,64`; None for anything else: users may set what they like."""
    text = text or ""
    return None if elements(os.fsencode(text)) is None else [int(n) for n in text.split(",")]


def _row_bytes(dtype: str | None, shape: list[int] | None) -> int | None:
    item = _stored_type(dtype)
    return None if item is None or shape is None else math.prod(shape) * item.itemsize


def _stored_type(dtype: str | None) -> np.dtype[Any] | None:
    """numpy's type of the bytes; None for element types that it has no name for."""
    if dtype == "bfloat16":
        return np.dtype("<u2")
    try:
        found = np.dtype(dtype) if dtype in ITEM_SIZES else None
    except TypeError:
        return None
    return found if found is not None and found.kind in "fiu" else None


def _first_values(path: Path, dtype: str | None, shape: list[int] | None) -> dict[str, list[float]]:
    """Of the first token: some of K and some of V, if the row is of that shape."""
    item, row_bytes = _stored_type(dtype), _row_bytes(dtype, shape)
    if item is None or row_bytes is None or shape is None:
        return {}
    with path.open("rb") as file:
        row = file.read(row_bytes)
    if len(row) < row_bytes:
        return {}
    values = _decode(np.frombuffer(row, item), dtype)
    if len(shape) == 3 and shape[0] == 2:
        keys, entries = np.split(values, 2)
        return {"first K": _some(keys), "first V": _some(entries)}
    return {"first values": _some(values)}


def _decode(values: np.ndarray[Any, Any], dtype: str | None) -> np.ndarray[Any, Any]:
    """bfloat16 is the upper half of a float32, which numpy knows."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _some(values: np.ndarray[Any, Any]) -> list[float]:
    return [float(value) for value in values[:_VALUES_SHOWN]]


# -- shared


def _size_facts(size: int, stored: int) -> Iterator[tuple[str, str]]:
    yield "size", f"{format_size(size)} ({size} bytes)"
    yield "stored", f"{format_size(stored)} ({stored} bytes)"
    yield "ratio", _ratio_text(size, stored)


def _ratio_text(size: int, stored: int) -> str:
    shrunk = ratio(size, stored)
    return "-" if shrunk is None else f"{shrunk:.2f}"


def extents_of(path: Path) -> Iterator[dict[str, Any]]:
    """All of a file's: an extended attribute holds so many, and says where to go on."""
    start: int | None = 0
    while start is not None:
        listed = json.loads(read_xattr(path, f"extents.{start}") or "[]")
        start = None
        for extent in listed:
            if "truncated" in extent:
                start = extent["next"]
            else:
                yield extent

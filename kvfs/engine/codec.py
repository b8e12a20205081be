"""Lossless codecs: none, zstd, and byte planes + zstd.

Elements of a KV cache differ mostly in their low bytes: sign and exponent repeat,
mantissas do not. Splitting elements into byte planes puts the bytes that compress
beside each other; within a plane the bytes of one channel (the same place in each
token's row) are alike, so a plane is compressed channel by channel. A plane is stored
as it is where zstd does not shrink it; so is an extent as a whole.
"""

from __future__ import annotations

import math
import re
import struct
import threading
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import zstandard

from kvfs.engine.format import BLOCK, FormatError, round_up

_LEVEL = 1
# What repeats in planes are bytes more than strings: few and long matches leave more to the
# entropy coder, which is both smaller and faster to decode than level 1 (docs/benchmarks.md).
_OF_PLANES = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=10, chain_log=6, search_log=1,
    min_match=7, write_checksum=False,
)  # fmt: skip
_PLANES_HEAD = struct.Struct("<I")
_PLANE_HEAD = struct.Struct("<I")
_threads = threading.local()
Bytes = npt.NDArray[np.uint8]

ITEM_SIZES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


ROW_ITEMS_MAX = 1 << 20
_SHAPE = re.compile(rb"[1-9][0-9]{0,6}(,[1-9][0-9]{0,6}){0,7}")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a file's elements lie: bytes of an element, elements of a token's row."""

    item_size: int = 1
    row_items: int = 1


class Codec(IntEnum):
    """How an extent is stored."""

    NONE = 0
    ZSTD = 1
    PLANES = 2


class CodecChoice(str, Enum):
    """What a file or directory asks for (`user.kvfs.codec`)."""

    AUTO = "auto"
    NONE = "none"
    ZSTD = "zstd"
    PLANES = "planes"


def encode(codec: Codec, layout: Layout, data: memoryview) -> bytes | None:
    """The stored form of `data`, or None when it would save no block."""
    if codec == Codec.NONE or len(data) <= BLOCK:
        return None
    if codec == Codec.PLANES and layout.item_size > 1:
        stored = _encode_planes(layout, data)
    else:
        stored = _compressor().compress(data)
    return stored if round_up(len(stored)) < round_up(len(data)) else None


def decode(codec: int, item_size: int, stored: memoryview, out: memoryview) -> None:
    """Fill `out`, whose length is the extent's size. Raises FormatError on bad bytes."""
    if codec == Codec.NONE:
        if len(stored) != len(out):
            raise FormatError("a raw extent's sizes differ")
        out[:] = stored
    elif codec == Codec.ZSTD or (codec == Codec.PLANES and item_size <= 1):
        np.frombuffer(out, np.uint8)[:] = _decompressed(stored, len(out))
    elif codec == Codec.PLANES:
        _decode_planes(item_size, stored, out)
    else:
        raise FormatError(f"codec {codec} is unknown to this release")


def _encode_planes(layout: Layout, data: memoryview) -> bytes:
    count = len(data) // layout.item_size
    items = np.frombuffer(data, np.uint8, count * layout.item_size)
    parts: list[bytes | memoryview] = [_PLANES_HEAD.pack(layout.row_items)]
    for plane in items.reshape(count, layout.item_size).T:
        packed = _plane_compressor().compress(_by_channel(plane, layout.row_items).data)
        body = packed if len(packed) < count else np.ascontiguousarray(plane).data
        parts += [_PLANE_HEAD.pack(len(body)), body]
    parts.append(data[items.size :])
    return b"".join(parts)


def _decode_planes(item_size: int, stored: memoryview, out: memoryview) -> None:
    count = len(out) // item_size
    planes = np.frombuffer(out, np.uint8, count * item_size).reshape(count, item_size).T
    (row_items,), at = _unpack(_PLANES_HEAD, stored, 0)
    if not 1 <= row_items <= ROW_ITEMS_MAX:
        raise FormatError("byte planes with impossible rows")
    for plane in planes:
        (length,), at = _unpack(_PLANE_HEAD, stored, at)
        body = stored[at : at + length]
        at += length
        if len(body) != length or length > count:
            raise FormatError("a byte plane has a wrong length")
        if length == count:
            plane[:] = np.frombuffer(body, np.uint8)
        else:
            _scatter_channels(_decompressed(body, count), row_items, plane)
    tail = out[count * item_size :]
    if len(stored) - at != len(tail):
        raise FormatError("an extent's tail has a wrong length")
    tail[:] = stored[at:]


def _by_channel(plane: Bytes, row_items: int) -> Bytes:
    """Whole rows channel by channel, then what fills no row."""
    whole = len(plane) // row_items * row_items
    rows = plane[:whole].reshape(-1, row_items)
    return np.concatenate([rows.T.ravel(), plane[whole:]])


def _scatter_channels(channels: Bytes, row_items: int, plane: Bytes) -> None:
    whole = len(plane) // row_items * row_items
    plane[:whole].reshape(-1, row_items)[:] = channels[:whole].reshape(row_items, -1).T
    plane[whole:] = channels[whole:]


def _unpack(layout: struct.Struct, stored: memoryview, at: int) -> tuple[tuple[int, ...], int]:
    if at + layout.size > len(stored):
        raise FormatError("a byte plane is cut")
    return layout.unpack_from(stored, at), at + layout.size


def _decompressed(stored: memoryview, size: int) -> Bytes:
    try:
        # The frame's own size is checked first: a lying one must not allocate.
        if zstandard.frame_content_size(stored) != size:
            raise FormatError("a compressed extent has a wrong size")
        return np.frombuffer(_decompressor().decompress(stored), np.uint8)
    except zstandard.ZstdError as error:
        raise FormatError(f"zstd: {error}") from None


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_threads, "compressor"):
        _threads.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    compressor: zstandard.ZstdCompressor = _threads.compressor
    return compressor


def _plane_compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_threads, "plane_compressor"):
        _threads.plane_compressor = zstandard.ZstdCompressor(compression_params=_OF_PLANES)
    compressor: zstandard.ZstdCompressor = _threads.plane_compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_threads, "decompressor"):
        _threads.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _threads.decompressor
    return decompressor


class Share(Enum):
    """What is compressed of the `auto` extents of a batch."""

    NONE = 0
    LARGEST = 1  # to find out whether it would pay
    ALL = 2


@dataclass(slots=True)
class AutoCodec:
    """Decides for `auto`: compress where the device is the slower part, or space is
    short, and the data shrinks.

    Bandwidths are bytes a second, exponentially smoothed over what was really written
    and encoded; of one batch in `PROBE_INTERVAL` an extent is encoded to keep them true.
    """

    device: float = 0.0
    encoder: float = 0.0
    ratio: float = 0.0
    space_is_short: bool = False
    _batches: int = 0

    SMOOTHING: ClassVar[float] = 0.2
    RATIO_MIN: ClassVar[float] = 1.1
    PROBE_INTERVAL: ClassVar[int] = 64

    def saw_write(self, size: int, seconds: float) -> None:
        self.device = self._smooth(self.device, size / max(seconds, 1e-6))

    def saw_encode(self, size: int, stored: int, seconds: float) -> None:
        self.encoder = self._smooth(self.encoder, size / max(seconds, 1e-6))
        self.ratio = self._smooth(self.ratio, size / stored)

    def next_batch(self) -> Share:
        probe = self._batches % self.PROBE_INTERVAL == 0
        self._batches += 1
        pays = self.space_is_short or 0 < self.device < self.encoder
        if pays and self.ratio >= self.RATIO_MIN:
            return Share.ALL
        return Share.LARGEST if probe else Share.NONE

    def _smooth(self, old: float, new: float) -> float:
        return new if old == 0 else old + self.SMOOTHING * (new - old)


def resolve(choice: CodecChoice, layout: Layout, *, auto_compresses: bool) -> Codec:
    """The codec for what is written now by a file with this choice and layout."""
    if choice == CodecChoice.NONE or (choice == CodecChoice.AUTO and not auto_compresses):
        return Codec.NONE
    if choice == CodecChoice.ZSTD or layout.item_size <= 1:
        return Codec.ZSTD
    return Codec.PLANES


def layout_of(dtype: bytes | None, shape: bytes | None) -> Layout:
    """From `user.kvfs.dtype` ("bfloat16") and `user.kvfs.shape` ("2,3,64", a token's row);
    what is not understood counts as single bytes."""
    item_size = ITEM_SIZES.get((dtype or b"").decode("ascii", "replace"), 1)
    return Layout(item_size, elements(shape or b"1") or 1)


def elements(shape: bytes) -> int | None:
    """Of a row of that shape; None if it is none, or too long."""
    if not _SHAPE.fullmatch(shape):
        return None
    count = math.prod(map(int, shape.split(b",")))
    return count if count <= ROW_ITEMS_MAX else None

"""Lossless codecs: none, zstd, and byte planes + zstd.

Elements of a KV cache differ mostly in their low bytes: sign and exponent repeat,
mantissas do not. Splitting elements of `item_size` bytes into byte planes puts
the bytes that compress beside each other. Each plane is stored as it is where
zstd does not shrink it; so is an extent as a whole.
"""

from __future__ import annotations

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
_PLANE_HEAD = struct.Struct("<I")
_threads = threading.local()

ITEM_SIZES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "int64": 8, "int32": 4, "int16": 2,
}  # fmt: skip


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


def encode(codec: Codec, item_size: int, data: memoryview) -> bytes | None:
    """The stored form of `data`, or None when it would save no block."""
    if codec == Codec.NONE or len(data) <= BLOCK:
        return None
    if codec == Codec.PLANES and item_size > 1:
        stored = _encode_planes(item_size, data)
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
        _decompress(stored, np.frombuffer(out, np.uint8))
    elif codec == Codec.PLANES:
        _decode_planes(item_size, stored, out)
    else:
        raise FormatError(f"codec {codec} is unknown to this release")


def _encode_planes(item_size: int, data: memoryview) -> bytes:
    count = len(data) // item_size
    items = np.frombuffer(data, np.uint8, count * item_size).reshape(count, item_size)
    parts = []
    for plane in range(item_size):
        raw = np.ascontiguousarray(items[:, plane])
        packed = _compressor().compress(raw.data)
        body: bytes | memoryview = packed if len(packed) < count else raw.data
        parts += [_PLANE_HEAD.pack(len(body)), body]
    parts.append(data[count * item_size :])
    return b"".join(parts)


def _decode_planes(item_size: int, stored: memoryview, out: memoryview) -> None:
    count = len(out) // item_size
    items = np.frombuffer(out, np.uint8, count * item_size).reshape(count, item_size)
    at = 0
    for plane in range(item_size):
        if at + _PLANE_HEAD.size > len(stored):
            raise FormatError("a byte plane is cut")
        (length,) = _PLANE_HEAD.unpack_from(stored, at)
        at += _PLANE_HEAD.size
        body = stored[at : at + length]
        at += length
        if len(body) != length or length > count:
            raise FormatError("a byte plane has a wrong length")
        if length == count:
            items[:, plane] = np.frombuffer(body, np.uint8)
        else:
            scratch = _scratch(count)
            _decompress(body, scratch)
            items[:, plane] = scratch
    tail = out[count * item_size :]
    if len(stored) - at != len(tail):
        raise FormatError("an extent's tail has a wrong length")
    tail[:] = stored[at:]


def _decompress(stored: memoryview, out: npt.NDArray[np.uint8]) -> None:
    try:
        # The frame's own size is checked first: a lying one must not allocate.
        if zstandard.frame_content_size(stored) != len(out):
            raise FormatError("a compressed extent has a wrong size")
        out[:] = np.frombuffer(_decompressor().decompress(stored), np.uint8)
    except zstandard.ZstdError as error:
        raise FormatError(f"zstd: {error}") from None


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_threads, "compressor"):
        _threads.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    compressor: zstandard.ZstdCompressor = _threads.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_threads, "decompressor"):
        _threads.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _threads.decompressor
    return decompressor


def _scratch(size: int) -> npt.NDArray[np.uint8]:
    if getattr(_threads, "scratch", np.empty(0)).size < size:
        _threads.scratch = np.zeros(size, np.uint8)
    scratch: npt.NDArray[np.uint8] = _threads.scratch[:size]
    return scratch


@dataclass(slots=True)
class AutoCodec:
    """Decides for `auto`: compress where the device is the slower part, or space is
    short, and the data shrinks.

    Bandwidths are bytes a second, exponentially smoothed over what was really written
    and encoded; one batch in `PROBE_INTERVAL` is encoded to keep them true.
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

    def next_batch(self) -> bool:
        """Whether the `auto` files of the next batch are compressed."""
        probe = self._batches % self.PROBE_INTERVAL == 0
        self._batches += 1
        pays = self.space_is_short or 0 < self.device < self.encoder
        return probe or (pays and self.ratio >= self.RATIO_MIN)

    def _smooth(self, old: float, new: float) -> float:
        return new if old == 0 else old + self.SMOOTHING * (new - old)


def resolve(choice: CodecChoice, item_size: int, *, auto_compresses: bool) -> Codec:
    """The codec for what is written now by a file with this choice and element size."""
    if choice == CodecChoice.NONE or (choice == CodecChoice.AUTO and not auto_compresses):
        return Codec.NONE
    if choice == CodecChoice.ZSTD or item_size <= 1:
        return Codec.ZSTD
    return Codec.PLANES

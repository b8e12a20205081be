"""Records of metadata: nodes, parts of the bitmap, checkpoints. Encoded, and read back."""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.engine import codec
from kvfs.engine.buffers import aligned
from kvfs.engine.codec import Codec, Layout
from kvfs.engine.device import Device, read_bytes
from kvfs.engine.format import (
    FormatError,
    FrameHeader,
    Pointer,
    RecordHeader,
    RecordKind,
    checksum,
    round_up,
)


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record that is not placed yet, and its stored bytes in whole aligned blocks."""

    record: RecordHeader
    stored: memoryview


def encode(kind: RecordKind, body: bytes) -> EncodedRecord:
    packed = codec.encode(Codec.ZSTD, Layout(), memoryview(body))
    used, stored = (Codec.NONE, body) if packed is None else (Codec.ZSTD, packed)
    record = RecordHeader(
        kind, used, 1, 0, 0, 0, 0, len(body), len(stored), 0, checksum(stored)
    )  # fmt: skip
    padded = aligned(round_up(len(stored)))
    padded[: len(stored)] = stored
    return EncodedRecord(record, padded)


def pointer_to(header: FrameHeader, record: RecordHeader) -> Pointer:
    """Where a record of a placed frame lies."""
    return Pointer(
        header.address + record.payload, record.stored, record.size, record.codec, record.checksum
    )


def read(device: Device, pointer: Pointer) -> bytes:
    """What was encoded. Raises FormatError when it is not what was written, OSError."""
    return decode(pointer, read_bytes(device, pointer.address, round_up(pointer.stored)))


def decode(pointer: Pointer, blocks: memoryview) -> bytes:
    """What was encoded, from the blocks that it was stored in. Raises FormatError."""
    stored = blocks[: pointer.stored]
    if checksum(stored) != pointer.checksum:
        raise FormatError(f"metadata at byte {pointer.address} fails its checksum")
    out = bytearray(pointer.size)
    codec.decode(pointer.codec, 1, stored, memoryview(out))
    return bytes(out)

"""Every structure that KVFS stores, in one place, with its version.

All integers are little-endian except index keys, which are big-endian so that
they sort as bytes. Every checksum is xxh3-64. docs/format.md says the same in
prose; a change here bumps FORMAT_VERSION or claims a feature bit.

    | slot 0 | ... | slot 1 | ... | segment 0 | segment 1 | ...
    segment:  | frame | frame | ... | unused tail |
    frame:    | header | record headers | items | pad | payload | payload | ...
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

FORMAT_VERSION = 3
BLOCK = 4096
SUPERBLOCK_ADDRESSES = (0, 512 * 1024)
DATA_START = 1024 * 1024

SEGMENT_SIZE_MIN = 1024 * 1024
SEGMENT_SIZE_MAX = 1024 * 1024 * 1024
SEGMENT_COUNT_MIN = 12
EXTENT_SIZE_MIN = 128 * 1024
EXTENT_SIZE_MAX = 1024 * 1024
NAME_LENGTH_MAX = 255
NO_SEGMENT = 0xFFFF_FFFF
ROOT_INODE = 1
FIRST_FREE_ID = 16
OPLOG_HOME_MAX = 512
METADATA_SIZE_MAX = 64 * 1024 * 1024  # of a record, decoded
SECRET_SIZE = 32  # of every key
NONCE_SIZE, TAG_SIZE = 12, 16
SEAL_OVERHEAD = NONCE_SIZE + TAG_SIZE  # what encryption adds
HASH_KEY_SIZE = 16
SEALED_KEYS_SIZE = HASH_KEY_SIZE + 3 * SECRET_SIZE + SEAL_OVERHEAD


class FormatError(OSError):
    """Bytes that are not what they should be: bad magic, checksum or bounds. To who asked for
    what they stand for it is an I/O error."""

    errno = errno.EIO

    @property
    def strerror(self) -> str:  # type: ignore[override]
        return str(self)


class UnknownFormatError(FormatError):
    """Whole, but of a release that knows more than this one."""


def checksum(*parts: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of the parts, one after the other."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def _fields(layout: struct.Struct, data: bytes | memoryview, *, rest: bool = False) -> Any:
    """The fields of a stored structure; with `rest`, more bytes may follow."""
    if len(data) < layout.size or (len(data) > layout.size and not rest):
        raise FormatError("a stored structure has a wrong length")
    return layout.unpack_from(data)


def round_up(size: int, to: int = BLOCK) -> int:
    """The smallest multiple of `to` that holds `size` bytes."""
    return -(-size // to) * to


# -- superblock ---------------------------------------------------------------


class SuperblockFlag(IntFlag):
    CLEAN = 1


class Feature(IntFlag):
    """What a ring has that a reader must know of, or refuse it."""

    NONE = 0
    ENCRYPTED = 1


def _feature_names(features: int) -> bytes:
    return b",".join(f.name.lower().encode() for f in Feature if f & features and f.name)


def _unknown_features(features: int, names: bytes) -> str | None:
    """Those that this release does not know, as the ring itself names them."""
    bits = [bit for bit in range(64) if features >> bit & 1]
    told = names.rstrip(b"\0").decode("ascii", "replace").split(",")
    if len(told) != len(bits):
        told = [""] * len(bits)
    known = {feature.bit_length() - 1 for feature in Feature}
    unknown = [
        f"{name} (bit {bit})" if name.isidentifier() else f"bit {bit}"
        for bit, name in zip(bits, told, strict=True)
        if bit not in known
    ]
    return ", ".join(unknown) or None


class Cipher(IntEnum):
    NONE = 0
    AES_256_GCM = 1
    CHACHA20_POLY1305 = 2


_POINTER = struct.Struct("<QIIB3xQ")


class Pointer(NamedTuple):
    """Where a stored thing lies, and the checksum that it must have. A tuple, since nodes
    are found by it: it is hashed at each step down a tree."""

    address: int = 0
    stored: int = 0
    size: int = 0
    codec: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        return _POINTER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Pointer:
        """Raises FormatError on a wrong length, and for what no record is like."""
        pointer = cls(*_fields(_POINTER, data))
        if max(pointer.stored, pointer.size) > METADATA_SIZE_MAX or pointer.address % BLOCK:
            raise FormatError("a pointer to what is no record")
        return pointer


NOWHERE = Pointer()
POINTER_SIZE = _POINTER.size


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the log: where the next frame goes, its sequence, its predecessor.

    `offset` is in bytes within the segment, and equals the segment size when full.
    """

    segment: int
    offset: int
    next_segment: int
    sequence: int
    previous_checksum: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<IIQQQ")

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            self.segment, self.next_segment, self.offset, self.sequence, self.previous_checksum
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Position:
        """Raises FormatError on a wrong length."""
        segment, next_segment, offset, sequence, previous = _fields(cls.STRUCT, data)
        return cls(segment, offset, next_segment, sequence, previous)


@dataclass(frozen=True, slots=True)
class Superblock:
    """The root of everything. Two slots, written in turn; the newest valid one wins.

    `features` are incompatible: a reader that does not know one must refuse. Their names stand
    at the end of the block, so that it can say which.
    `id_floor`: no inode or extent id at or above it was ever handed out.
    `oplog_home`: where the operation log of this mount lies, as its buffer names it.
    `epoch_start`: frames with this sequence or a later one are of `epoch` or a later one.
    Of an encrypted ring: `key_tables` is the checkpoint's key table, twice, and `sealed_keys`
    what opens it, under the master key.
    """

    uuid: bytes
    generation: int
    epoch: int
    epoch_start: int
    created_ns: int
    device_size: int
    segment_size: int
    segment_count: int
    id_floor: int
    hash_key: bytes
    oplog_token: bytes
    oplog_home: bytes
    flags: SuperblockFlag
    operation: int
    checkpoint: Pointer
    replay: Position
    features: Feature = Feature.NONE
    cipher: Cipher = Cipher.NONE
    key_tables: tuple[Pointer, Pointer] = (NOWHERE, NOWHERE)
    sealed_keys: bytes = bytes(SEALED_KEYS_SIZE)

    MAGIC: ClassVar[bytes] = b"KVFSRING"
    STRUCT: ClassVar[struct.Struct] = struct.Struct(
        f"<8sIIQ16sQQQQQIIQQ16s16s512sIIQ28s32sB3x28s28s{SEALED_KEYS_SIZE}s"
    )
    NAMES_AT: ClassVar[int] = BLOCK - 8 - 512

    def pack(self) -> bytes:
        body = self.STRUCT.pack(
            self.MAGIC,
            FORMAT_VERSION,
            BLOCK,
            self.features,
            self.uuid,
            self.generation,
            self.epoch,
            self.epoch_start,
            self.created_ns,
            self.device_size,
            self.segment_size,
            self.segment_count,
            DATA_START,
            self.id_floor,
            self.hash_key,
            self.oplog_token,
            self.oplog_home,
            self.flags,
            0,
            self.operation,
            self.checkpoint.pack(),
            self.replay.pack(),
            self.cipher,
            *(pointer.pack() for pointer in self.key_tables),
            self.sealed_keys,
        )
        body = body.ljust(self.NAMES_AT, b"\0") + _feature_names(self.features)
        body = body.ljust(BLOCK - 8, b"\0")
        return body + checksum(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Superblock:
        """Raises FormatError when the block is no superblock, and UnknownFormatError, with what
        to do, when it is one that another release has to read."""
        data = bytes(data)
        if data[:8] != cls.MAGIC:
            raise FormatError("no KVFS superblock")
        if checksum(data[: BLOCK - 8]) != int.from_bytes(data[BLOCK - 8 :], "little"):
            raise FormatError("superblock checksum mismatch")
        (
            _, version, block, features, uuid, generation, epoch, epoch_start, created_ns,
            device_size, segment_size, segment_count, data_start, id_floor, hash_key,
            oplog_token, oplog_home, flags, _, operation, checkpoint, replay, cipher, key_table,
            key_table_again, sealed_keys,
        ) = cls.STRUCT.unpack_from(data)  # fmt: skip
        if version != FORMAT_VERSION or block != BLOCK or data_start != DATA_START:
            other = "a newer kvfs" if version >= FORMAT_VERSION else "the kvfs that made it"
            raise UnknownFormatError(
                f"format version {version} is unknown to this release, which reads version "
                f"{FORMAT_VERSION}; use {other}"
            )
        unknown = _unknown_features(features, data[cls.NAMES_AT : BLOCK - 8])
        if unknown is not None:
            raise UnknownFormatError(
                f"it uses features that are unknown to this release: {unknown}; use a newer kvfs"
            )
        if cipher not in set(Cipher):
            raise UnknownFormatError(
                f"cipher {cipher} is unknown to this release; use a newer kvfs"
            )
        return cls(
            uuid=uuid,
            generation=generation,
            epoch=epoch,
            epoch_start=epoch_start,
            created_ns=created_ns,
            device_size=device_size,
            segment_size=segment_size,
            segment_count=segment_count,
            id_floor=id_floor,
            hash_key=hash_key,
            oplog_token=oplog_token,
            oplog_home=oplog_home.rstrip(b"\0"),
            flags=SuperblockFlag(flags),
            operation=operation,
            checkpoint=Pointer.unpack(checkpoint),
            replay=Position.unpack(replay),
            features=Feature(features),
            cipher=Cipher(cipher),
            key_tables=(Pointer.unpack(key_table), Pointer.unpack(key_table_again)),
            sealed_keys=sealed_keys,
        )

    def next(self, **changes: object) -> Superblock:
        """The superblock that follows this one, with `changes` applied."""
        return replace(self, generation=self.generation + 1, **changes)  # type: ignore[arg-type]

    @property
    def durable(self) -> int:
        """Frames with a lower sequence were flushed when this was written."""
        return max(self.replay.sequence, self.epoch_start)

    @property
    def address(self) -> int:
        """The slot that this generation is written to, in bytes from the start."""
        return SUPERBLOCK_ADDRESSES[self.generation % len(SUPERBLOCK_ADDRESSES)]


# -- frames -------------------------------------------------------------------


class FrameFlag(IntFlag):
    CONTINUES = 1  # the commit unit goes on in the next frame


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What is written to the ring at once. The header has its own checksum, so
    that its lengths can be trusted before the table is read; the table's checksum
    covers record headers and items; each payload has one in its record header.

    `operation`: the last operation whose effect is complete with this frame.
    `flushed`: the last sequence that was known to be flushed when it was made.
    """

    uuid: bytes
    epoch: int
    sequence: int
    previous_checksum: int
    flushed: int
    operation: int
    address: int
    next_segment: int
    flags: FrameFlag
    record_count: int
    item_bytes: int
    head_length: int
    frame_length: int
    table_checksum: int

    MAGIC: ClassVar[bytes] = b"KVFRAME1"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<8s16sQQQQQQIIIIIIQ")
    SIZE: ClassVar[int] = STRUCT.size + 8

    def pack(self) -> bytes:
        body = self.STRUCT.pack(
            self.MAGIC,
            self.uuid,
            self.epoch,
            self.sequence,
            self.previous_checksum,
            self.flushed,
            self.operation,
            self.address,
            self.next_segment,
            self.flags,
            self.record_count,
            self.item_bytes,
            self.head_length,
            self.frame_length,
            self.table_checksum,
        )
        return body + checksum(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> FrameHeader:
        """Raises FormatError when the bytes are no frame header."""
        if bytes(data[:8]) != cls.MAGIC:
            raise FormatError("no frame")
        body, stored = bytes(data[: cls.STRUCT.size]), data[cls.STRUCT.size : cls.SIZE]
        if checksum(body) != int.from_bytes(stored, "little"):
            raise FormatError("frame header checksum mismatch")
        (
            _, uuid, epoch, sequence, previous, flushed, operation, address, next_segment, flags,
            record_count, item_bytes, head_length, frame_length, table_checksum,
        ) = cls.STRUCT.unpack(body)  # fmt: skip
        return cls(
            uuid, epoch, sequence, previous, flushed, operation, address, next_segment,
            FrameFlag(flags), record_count, item_bytes, head_length, frame_length, table_checksum,
        )  # fmt: skip


class RecordKind(IntEnum):
    DATA = 1
    NODE = 2
    BITMAP = 3
    CHECKPOINT = 4
    KEYS = 5


@dataclass(slots=True)
class RecordHeader:
    """Names one payload of a frame.

    `offset` and `size` are bytes of the file (for DATA), `stored` the bytes in the
    ring, `payload` where they begin in the frame. `key_id` is the inode whose key they are
    encrypted under, if `cipher` says that they are.
    """

    kind: int
    codec: int
    item_size: int
    session_id: int
    object_id: int
    extent_id: int
    offset: int
    size: int
    stored: int
    payload: int
    checksum: int
    cipher: int = 0
    key_id: int = 0

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<BBBB4x QQQQQ III4x Q")
    SIZE: ClassVar[int] = STRUCT.size

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            self.kind, self.codec, self.item_size, self.cipher,
            self.session_id, self.object_id, self.extent_id, self.key_id, self.offset,
            self.size, self.stored, self.payload, self.checksum,
        )  # fmt: skip

    @classmethod
    def unpack_from(cls, data: bytes | memoryview, at: int) -> RecordHeader:
        """Raises FormatError when the bytes end before it does."""
        (
            kind, codec, item_size, cipher, session_id, object_id, extent_id, key_id, offset,
            size, stored, payload, check,
        ) = _fields(cls.STRUCT, data[at : at + cls.SIZE])  # fmt: skip
        return cls(
            kind, codec, item_size, session_id, object_id, extent_id, offset, size, stored,
            payload, check, cipher, key_id,
        )  # fmt: skip


# -- items: the keys and values of the index, which frames carry as deltas -------


class ItemKind(IntEnum):
    INODE = 1
    XATTR = 2
    DENTRY = 3
    MAP = 4
    ORPHAN = 5
    EXTENT = 6
    REFERENCES = 7
    SYMLINK = 8
    COUNTS = 9
    SUMMARY = 10
    UNIT = 11
    LOG = 12
    KEY = 13


KEY = struct.Struct(">BQBQ")
KIND_BYTE = 9
KEY_END = b"\xff" * KEY.size
TABLE_COUNTS, TABLE_INODES, TABLE_ORPHANS, TABLE_EXTENTS, TABLE_SUMMARIES = 0, 1, 2, 3, 4
TABLE_UNITS, TABLE_LOG, TABLE_KEYS = 5, 6, 7
_ITEM_HEAD = struct.Struct("<18sI")
_TOMBSTONE = 0xFFFF_FFFF
Item = tuple[bytes, "bytes | None"]


# An inode number says where its items lie in the index: a group of directories, in it the
# directories with their names first, the files born there behind them, by serial.
DIRECTORIES_PER_GROUP = 1000
SERIAL_BITS = 43
_GROUP_SHIFT = SERIAL_BITS + 1
GROUP_MAX = (1 << (63 - _GROUP_SHIFT)) - 1
ID_MAX = 1 << (SERIAL_BITS - 1)  # what is handed out never comes that far


def inode_number(group: int, serial: int, *, is_directory: bool) -> int:
    assert group <= GROUP_MAX and serial < 1 << SERIAL_BITS
    return group << _GROUP_SHIFT | (not is_directory) << SERIAL_BITS | serial


def group_of(ino: int) -> int:
    return ino >> _GROUP_SHIFT


def counts_key() -> bytes:
    return KEY.pack(TABLE_COUNTS, 0, ItemKind.COUNTS, 0)


def inode_key(ino: int) -> bytes:
    return KEY.pack(TABLE_INODES, ino, ItemKind.INODE, 0)


def symlink_key(ino: int) -> bytes:
    return KEY.pack(TABLE_INODES, ino, ItemKind.SYMLINK, 0)


def xattr_key(ino: int, slot: int) -> bytes:
    return KEY.pack(TABLE_INODES, ino, ItemKind.XATTR, slot)


def dentry_key(directory: int, slot: int) -> bytes:
    return KEY.pack(TABLE_INODES, directory, ItemKind.DENTRY, slot)


def map_key(ino: int, offset: int) -> bytes:
    return KEY.pack(TABLE_INODES, ino, ItemKind.MAP, offset)


def orphan_key(ino: int) -> bytes:
    return KEY.pack(TABLE_ORPHANS, ino, ItemKind.ORPHAN, 0)


def extent_key(extent_id: int) -> bytes:
    return KEY.pack(TABLE_EXTENTS, extent_id, ItemKind.EXTENT, 0)


def references_key(extent_id: int) -> bytes:
    return KEY.pack(TABLE_EXTENTS, extent_id, ItemKind.REFERENCES, 0)


def summary_key(ino: int) -> bytes:
    """An inode as it was when its data was carried forward: for fsck, not for the index."""
    return KEY.pack(TABLE_SUMMARIES, ino, ItemKind.SUMMARY, 0)


def unit_key(ino: int) -> bytes:
    return KEY.pack(TABLE_UNITS, ino, ItemKind.UNIT, 0)


def log_key(number: int) -> bytes:
    return KEY.pack(TABLE_LOG, number, ItemKind.LOG, 0)


def secret_key(ino: int) -> bytes:
    """The key of an inode, encrypted: for the key table, not for the index."""
    return KEY.pack(TABLE_KEYS, ino, ItemKind.KEY, 0)


def key_slot(key: bytes) -> int:
    """The last part of a key: an offset, or hash and collision number of a name."""
    return int.from_bytes(key[10:], "big")


def key_owner(key: bytes) -> int:
    return int.from_bytes(key[1:9], "big")


def name_slot(hash_key: bytes, name: bytes) -> int:
    """First slot of a name: a 55-bit keyed hash above 8 bits of collision number.

    A slot is also the readdir cookie, so it is positive and above 2.
    """
    seed = int.from_bytes(hash_key[:8], "little")
    hashed = xxhash.xxh3_64_intdigest(hash_key + name, seed) >> 9
    return max(hashed, 1) << 8


NAME_COLLISIONS_MAX = 256


@dataclass(slots=True)
class Inode:
    """An inode. `parent` and `name` are a hint for fsck: where its last link was made."""

    ino: int
    mode: int
    uid: int = 0
    gid: int = 0
    nlink: int = 1
    rdev: int = 0
    size: int = 0
    stored: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    birth_ns: int = 0
    parent: int = 0
    name: bytes = b""

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<IIIIQQQqqqqQ")

    def pack(self) -> bytes:
        fixed = self.STRUCT.pack(
            self.mode, self.uid, self.gid, self.nlink, self.rdev, self.size, self.stored,
            self.atime_ns, self.mtime_ns, self.ctime_ns, self.birth_ns, self.parent,
        )  # fmt: skip
        return fixed + self.name

    @classmethod
    def unpack(cls, ino: int, value: bytes) -> Inode:
        """Raises FormatError when it is cut."""
        inode = cls(ino, *_fields(cls.STRUCT, value, rest=True))
        inode.name = value[cls.STRUCT.size :]
        return inode


@dataclass(frozen=True, slots=True)
class Dentry:
    ino: int
    type: int  # S_IFMT bits of the mode
    name: bytes

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<QI")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.ino, self.type) + self.name

    @classmethod
    def unpack(cls, value: bytes) -> Dentry:
        """Raises FormatError when it is cut."""
        ino, type_ = _fields(cls.STRUCT, value, rest=True)
        return cls(ino, type_, value[cls.STRUCT.size :])


@dataclass(frozen=True, slots=True)
class Xattr:
    name: bytes
    value: bytes

    def pack(self) -> bytes:
        return bytes([len(self.name)]) + self.name + self.value

    @classmethod
    def unpack(cls, value: bytes) -> Xattr:
        """Raises FormatError when it is cut."""
        end = 1 + value[0] if value else 1
        if end > len(value):
            raise FormatError("an extended attribute is cut")
        return cls(value[1:end], value[end:])


@dataclass(frozen=True, slots=True)
class Slice:
    """`length` bytes of a file from `offset` on are those of an extent from `skew` on."""

    offset: int
    length: int
    extent_id: int
    skew: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<QII")

    @property
    def end(self) -> int:
        return self.offset + self.length

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.extent_id, self.skew, self.length)

    @classmethod
    def unpack(cls, offset: int, value: bytes) -> Slice:
        """Raises FormatError on a wrong length."""
        extent_id, skew, length = _fields(cls.STRUCT, value)
        return cls(offset, length, extent_id, skew)


_STORED_MAX = EXTENT_SIZE_MAX + SEAL_OVERHEAD


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of file bytes stored as one checked unit. Lengths are in bytes. `key_id` is the
    inode that wrote it, whose key it is encrypted under, if `cipher` says that it is."""

    extent_id: int
    address: int
    stored: int
    size: int
    codec: int
    item_size: int
    checksum: int
    cipher: int = 0
    key_id: int = 0

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<QIIBBBxQQ")

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            self.address, self.stored, self.size, self.codec, self.item_size, self.cipher,
            self.key_id, self.checksum,
        )  # fmt: skip

    @classmethod
    def unpack(cls, extent_id: int, value: bytes) -> Extent:
        """Raises FormatError on a wrong length, and for sizes and places that cannot be."""
        address, stored, size, codec, item_size, cipher, key_id, check = _fields(cls.STRUCT, value)
        if address % BLOCK or not 0 < size <= EXTENT_SIZE_MAX or not 0 < stored <= _STORED_MAX:
            raise FormatError("an extent that cannot be")
        return cls(extent_id, address, stored, size, codec, item_size, check, cipher, key_id)

    @property
    def is_raw(self) -> bool:
        """Whether its stored bytes are those of the file."""
        return not self.codec and not self.cipher

    @property
    def blocks_end(self) -> int:
        """The address after its last block."""
        return self.address + round_up(self.stored)


REFERENCES = struct.Struct("<I")


def unpack_references(value: bytes) -> int:
    """Raises FormatError on a wrong length."""
    count: int = _fields(REFERENCES, value)[0]
    return count


@dataclass(frozen=True, slots=True)
class Counts:
    """Inodes that there are, and directories that were ever made."""

    inodes: int = 0
    directories_made: int = 0

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<QQ")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.inodes, self.directories_made)

    @classmethod
    def unpack(cls, value: bytes) -> Counts:
        """Raises FormatError on a wrong length, and for more than there can be."""
        counts = cls(*_fields(cls.STRUCT, value))
        if counts.directories_made // DIRECTORIES_PER_GROUP > GROUP_MAX:
            raise FormatError("more directories than there can be")
        return counts


def pack_items(items: list[Item]) -> bytes:
    """Key, length, value; a tombstone has the length 2^32 - 1 and no value."""
    parts = []
    for key, value in items:
        parts.append(_ITEM_HEAD.pack(key, _TOMBSTONE if value is None else len(value)))
        if value:
            parts.append(value)
    return b"".join(parts)


def unpack_items(data: bytes) -> list[Item]:
    """Raises FormatError when the bytes do not end with an item's end."""
    items: list[Item] = []
    at, end = 0, len(data)
    while at < end:
        if at + _ITEM_HEAD.size > end:
            raise FormatError("an item is cut")
        key, length = _ITEM_HEAD.unpack_from(data, at)
        at += _ITEM_HEAD.size
        if length == _TOMBSTONE:
            items.append((key, None))
            continue
        if at + length > end:
            raise FormatError("an item's value is cut")
        items.append((key, data[at : at + length]))
        at += length
    return items


ITEM_OVERHEAD = _ITEM_HEAD.size


@dataclass(frozen=True, slots=True)
class Unit:
    """What reclaim removes at once: a session (a directory) or a file of a pool. When it
    was last used, what it takes on the device in bytes, and how long it lives unused, in
    seconds (0: no limit). A directory that became a pool is kept here as one."""

    used_ns: int = 0
    stored: int = 0
    ttl_s: int = 0
    is_pool: bool = False

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<QQQ?")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.used_ns, self.stored, self.ttl_s, self.is_pool)

    @classmethod
    def unpack(cls, value: bytes) -> Unit:
        """Raises FormatError on a wrong length."""
        return cls(*_fields(cls.STRUCT, value))


# -- the key table of an encrypted ring -------------------------------------------


# The key of an inode, how many live extents are encrypted under it, and whether the inode is
# still there. A part of the table is an array of these, by inode.
KEY_ENTRY = np.dtype(
    [("ino", "<u8"), ("extents", "<u4"), ("has_inode", "u1"), ("secret", f"V{SECRET_SIZE}")]
)


def unpack_key_entries(data: bytes) -> npt.NDArray[np.void]:
    """Raises FormatError when they are cut or not in order."""
    if len(data) % KEY_ENTRY.itemsize:
        raise FormatError("a part of the key table is cut")
    entries = np.frombuffer(data, KEY_ENTRY).copy()
    if np.any(entries["ino"][:-1] >= entries["ino"][1:]):
        raise FormatError("a part of the key table is not in order")
    return entries


class KeyPart(NamedTuple):
    """A part of the key table: where it lies, twice, and the key that it is under."""

    places: tuple[Pointer, Pointer]
    secret: bytes


_KEY_PART = struct.Struct(f"<{_POINTER.size}s{_POINTER.size}s{SECRET_SIZE}s")


KEY_PART_SIZE = _KEY_PART.size


def pack_key_parts(parts: list[KeyPart]) -> bytes:
    return b"".join(
        _KEY_PART.pack(*(place.pack() for place in part.places), part.secret) for part in parts
    )


def unpack_key_parts(data: bytes) -> list[KeyPart]:
    """Raises FormatError on a wrong length."""
    if len(data) % _KEY_PART.size:
        raise FormatError("the root of the key table is cut")
    return [
        KeyPart((Pointer.unpack(first), Pointer.unpack(second)), secret)
        for first, second, secret in _KEY_PART.iter_unpack(data)
    ]


# -- checkpoints: nodes of B-trees, the bitmap of live blocks, and what points to them


class TreeNode:
    """A node of a B-tree, searched as it lies: keys of one size, ends of values, values.

    A leaf (level 0) holds items; above it, a value is the Pointer of a child and its key
    the lowest key below that child.
    """

    __slots__ = ("_data", "_ends", "_values_at", "count", "level")

    HEAD: ClassVar[struct.Struct] = struct.Struct("<B3xI")

    def __init__(self, data: bytes) -> None:
        """Raises FormatError when the bytes are no node."""
        self.level, self.count = _fields(self.HEAD, data, rest=True)
        self._data = data
        ends_at = self.HEAD.size + self.count * KEY.size
        self._values_at = ends_at + 4 * self.count
        if len(data) < self._values_at:
            raise FormatError("a node of the index is cut")
        self._ends = memoryview(data)[ends_at : self._values_at].cast("I")
        if self.level and not self.count:
            raise FormatError("a node of the index is empty")
        if self.count and self._values_at + self._ends[-1] != len(data):
            raise FormatError("a node of the index is cut")

    @classmethod
    def pack(cls, level: int, items: list[tuple[bytes, bytes]]) -> bytes:
        ends = accumulate(len(value) for _, value in items)
        return b"".join(
            (
                cls.HEAD.pack(level, len(items)),
                *(key for key, _ in items),
                struct.pack(f"<{len(items)}I", *ends),
                *(value for _, value in items),
            )
        )

    def key(self, number: int) -> bytes:
        at = self.HEAD.size + number * KEY.size
        return self._data[at : at + KEY.size]

    def value(self, number: int) -> bytes:
        start = self._ends[number - 1] if number else 0
        return self._data[self._values_at + start : self._values_at + self._ends[number]]

    def items(self) -> list[tuple[bytes, bytes]]:
        return [(self.key(number), self.value(number)) for number in range(self.count)]

    def __len__(self) -> int:
        return len(self._data)


NODE_ITEM_OVERHEAD = KEY.size + 4


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The index as it was at one moment: two roots, what the nodes below take on the
    device in bytes, and the bitmap in parts of BITMAP_PART of the ring each."""

    names: Pointer = NOWHERE
    extents: Pointer = NOWHERE
    node_bytes: int = 0
    bitmap: tuple[Pointer, ...] = ()

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<28s28sQI")

    def pack(self) -> bytes:
        head = self.STRUCT.pack(
            self.names.pack(), self.extents.pack(), self.node_bytes, len(self.bitmap)
        )
        return head + b"".join(pointer.pack() for pointer in self.bitmap)

    @classmethod
    def unpack(cls, data: bytes) -> Checkpoint:
        """Raises FormatError on a wrong length."""
        names, extents, node_bytes, count = _fields(cls.STRUCT, data, rest=True)
        size = _POINTER.size
        if len(data) != cls.STRUCT.size + count * size:
            raise FormatError("a checkpoint is cut")
        starts = range(cls.STRUCT.size, len(data), size)
        bitmap = tuple(Pointer.unpack(data[start : start + size]) for start in starts)
        return cls(Pointer.unpack(names), Pointer.unpack(extents), node_bytes, bitmap)


BITMAP_PART = 1024 * 1024 * 1024


# -- the operation log in tmpfs -----------------------------------------------


@dataclass(frozen=True, slots=True)
class OplogChunkHeader:
    """The first bytes of a chunk file. `first` is the sequence of its first record."""

    uuid: bytes
    token: bytes
    first: int

    MAGIC: ClassVar[bytes] = b"KVFSOPL1"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<8s16s16sQ")
    SIZE: ClassVar[int] = STRUCT.size + 8

    def pack(self) -> bytes:
        return _summed(self.STRUCT.pack(self.MAGIC, self.uuid, self.token, self.first))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> OplogChunkHeader:
        """Raises FormatError."""
        magic, *fields = _unsummed(cls.STRUCT, data, "no operation log chunk")
        if magic != cls.MAGIC:
            raise FormatError("no operation log chunk")
        return cls(*fields)


class OplogData(IntEnum):
    """Where the data of a record lies."""

    HERE = 0
    WARM = 1  # at OPLOG_REFERENCE, which stands behind the operation


# Length of the operation, of the padding behind it, of the data; where that is; sequence. Then
# a checksum over these fields, the operation and the data's checksum. Long data is block-aligned,
# so that direct I/O can take it from where it lies.
OPLOG_RECORD = struct.Struct("<IIIIQ")
OPLOG_REFERENCE = struct.Struct("<QQQ")  # serial of a warm file, offset in it, checksum
OPLOG_ALIGNED_MIN = 64 * 1024
OPLOG_RECORD_SIZE = OPLOG_RECORD.size + 8
OPLOG_ALIGN = 64


# -- warm files in tmpfs --------------------------------------------------------
#
#     | header, layout | table | segment | segment | table | segment | ...
#
# The header never changes while operations need what is in the file. The layout, and each
# entry of a table, may be torn by the end of the process: what they say is then forgotten.


@dataclass(frozen=True, slots=True)
class KvmapHeader:
    """The first bytes of a `.kvmap` file: whose data it holds. `unit` is the inode of a
    session, 0 for files of pools; a `serial` names one file under a token."""

    uuid: bytes
    token: bytes
    serial: int
    unit: int
    created_ns: int

    MAGIC: ClassVar[bytes] = b"KVFSMAP1"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<8s16s16sQQQ")
    SIZE: ClassVar[int] = STRUCT.size + 8

    def pack(self) -> bytes:
        return _summed(
            self.STRUCT.pack(
                self.MAGIC, self.uuid, self.token, self.serial, self.unit, self.created_ns
            )
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> KvmapHeader:
        """Raises FormatError."""
        magic, *fields = _unsummed(cls.STRUCT, data, "no warm file")
        if magic != cls.MAGIC:
            raise FormatError("no warm file")
        return cls(*fields)


KVMAP_LAYOUT_AT = 128
KVMAP_TABLES_MAX = 400
KVMAP_DATA_START = 64 * 1024
KVMAP_SEGMENT_ALIGN = 64 * 1024


@dataclass(frozen=True, slots=True)
class KvmapLayout:
    """What of a warm file grows: how many tokens it holds of its longest layer, and where
    its tables are."""

    tokens: int = 0
    tables: tuple[int, ...] = (BLOCK,)

    STRUCT: ClassVar[struct.Struct] = struct.Struct(f"<QI{KVMAP_TABLES_MAX}Q")
    SIZE: ClassVar[int] = STRUCT.size + 8

    def pack(self) -> bytes:
        unused = (0,) * (KVMAP_TABLES_MAX - len(self.tables))
        return _summed(self.STRUCT.pack(self.tokens, len(self.tables), *self.tables, *unused))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> KvmapLayout:
        """Raises FormatError."""
        tokens, count, *tables = _unsummed(cls.STRUCT, data, "the layout of a warm file is torn")
        if not 1 <= count <= KVMAP_TABLES_MAX:
            raise FormatError("the layout of a warm file has no tables")
        return cls(tokens, tuple(tables[:count]))


class KvmapEntry(NamedTuple):
    """A piece of an extent of the ring, decoded, that lies at `start` of the file. `offset` is
    that of the piece in its file, `checksum` the extent's own, `digest` that of the piece."""

    ino: int
    extent_id: int
    offset: int
    start: int
    size: int
    checksum: int
    digest: int

    def pack(self) -> bytes:
        return _summed(_KVMAP_ENTRY.pack(*self))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> KvmapEntry:
        """Raises FormatError; also for what is no entry yet."""
        return cls(*_unsummed(_KVMAP_ENTRY, data, "no entry"))


_KVMAP_ENTRY = struct.Struct("<QQQQQQQ")
KVMAP_ENTRY_SIZE = _KVMAP_ENTRY.size + 8


def _summed(body: bytes) -> bytes:
    return body + checksum(body).to_bytes(8, "little")


def _unsummed(layout: struct.Struct, data: bytes | memoryview, fault: str) -> Any:
    body = bytes(data[: layout.size])
    stored = int.from_bytes(data[layout.size : layout.size + 8], "little")
    if len(body) < layout.size or checksum(body) != stored:
        raise FormatError(fault)
    return layout.unpack(body)

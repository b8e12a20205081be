"""What is fuzzed: each parser of bytes from outside, with bytes that are right, and how to make
the checksums of wrong ones right again."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random as randomness
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import msgpack
import numpy as np
import typer

from kvfs.engine import btree, codec, metadata, ops
from kvfs.engine.ciphers import seal, unseal
from kvfs.engine.codec import Codec, Layout
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    _POINTER,
    BLOCK,
    DATA_START,
    KEY,
    KEY_ENTRY,
    KVMAP_DATA_START,
    KVMAP_LAYOUT_AT,
    OPLOG_ALIGN,
    OPLOG_RECORD,
    OPLOG_RECORD_SIZE,
    OPLOG_REFERENCE,
    SECRET_SIZE,
    SUPERBLOCK_ADDRESSES,
    Checkpoint,
    Cipher,
    Counts,
    Dentry,
    Extent,
    FormatError,
    FrameHeader,
    Inode,
    ItemKind,
    KeyPart,
    KvmapEntry,
    KvmapHeader,
    KvmapLayout,
    OplogChunkHeader,
    OplogData,
    Pointer,
    Position,
    RecordHeader,
    Slice,
    Superblock,
    TreeNode,
    Unit,
    Xattr,
    checksum,
    pack_items,
    pack_key_parts,
    round_up,
    unpack_items,
    unpack_key_entries,
    unpack_key_parts,
)
from kvfs.engine.io import InlineExecutor
from kvfs.engine.ring import Geometry, Ring, read_frame, read_header
from kvfs.engine.superblocks import read_superblocks
from kvfs.mount import control, protocol
from kvfs.mount.protocol import Opcode
from kvfs.tiers import hints, oplog, profiles
from kvfs.tiers.kvmap import Kvmap
from kvfs.tiers.oplog import _Chunk, _records
from kvfs.tiers.warm import WarmTier
from mount_tools import mount_helper, stat
from mount_tools.common import CommandError, parse_size, printable
from mount_tools.options import parse_options
from mount_tools.traces import read_trace
from tests.fuzz import moved, rings
from tests.fuzz.filesystem import Asked, request
from tests.fuzz.mutation import mutated
from tests.fuzz.rings import MIB, Forger
from tests.support.devices import MemoryDevice

Data = bytes | bytearray


@dataclass(frozen=True)
class Target:
    """`run` raises what it must not, and nothing else. `seal` puts checksums right. `share` is
    how many of a million executions it gets."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    run: Callable[[bytes], None]
    share: int = 25_000
    seal: Callable[[bytes], bytes] = field(default=lambda data: data)
    seconds_max: float = 20.0

    def make(self, random: randomness.Random) -> bytes:
        """Bytes to be tried."""
        seeds = _seeds_of(self.seeds)
        data = mutated(random, random.choice(seeds), seeds)
        return self.seal(data) if random.randrange(8) else data


@cache
def _seeds_of(make: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
    return make()


def parses(parse: Callable[[bytes], object], *errors: type[Exception]) -> Callable[[bytes], None]:
    """It gives a value, or one of the errors."""

    def run(data: bytes) -> None:
        with contextlib.suppress(*errors):
            parse(data)

    return run


def sealed(size: int, at: int = 0) -> Callable[[bytes], bytes]:
    """A checksum lies behind so many bytes."""

    def seal(data: bytes) -> bytes:
        body = data[at : at + size]
        if len(body) < size:
            return data
        end = at + size
        return data[:end] + checksum(body).to_bytes(8, "little") + data[end + 8 :]

    return seal


@cache
def scratch() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="kvfs-fuzz-", dir="/dev/shm"))
    import atexit

    atexit.register(shutil.rmtree, directory, True)
    return directory


# -- stored structures ------------------------------------------------------------


@cache
def forger() -> Forger:
    return Forger(randomness.Random(0))


def _superblock() -> list[bytes]:
    image = rings.base()
    return [image[at : at + BLOCK] for at in SUPERBLOCK_ADDRESSES]


@cache
def _frames() -> list[bytes]:
    """Whole frames from the ring."""
    image, found = rings.base(), []
    for at in range(DATA_START, len(image), BLOCK):
        if image[at : at + 8] == FrameHeader.MAGIC:
            with contextlib.suppress(FormatError):
                header = FrameHeader.unpack(image[at : at + FrameHeader.SIZE])
                found.append(image[at : at + header.frame_length])
    return sorted(found, key=len)[:200]


def _values(kind: ItemKind) -> Callable[[], list[bytes]]:
    return lambda: [value for key, value in forger().items() if key[9] == kind][:200]


def _records_of_frames() -> list[bytes]:
    return [
        frame[FrameHeader.SIZE : FrameHeader.SIZE + RecordHeader.SIZE]
        for frame in _frames()
        if FrameHeader.unpack(frame[: FrameHeader.SIZE]).record_count
    ]


@cache
def _nodes() -> list[bytes]:
    checkpoint, found = forger().checkpoint(), []
    for pointer in (checkpoint.names, checkpoint.extents):
        node = forger().node(pointer)
        found.append(TreeNode.pack(node.level, node.items()))
        if node.level:
            child = forger().node(Pointer.unpack(node.value(0)))
            found.append(TreeNode.pack(child.level, child.items()))
    return found


def _use_node(data: bytes) -> None:
    node = TreeNode(data)
    node.items()
    for key in (bytes(KEY.size), b"\x01" * KEY.size, b"\xff" * KEY.size):
        if node.count:
            btree._lower(node, key)
            node.value(btree._child(node, key))


def _checkpoints() -> list[bytes]:
    return [forger().checkpoint().pack()]


def _seal_frame(data: bytes) -> bytes:
    """Payloads, table, header: in that order."""
    frame = bytearray(data)
    if len(frame) < FrameHeader.SIZE:
        return data
    fields = list(FrameHeader.STRUCT.unpack_from(frame))
    count, item_bytes = fields[10], fields[11]
    for number in range(min(count, 100)):
        at = FrameHeader.SIZE + number * RecordHeader.SIZE
        if at + RecordHeader.SIZE > len(frame):
            break
        record = RecordHeader.unpack_from(frame, at)
        record.checksum = checksum(bytes(frame[record.payload : record.payload + record.stored]))
        frame[at : at + RecordHeader.SIZE] = record.pack()
    end = FrameHeader.SIZE + count * RecordHeader.SIZE + item_bytes
    fields[14] = checksum(bytes(frame[FrameHeader.SIZE : end]))
    body = FrameHeader.STRUCT.pack(*fields)
    frame[: FrameHeader.SIZE] = body + checksum(body).to_bytes(8, "little")
    return bytes(frame)


@cache
def _small_ring() -> Ring:
    superblock = forger().superblock
    return Ring(Geometry(MIB, 1), superblock.uuid, superblock.epoch, superblock.replay)


def _frame_seeds() -> list[bytes]:
    """As if each were the first of its segment."""
    return [_moved(frame) for frame in _frames() if len(frame) <= 64 * 1024]


def _moved(frame: bytes) -> bytes:
    fields = list(FrameHeader.STRUCT.unpack_from(frame))
    fields[7] = DATA_START
    return _seal_frame(FrameHeader.STRUCT.pack(*fields) + frame[FrameHeader.STRUCT.size :])


def _read_frame(data: bytes) -> None:
    image = bytearray(DATA_START) + data.ljust(128 * 1024, b"\0")
    device = MemoryDevice(image)
    header = read_header(_small_ring(), device, 0, 0)
    read_frame(device, header)
    read_frame(device, header, is_durable=True)


def _read_superblocks(data: bytes) -> None:
    slots = dict(zip(SUPERBLOCK_ADDRESSES, (data[:BLOCK], data[BLOCK:]), strict=True))
    for start in read_superblocks(Slots(slots), "ring").starting_points():
        geometry = Geometry(start.segment_size, start.segment_count)
        Ring(geometry, start.uuid, start.epoch, start.replay)


@dataclass
class Slots(MemoryDevice):
    """Two blocks of a device of 13 MiB."""

    def __init__(self, slots: dict[int, bytes]) -> None:
        self.slots = slots
        self.read_only = True

    @property
    def size(self) -> int:
        return 13 * MIB

    def read(self, address: int, buffers: Sequence[memoryview]) -> None:
        (buffer,) = buffers
        buffer[:] = self.slots[address][:BLOCK].ljust(BLOCK, b"\0")


def _seal_superblocks(data: bytes) -> bytes:
    seal = sealed(BLOCK - 8)
    return seal(data[:BLOCK]) + seal(data[BLOCK:])


# -- codecs and metadata --------------------------------------------------------


@cache
def _encoded() -> list[bytes]:
    """Codec, element size, length, then what is stored."""
    found = []
    data = memoryview((np.arange(20_000, dtype=np.uint16) // 5).tobytes())
    for chosen in Codec:
        for items in (1, 2, 4):
            stored = codec.encode(chosen, Layout(items, 64), data) or bytes(data)
            found.append(struct.pack("<BBI", chosen, items, len(data)) + stored)
    return found


def _decode(data: bytes) -> None:
    if len(data) < 6:
        return
    chosen, items, size = struct.unpack_from("<BBI", data)
    codec.decode(chosen, items, memoryview(data)[6:], memoryview(bytearray(size % (2 * MIB))))


def _metadata() -> list[bytes]:
    found = []
    for body in (*_nodes(), *_checkpoints()):
        encoded = metadata.encode(rings.RecordKind.NODE, body)
        record = encoded.record
        pointer = Pointer(DATA_START, record.stored, record.size, record.codec, record.checksum)
        found.append(pointer.pack() + bytes(encoded.stored))
    return found


def _read_metadata(data: bytes) -> None:
    pointer = Pointer.unpack(data[:28])
    image = bytearray(DATA_START) + data[28:].ljust(64 * 1024, b"\0")
    metadata.read(MemoryDevice(image), pointer)


def _seal_metadata(data: bytes) -> bytes:
    if len(data) < 28:
        return data
    pointer = Pointer(*_POINTER.unpack(data[:28]))
    return pointer._replace(checksum=checksum(data[28 : 28 + pointer.stored])).pack() + data[28:]


# -- warm memory ---------------------------------------------------------------


def _key_entries() -> list[bytes]:
    entries = np.zeros(20, KEY_ENTRY)
    entries["ino"], entries["extents"] = np.arange(5, 25), 3
    return [entries.tobytes(), b""]


def _key_parts() -> list[bytes]:
    place = Pointer(DATA_START, 4096, 4096, 0, 5)
    return [pack_key_parts([KeyPart((place, place), b"s" * SECRET_SIZE)] * 4)]


_SECRET = b"k" * SECRET_SIZE


def _sealed() -> list[bytes]:
    """The cipher, then what is sealed."""
    ciphers = (Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305)
    return [bytes([cipher]) + seal(cipher, _SECRET, b"plain" * 20, b"of") for cipher in ciphers]


def _unseal(data: bytes) -> None:
    cipher = Cipher(1 + data[0] % 2) if data else Cipher.AES_256_GCM
    unseal(cipher, _SECRET, data[1:], b"of")


_OPERATIONS: tuple[ops.Operation, ...] = (
    ops.Create(1, 1, b"n", 99, 0o100644, 0, 0, 0, b"t"), ops.Link(1, 5, 1, b"n"),
    ops.Unlink(1, 1, b"n"), ops.Rmdir(1, 1, b"n"), ops.Rename(1, 1, b"a", 1, b"b"),
    ops.SetAttributes(1, 5, 0o600, None, 7, 100, 1, 2), ops.Write(1, 5, 4096, 100),
    ops.SetXattr(1, 5, b"user.a", b"v"), ops.RemoveXattr(1, 5, b"user.a"), ops.Drop(1, [5, 6]),
    ops.Fork(1, 5, b"n", 9, 3, 4, 5), ops.Reclaim(1, 1, b"n", 5, 1, b"{}", 0, 3),
)  # fmt: skip


def _operations() -> list[bytes]:
    packed = [ops.pack(operation) for operation in _OPERATIONS]
    deep = b"\x91" * 600 + b"\x01"
    return [*packed, deep, msgpack.packb([7, 1, "text", 2.5, None])]


def _chunk() -> list[bytes]:
    """The records of a chunk, behind its header."""
    found = b""
    for sequence, operation in enumerate(_OPERATIONS, 1):
        packed = ops.pack(operation)
        found += _record(sequence, packed, b"data" * 20)
        found = found.ljust(round_up(len(found), OPLOG_ALIGN), b"\0")
    reference = OPLOG_REFERENCE.pack(1, 65536, checksum(b"abc"))
    lengths = OPLOG_RECORD.pack(5, 0, 3, OplogData.WARM, 1)
    body = b"12345" + reference
    digest = checksum(b"abc").to_bytes(8, "little")
    warm = lengths + checksum(lengths + body + digest).to_bytes(8, "little") + body
    return [found, warm]


def _record(sequence: int, operation: bytes, data: bytes) -> bytes:
    lengths = OPLOG_RECORD.pack(len(operation), 0, len(data), OplogData.HERE, sequence)
    check = checksum(lengths + operation + checksum(data).to_bytes(8, "little"))
    return lengths + check.to_bytes(8, "little") + operation + data


def _seal_chunk(data: bytes) -> bytes:
    """Of each record as far as the lengths lead to the next."""
    chunk, at = bytearray(data), 0
    while at + OPLOG_RECORD_SIZE <= len(chunk):
        lengths = bytes(chunk[at : at + OPLOG_RECORD.size])
        size, padding, length, lies, _ = OPLOG_RECORD.unpack(lengths)
        start = at + OPLOG_RECORD_SIZE
        if lies == OplogData.WARM:
            body = bytes(chunk[start : start + size + OPLOG_REFERENCE.size])
            digest, end = body[-8:], start + size + OPLOG_REFERENCE.size
        else:
            body = bytes(chunk[start : start + size])
            end = start + size + padding + length
            digest = checksum(bytes(chunk[start + size + padding : end])).to_bytes(8, "little")
        if end > len(chunk):
            break
        check = checksum(lengths + body + digest).to_bytes(8, "little")
        chunk[at + OPLOG_RECORD.size : start] = check
        at = round_up(end, OPLOG_ALIGN)
    return bytes(chunk)


def _read_chunk(data: bytes) -> None:
    kept = oplog.Kept(memoryview(b"abc"), 0, 3, None)
    chunk = _Chunk(Path("chunk"), memoryview(bytearray(data)), end=0)
    for record in _records(chunk, 1, 0, lambda reference, sequence: kept):
        len(record.kept.data)


_UUID, _TOKEN = b"u" * 16, b"t" * 16


def _warm_file() -> list[bytes]:
    header = KvmapHeader(_UUID, _TOKEN, 3, 17, 1)
    entries = [
        KvmapEntry(20, 30 + n, n * 4096, KVMAP_DATA_START, 4096, 1, 2).pack() for n in range(4)
    ]
    first = header.pack().ljust(KVMAP_LAYOUT_AT, b"\0") + KvmapLayout(7).pack()
    second = header.pack().ljust(KVMAP_LAYOUT_AT, b"\0")
    second += KvmapLayout(7, (4096, KVMAP_DATA_START)).pack()
    return [head.ljust(4096, b"\0") + b"".join(entries) for head in (first, second)]


def _seal_warm_file(data: bytes) -> bytes:
    for at, size in (
        (0, KvmapHeader.STRUCT.size),
        (KVMAP_LAYOUT_AT, KvmapLayout.STRUCT.size),
        *((4096 + n * 64, 56) for n in range(4)),
    ):
        data = sealed(size, at)(data)
    return data


def _load_warm_file(data: bytes) -> None:
    path = scratch() / "file.kvmap"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(max(len(data), KVMAP_DATA_START + 64 * 1024))
    kvmap = Kvmap.load(path, _UUID, _TOKEN)
    for entry in kvmap.entries():
        assert kvmap.at(entry.start, entry.size) is not None


def _open_warm_tier(data: bytes) -> None:
    """As the next daemon does, which finds that file."""
    directory = scratch() / "tier"
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "7").mkdir(parents=True)
    (directory / "7" / "a.kvmap").write_bytes(data.ljust(KVMAP_DATA_START + 64 * 1024, b"\0"))
    tier = WarmTier(directory, 64 * MIB, InlineExecutor())
    list(tier.open(_UUID, _TOKEN, 0))
    for number in range(30, 34):
        tier.find(Extent(number, DATA_START, 4096, 4096, 0, 1, 1), is_use=True)
    tier.close(keep=False)


# -- requests and settings ------------------------------------------------------


@cache
def asked() -> Asked:
    logging.getLogger("kvfs.mount.session").setLevel(logging.CRITICAL)
    return Asked(scratch())


def _name(name: bytes) -> bytes:
    return name + b"\0"


def _two(first: int, second: int) -> bytes:
    return struct.pack("=II", first, second)


@cache
def _requests() -> list[bytes]:
    number = struct.pack("=Q", 1)
    bodies: dict[Opcode, bytes] = {
        Opcode.LOOKUP: _name(b"session"), Opcode.FORGET: number, Opcode.GETATTR: bytes(16),
        Opcode.SETATTR: struct.pack("=IxxxxQQQqqqIIIIxxxxIIxxxx", 1, *range(12)),
        Opcode.READLINK: b"", Opcode.SYMLINK: b"new\0target\0",
        Opcode.MKNOD: struct.pack("=IIIxxxx", 0o100644, 0, 0) + _name(b"f"),
        Opcode.MKDIR: _two(0o755, 0) + _name(b"d"), Opcode.UNLINK: _name(b"f"),
        Opcode.RMDIR: _name(b"d"), Opcode.RENAME: number + b"a\0b\0",
        Opcode.LINK: number + _name(b"l"), Opcode.OPEN: _two(0, 0),
        Opcode.READ: struct.pack("=QQIIQIxxxx", 1, 0, 4096, 0, 0, 0),
        Opcode.WRITE: struct.pack("=QQIIQIxxxx", 1, 0, 4, 0, 0, 0) + b"data",
        Opcode.STATFS: b"", Opcode.RELEASE: struct.pack("=QIIQ", 1, 0, 0, 0),
        Opcode.FSYNC: struct.pack("=QIxxxx", 1, 0),
        Opcode.SETXATTR: _two(1, 0) + b"user.a\0" + b"v",
        Opcode.GETXATTR: _two(0, 0) + _name(b"user.kvfs.tier"), Opcode.LISTXATTR: _two(0, 0),
        Opcode.REMOVEXATTR: _name(b"user.a"), Opcode.INIT: struct.pack("=IIII", 7, 31, 65536, 1),
        Opcode.OPENDIR: _two(0, 0), Opcode.READDIR: struct.pack("=QQIIQIxxxx", 1, 0, 4096, 0, 0, 0),
        Opcode.RELEASEDIR: struct.pack("=QIIQ", 1, 0, 0, 0),
        Opcode.FSYNCDIR: struct.pack("=QIxxxx", 1, 0),
        Opcode.CREATE: struct.pack("=IIII", 1, 0o644, 0, 0) + _name(b"f"),
        Opcode.INTERRUPT: number, Opcode.BATCH_FORGET: _two(1, 0) + 2 * number,
        Opcode.READDIRPLUS: struct.pack("=QQIIQIxxxx", 1, 0, 4096, 0, 0, 0),
        Opcode.RENAME2: struct.pack("=QIxxxx", 1, 0) + b"a\0b\0",
    }  # fmt: skip
    return [
        request(opcode, inode, body) for opcode, body in bodies.items() for inode in asked().inodes
    ]


def _seal_request(data: bytes) -> bytes:
    """The kernel says how long a request is, and it is."""
    head = data[: protocol.REQUEST.size].ljust(protocol.REQUEST.size, b"\0")
    _, opcode, unique, inode, uid, gid, pid, _ = protocol.REQUEST.unpack(head)
    data = data[protocol.REQUEST.size :]
    return (
        protocol.REQUEST.pack(
            protocol.REQUEST.size + len(data), opcode, unique, inode, uid, gid, pid, 0
        )
        + data
    )


def _ask(data: bytes) -> None:
    asked().ask(_seal_request(data))


_NAMES = (
    b"codec", b"dtype", b"shape", b"model", b"unit", b"pin", b"ttl", b"device_id", b"fork",
    b"prefetch", b"demote", b"hint", b"map", b"tier", b"heat", b"extents", b"extents.0",
    b"extents.99", b"x",
)  # fmt: skip
_SETTINGS = (
    b"auto", b"planes", b"bfloat16", b"2,2,64", b"session", b"1", b"86400", b"a name",
    b"tool_done", b"turn_expected=5", b'hot_stats={"bytes": 1, "hits": 2}', b"",
)  # fmt: skip


@cache
def _set_requests() -> list[bytes]:
    """An inode, a name, and a value."""
    return [
        bytes([place]) + b"user.kvfs." + name + b"\0" + value
        for place in range(len(asked().inodes))
        for name in _NAMES
        for value in _SETTINGS
    ]


def _set_and_get(data: bytes) -> None:
    """The kernel passes on names that are not empty, up to 255 bytes, and values up to 64 KiB."""
    place, (name, _, value) = data[:1], data[1:].partition(b"\0")
    if not place or not 0 < len(name) < 256:
        return
    inode = asked().inodes[place[0] % len(asked().inodes)]
    body = _two(len(value), 0) + name + b"\0" + value
    answer = asked().ask(request(Opcode.SETXATTR, inode, body))
    assert answer is not None
    assert error_of(answer) != errno_eio(), (name, value)
    for size in (0, 65536):
        got = asked().ask(request(Opcode.GETXATTR, inode, _two(size, 0) + name + b"\0"))
        assert got is not None and error_of(got) != errno_eio(), (name, value)
    opened = asked().ask(request(Opcode.OPEN, asked().inodes[8], _two(0, 0)))
    assert opened is not None and not error_of(opened), (name, value)
    (handle,) = struct.unpack_from("=Q", opened, protocol.ANSWER.size)
    release = struct.pack("=QIIQ", handle, 0, 0, 0)
    asked().ask(request(Opcode.RELEASE, asked().inodes[8], release))


def error_of(answer: bytes) -> int:
    error: int = protocol.ANSWER.unpack_from(answer)[1]
    return -error


def errno_eio() -> int:
    import errno

    return errno.EIO


# -- text ------------------------------------------------------------------------


def _texts(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _settable(data: bytes) -> None:
    name, _, value = data.partition(b"=")
    control.check_settable(control.PREFIX + name, value)
    codec.layout_of(value, value)


def _mount_helper(data: bytes) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        mount_helper.app(
            ["-f", f"-o{os.fsdecode(data)}", "--", "/dev/x", "/mnt"], standalone_mode=False
        )


def _session_json() -> list[bytes]:
    return [
        b'{"version": 1, "rounds": [10, 15], "layers": [{"shape": [2, 2, 16], "dtype": "float32"}],'
        b' "fingerprint": {"model": "m", "type": "llama", "layers": 8, "kv_heads": 2,'
        b' "head_dim": 16, "dtype": "float32", "rope": {}, "weights": "w", "layout": "NHD",'
        b' "ranks": 1, "rank": 0}}',
        b"[" * 5000, b'{"version": 1, "rounds": 5, "fingerprint": [1]}', b'{"version": 1e999}',
    ]  # fmt: skip


def _shown(data: bytes) -> None:
    description = stat.parse_description(data)
    if description is not None:
        for name, value in stat.described(description):
            assert printable(value).isprintable() and name


def _layer(data: bytes) -> None:
    """Element type and shape as a user may have set them."""
    dtype, _, shape_text = os.fsdecode(data).partition("=")
    shape = stat._parse_shape(shape_text)
    stat._row_bytes(dtype, shape)
    path = scratch() / "layer"
    if not path.exists():
        path.write_bytes(os.urandom(4096))
    stat._first_values(path, dtype, shape)


def _trace(data: bytes) -> None:
    path = scratch() / "trace"
    path.write_bytes(data)
    read_trace(path, 1.0)


_TRACES = (
    '{"timestamp": 0, "hash_ids": [1, 2, 3]}\n{"timestamp": 1000, "hash_ids": [1, 2, 4]}\n',
    "session,stream,t_s,api_s,in_tok,prefix_match_tok,stop\n"
    "a,m,0,1,2000,0,tool_use\na,m,5,1,2500,2000,end_turn\n",
)


def _whole_ring(run: Callable[[bytearray], None]) -> Callable[[bytes], None]:
    return lambda seed: run(rings.forged(seed))


def _open_and_use(image: bytearray) -> None:
    directory = scratch() / "ring"
    shutil.rmtree(directory, ignore_errors=True)
    rings.open_and_use(image, lambda executor: WarmTier(directory, 64 * MIB, executor, boot="fuzz"))


class OfSeeds(Target):
    """What is tried follows from random bytes as a whole."""

    def make(self, random: randomness.Random) -> bytes:
        return random.randbytes(8)


_S = FormatError
TARGETS: tuple[Target, ...] = (
    Target("superblock", _superblock, parses(Superblock.unpack, _S), seal=sealed(BLOCK - 8)),
    Target("position", lambda: [bytes(32)], parses(Position.unpack, _S)),
    Target("pointer", lambda: [bytes(28)], parses(Pointer.unpack, _S)),
    Target(
        "frame header", lambda: [frame[: FrameHeader.SIZE] for frame in _frames()],
        parses(FrameHeader.unpack, _S), seal=sealed(FrameHeader.STRUCT.size),
    ),
    Target(
        "record header", _records_of_frames,
        parses(lambda data: RecordHeader.unpack_from(data, 0), _S),
    ),
    Target("items", lambda: [pack_items(list(forger().items()[:20]))], parses(unpack_items, _S)),
    Target("inode", _values(ItemKind.INODE), parses(partial(Inode.unpack, 5), _S)),
    Target("dentry", _values(ItemKind.DENTRY), parses(Dentry.unpack, _S)),
    Target("xattr", _values(ItemKind.XATTR), parses(Xattr.unpack, _S)),
    Target("slice", _values(ItemKind.MAP), parses(partial(Slice.unpack, 5), _S)),
    Target("extent", _values(ItemKind.EXTENT), parses(partial(Extent.unpack, 5), _S)),
    Target("counts", _values(ItemKind.COUNTS), parses(Counts.unpack, _S)),
    Target("unit", _values(ItemKind.UNIT), parses(Unit.unpack, _S)),
    Target("node", _nodes, parses(_use_node, _S)),
    Target("checkpoint", _checkpoints, parses(Checkpoint.unpack, _S)),
    Target("key entries", _key_entries, parses(unpack_key_entries, _S)),
    Target("key parts", _key_parts, parses(unpack_key_parts, _S)),
    Target("sealed", _sealed, parses(_unseal, _S)),
    Target("codec", _encoded, parses(_decode, _S)),
    Target("metadata", _metadata, parses(_read_metadata, _S, OSError), seal=_seal_metadata),
    Target("frame", _frame_seeds, parses(_read_frame, _S, OSError), seal=_seal_frame),
    Target(
        "superblocks", lambda: [b"".join(_superblock())],
        parses(_read_superblocks, DeviceError), 10_000, seal=_seal_superblocks,
    ),
    Target(
        "log chunk header", lambda: [OplogChunkHeader(_UUID, _TOKEN, 1).pack()],
        parses(OplogChunkHeader.unpack, _S), seal=sealed(OplogChunkHeader.STRUCT.size),
    ),
    Target("log records", _chunk, parses(_read_chunk), seal=_seal_chunk),
    Target("operation", _operations, parses(ops.unpack, ValueError)),
    Target(
        "warm header", lambda: [KvmapHeader(_UUID, _TOKEN, 3, 17, 1).pack()],
        parses(KvmapHeader.unpack, _S), seal=sealed(KvmapHeader.STRUCT.size),
    ),
    Target(
        "warm layout", lambda: [KvmapLayout(7).pack()],
        parses(KvmapLayout.unpack, _S), seal=sealed(KvmapLayout.STRUCT.size),
    ),
    Target(
        "warm entry", lambda: [KvmapEntry(1, 2, 3, 4, 5, 6, 7).pack()],
        parses(KvmapEntry.unpack, _S), seal=sealed(56),
    ),
    Target("warm file", _warm_file, parses(_load_warm_file, _S), 15_000, seal=_seal_warm_file),
    Target("warm tier", _warm_file, parses(_open_warm_tier), 3_000, seal=_seal_warm_file),
    Target("request", _requests, _ask, 60_000, seal=_seal_request),
    Target("attribute", _set_requests, _set_and_get, 20_000),
    Target(
        "setting", lambda: [n + b"=" + v for n in _NAMES for v in _SETTINGS],
        parses(_settable, OSError),
    ),
    Target("hint", lambda: list(_SETTINGS), parses(hints.parse, ValueError)),
    Target(
        "mount options", _texts("ro,noexec", "allow_other", "suid,dev,async", "rw,,ro"),
        parses(lambda data: parse_options([os.fsdecode(data)]), typer.BadParameter),
    ),
    Target(
        "mount helper", _texts("defaults,warm=8G,checkpoint=5", "x-systemd.a=1,user,noreclaim"),
        parses(_mount_helper, typer.BadParameter.__bases__[0]), 2_000,
    ),
    Target(
        "size", _texts("64M", "1.5GiB", "4096", "9" * 400, "1" * 5000),
        parses(lambda data: parse_size(os.fsdecode(data)), typer.BadParameter),
    ),
    Target(
        "profile", lambda: [profiles.text_of(name).encode() for name in profiles.NAMES],
        parses(lambda data: profiles._parse(os.fsdecode(data), "f"), profiles.ProfileError), 10_000,
    ),
    Target("description", _session_json, _shown),
    Target("layer", _texts("bfloat16=2,2,64", "float32=1000000", "f8,f8=1", "O=1"), _layer),
    Target("trace", _texts(*_TRACES), parses(_trace, CommandError), 5_000),
    Target("stream", moved.streams, moved.read_as_stream, 20_000, seal=moved.seal_stream),
    Target("archive", moved.archives, moved.read_as_archive, 20_000, seal=moved.seal_archive),
    Target("tensors", moved.headers, moved.read_as_header, 20_000, seal=moved.seal_header),
    OfSeeds("ring, used", list, _whole_ring(_open_and_use), 500, seconds_max=60),
    OfSeeds("ring, checked", list, _whole_ring(rings.check_and_repair), 500, seconds_max=60),
)  # fmt: skip

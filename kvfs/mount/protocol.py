"""The kernel's side of FUSE: requests as they are read from /dev/fuse, and the answers to them.

The structures are those of include/uapi/linux/fuse.h, in the kernel's byte order; the version
spoken is 7.31 (Linux 5.4), what is newer is used only where the kernel offers it by a flag.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import reduce
from operator import or_
from struct import Struct
from typing import Any

MAJOR, MINOR = 7, 31
REQUEST_SIZE_MAX = 1024 * 1024  # of data, in one request: 256 pages, the kernel's limit
_PAGE = 4096
# Reads ahead and parts of large requests with O_DIRECT that the kernel has under way at once.
_BACKGROUND_MAX, _CONGESTED_AT = 512, 384

REQUEST = Struct("=IIQQIIIHxx")  # length, opcode, unique, inode, uid, gid, pid, extensions
ANSWER = Struct("=IiQ")  # length, -errno, unique
_WRITE = Struct("=QQIIQIxxxx")  # handle, offset, size, flags, lock owner, flags of the file
# In front of the data of a WRITE, which so begins at a page of a buffer of its own.
HEAD_SIZE = REQUEST.size + _WRITE.size

_INIT = Struct("=IIII")  # major, minor, read-ahead, flags
_FLAGS2 = Struct("=I")  # behind it, with INIT_EXT: the flags from bit 32 on
# major, minor, read-ahead, flags, background, congestion, write size, time step in ns, pages,
# alignment, flags2
_INIT_ANSWER = Struct("=IIIIHHIIHHI28x")
# inode, size, blocks, atime, mtime, ctime, their ns, mode, links, uid, gid, device, block size
_ATTRIBUTES = Struct("=QQQqqqIIIIIIIIIxxxx")
_ENTRY = Struct("=QQQQII")  # inode, generation, seconds for the name and attributes, their ns
_ATTRIBUTES_VALID = Struct("=QII")  # seconds, ns, unused
# valid, handle, size, lock owner, atime, mtime, ctime, their ns, mode, uid, gid
_SETATTR = Struct("=IxxxxQQQqqqIIIIxxxxIIxxxx")
_OPENED = Struct("=QIxxxx")  # handle, flags
_WRITTEN = Struct("=Ixxxx")
_STATFS = Struct("=QQQQQIIIxxxx24x")
_DIRENT = Struct("=QQII")  # inode, cookie, length of the name, type

_TWO = Struct("=II")
_NUMBER = Struct("=Q")
_READ = Struct("=QQI")
_HANDLE_AND_FLAGS = Struct("=QI")
_CREATE = Struct("=IIII")  # flags, mode, umask, flags of FUSE
_MKNOD = Struct("=IIIxxxx")  # mode, device, umask
_RENAME2 = Struct("=QIxxxx")  # new directory, flags
_FORGOTTEN = Struct("=QQ")  # inode, count

_INODE_CHANGED = Struct("=Qqq")  # inode, offset, length
_NAME_CHANGED = Struct("=QII")  # directory, length of the name, flags


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


# The kernel waits for no answer to these.
UNANSWERED = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})


class Capability(IntFlag):
    """What KVFS wants to agree on with the kernel (FUSE_* of its INIT)."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    EXPORT_SUPPORT = 1 << 4
    BIG_WRITES = 1 << 5
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36


WANTED = reduce(or_, Capability)


class Opened(IntFlag):
    """How the kernel is to treat an open file (FOPEN_*)."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1


class _Valid(IntFlag):
    """Which fields of a SETATTR count (FATTR_*)."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    KILL_SUIDGID = 1 << 11


# Of a WRITE: it is of pages of the kernel's cache, by whichever handle; bits of the mode go.
WRITE_CACHE, WRITE_KILL_SUIDGID = 1 << 0, 1 << 2
_OPEN_KILL_SUIDGID = 1 << 0
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks, and of which inode: a directory, where the request is about a name in one."""

    inode: int
    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Attributes to be set; None stays as it is. `kills_suid`: the set-user-ID and set-group-ID
    bits go."""

    mode: int | None
    uid: int | None
    gid: int | None
    size: int | None
    atime_ns: int | None
    mtime_ns: int | None
    kills_suid: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """With the kernel, for as long as it is mounted. `read_ahead` in bytes, as the kernel wants
    it."""

    read_ahead: int
    capabilities: Capability


_LOW_FLAGS = 0xFFFF_FFFF
_SECOND_NS = 10**9
_NO_ATTRIBUTES = bytes(_ATTRIBUTES.size)
NOT_LOOKED_UP = bytes(_ENTRY.size + _ATTRIBUTES.size)


# -- what requests say


def agreement(body: bytes) -> Agreement:
    """On what the kernel offers with INIT. Raises OSError EPROTO where it is too old."""
    major, minor, read_ahead, flags = _INIT.unpack_from(body)
    if (major, minor) < (MAJOR, MINOR):
        raise OSError(errno.EPROTO, "Linux 5.4 or newer is needed")
    if flags & Capability.INIT_EXT:
        flags |= _FLAGS2.unpack_from(body, _INIT.size)[0] << _LOW_FLAGS.bit_length()
    return Agreement(read_ahead, Capability(flags & WANTED))


@dataclass(frozen=True, slots=True)
class Operation:
    """The method that handles a request, and how its arguments are read from the body."""

    method: str
    arguments: Callable[[bytes], tuple[Any, ...]]


def _nothing(_body: bytes) -> tuple[()]:
    return ()


def _name(body: bytes) -> tuple[bytes]:
    return (body[:-1],)


def _handle(body: bytes) -> tuple[int]:
    return (_NUMBER.unpack_from(body)[0],)


def _first(body: bytes) -> tuple[int]:
    return (_TWO.unpack_from(body)[0],)


def _read(body: bytes) -> tuple[int, ...]:
    return _READ.unpack_from(body)


def _setattr(body: bytes) -> tuple[Changes]:
    valid, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, uid, gid = (
        _SETATTR.unpack_from(body)
    )

    def chosen(given: _Valid, now: _Valid, seconds: int, ns: int) -> int | None:
        if valid & now:
            return time.time_ns()
        return seconds * _SECOND_NS + ns if valid & given else None

    return (
        Changes(
            mode if valid & _Valid.MODE else None,
            uid if valid & _Valid.UID else None,
            gid if valid & _Valid.GID else None,
            size if valid & _Valid.SIZE else None,
            chosen(_Valid.ATIME, _Valid.ATIME_NOW, atime, atime_ns),
            chosen(_Valid.MTIME, _Valid.MTIME_NOW, mtime, mtime_ns),
            bool(valid & _Valid.KILL_SUIDGID),
        ),
    )


def _symlink(body: bytes) -> tuple[bytes, ...]:
    name, target, _ = body.split(b"\0")
    return name, target


def _mknod(body: bytes) -> tuple[bytes, int, int]:
    mode, device, _ = _MKNOD.unpack_from(body)
    return body[_MKNOD.size : -1], mode, device


def _mkdir(body: bytes) -> tuple[bytes, int]:
    return body[_TWO.size : -1], _TWO.unpack_from(body)[0]


def _open(body: bytes) -> tuple[int, bool]:
    flags, of_fuse = _TWO.unpack_from(body)
    return flags, bool(of_fuse & _OPEN_KILL_SUIDGID)


def _create(body: bytes) -> tuple[bytes, int, int]:
    flags, mode, _, _ = _CREATE.unpack_from(body)
    return body[_CREATE.size : -1], mode, flags


def _rename(body: bytes) -> tuple[bytes, int, bytes, int]:
    old, new, _ = body[_NUMBER.size :].split(b"\0")
    return old, _NUMBER.unpack_from(body)[0], new, 0


def _rename2(body: bytes) -> tuple[bytes, int, bytes, int]:
    directory, flags = _RENAME2.unpack_from(body)
    old, new, _ = body[_RENAME2.size :].split(b"\0")
    return old, directory, new, flags


def _link(body: bytes) -> tuple[int, bytes]:
    return _NUMBER.unpack_from(body)[0], body[_NUMBER.size : -1]


def _setxattr(body: bytes) -> tuple[bytes, bytes, int]:
    size, flags = _TWO.unpack_from(body)
    name, value = body[_TWO.size :].split(b"\0", 1)
    return name, value[:size], flags


def _getxattr(body: bytes) -> tuple[bytes, int]:
    return body[_TWO.size : -1], _TWO.unpack_from(body)[0]


def _batch_forget(body: bytes) -> tuple[list[tuple[int, int]]]:
    count, _ = _TWO.unpack_from(body)
    end = _TWO.size + count * _FORGOTTEN.size
    return (list(_FORGOTTEN.iter_unpack(body[_TWO.size : end])),)


OPERATIONS = {
    Opcode.LOOKUP: Operation("lookup", _name),
    Opcode.FORGET: Operation("forget", _handle),
    Opcode.GETATTR: Operation("getattr", _nothing),
    Opcode.SETATTR: Operation("setattr", _setattr),
    Opcode.READLINK: Operation("readlink", _nothing),
    Opcode.SYMLINK: Operation("symlink", _symlink),
    Opcode.MKNOD: Operation("mknod", _mknod),
    Opcode.MKDIR: Operation("mkdir", _mkdir),
    Opcode.UNLINK: Operation("unlink", _name),
    Opcode.RMDIR: Operation("rmdir", _name),
    Opcode.RENAME: Operation("rename", _rename),
    Opcode.LINK: Operation("link", _link),
    Opcode.OPEN: Operation("open", _open),
    Opcode.READ: Operation("read", _read),
    Opcode.STATFS: Operation("statfs", _nothing),
    Opcode.RELEASE: Operation("release", _handle),
    Opcode.FSYNC: Operation("fsync", _handle),
    Opcode.SETXATTR: Operation("setxattr", _setxattr),
    Opcode.GETXATTR: Operation("getxattr", _getxattr),
    Opcode.LISTXATTR: Operation("listxattr", _first),
    Opcode.REMOVEXATTR: Operation("removexattr", _name),
    Opcode.OPENDIR: Operation("opendir", _nothing),
    Opcode.RELEASEDIR: Operation("releasedir", _handle),
    Opcode.FSYNCDIR: Operation("fsyncdir", _nothing),
    Opcode.CREATE: Operation("create", _create),
    Opcode.BATCH_FORGET: Operation("batch_forget", _batch_forget),
    Opcode.READDIR: Operation("readdir", _read),
    Opcode.READDIRPLUS: Operation("readdirplus", _read),
    Opcode.RENAME2: Operation("rename", _rename2),
}


def write_arguments(head: memoryview) -> tuple[int, int, int, int]:
    """Handle, offset, size and flags (WRITE_*) of a WRITE, from the head in front of its data."""
    handle, offset, size, flags, _, _ = _WRITE.unpack_from(head, REQUEST.size)
    return handle, offset, size, flags


# -- answers


def init_answer(agreed: Agreement) -> bytes:
    return _INIT_ANSWER.pack(
        MAJOR, MINOR, agreed.read_ahead, agreed.capabilities & _LOW_FLAGS, _BACKGROUND_MAX,
        _CONGESTED_AT, REQUEST_SIZE_MAX, 1, REQUEST_SIZE_MAX // _PAGE, 0,
        agreed.capabilities >> _LOW_FLAGS.bit_length(),
    )  # fmt: skip


def attributes(
    ino: int,
    mode: int,
    links: int,
    uid: int,
    gid: int,
    device: int,
    size: int,
    blocks_512: int,
    block_size: int,
    atime_ns: int,
    mtime_ns: int,
    ctime_ns: int,
) -> bytes:
    """A struct fuse_attr."""
    atime, atime_rest = divmod(atime_ns, _SECOND_NS)
    mtime, mtime_rest = divmod(mtime_ns, _SECOND_NS)
    ctime, ctime_rest = divmod(ctime_ns, _SECOND_NS)
    return _ATTRIBUTES.pack(
        ino, size, blocks_512, atime, mtime, ctime, atime_rest, mtime_rest, ctime_rest,
        mode, links, uid, gid, device, block_size,
    )  # fmt: skip


def attributes_answer(packed: bytes, valid_seconds: int) -> bytes:
    return _ATTRIBUTES_VALID.pack(valid_seconds, 0, 0) + packed


def entry(ino: int, packed: bytes, name_seconds: int, attributes_seconds: int) -> bytes:
    """A name was found or made; the kernel counts one more use of its inode."""
    return _ENTRY.pack(ino, 0, name_seconds, attributes_seconds, 0, 0) + packed


def no_entry(seconds: int) -> bytes:
    """There is no such name, which the kernel may remember for so long."""
    return _ENTRY.pack(0, 0, seconds, 0, 0, 0) + _NO_ATTRIBUTES


def directory_entry(ino: int, name: bytes, mode: int, cookie: int, found: bytes) -> bytes:
    """A name in a listing. `found`: what a lookup of it would have answered, for READDIRPLUS;
    NOT_LOOKED_UP for a name that the kernel shall look up itself; empty for READDIR."""
    length = len(name)
    return b"".join(
        (found, _DIRENT.pack(ino, cookie, length, mode >> 12), name, bytes(-length % 8))
    )


def opened(handle: int, flags: Opened) -> bytes:
    return _OPENED.pack(handle, flags)


def written(size: int) -> bytes:
    return _WRITTEN.pack(size)


def statfs(
    block_size: int, blocks: int, free: int, available: int, files: int, files_free: int,
    name_length_max: int,
) -> bytes:  # fmt: skip
    return _STATFS.pack(
        blocks, free, available, files, files_free, block_size, name_length_max, block_size
    )


def sized(value: bytes, size_max: int) -> bytes:
    """An xattr or a list of them: its size where that is what is asked for. Raises ERANGE."""
    if size_max == 0:
        return _TWO.pack(len(value), 0)
    if len(value) > size_max:
        raise OSError(errno.ERANGE, "more than there is room for")
    return value


# -- notices, which the kernel has not asked for


def inode_changed(ino: int, *, attributes_only: bool) -> bytes:
    """Ask again for its attributes, and for its pages too."""
    return _notice(2, _INODE_CHANGED.pack(ino, -1 if attributes_only else 0, 0))


def name_changed(directory: int, name: bytes) -> bytes:
    return _notice(3, _NAME_CHANGED.pack(directory, len(name), 0) + name + b"\0")


def _notice(code: int, body: bytes) -> bytes:
    return ANSWER.pack(ANSWER.size + len(body), code, 0) + body

"""Operations: what a user's request asks of the store, complete enough to be done again.

Ids and times are part of an operation, so that doing it twice on the same state
gives the same result: the operation log is replayed after a crash of the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import ClassVar

import msgpack


@dataclass(frozen=True, slots=True)
class Operation:
    """`time_ns`: when it happened, in ns since the epoch."""

    CODE: ClassVar[int]
    time_ns: int


@dataclass(frozen=True, slots=True)
class Create(Operation):
    """A file, directory, symlink (`target`) or special file (`rdev`), as `mode` says."""

    CODE: ClassVar[int] = 1
    parent: int
    name: bytes
    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int = 0
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class Link(Operation):
    CODE: ClassVar[int] = 2
    ino: int
    parent: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Unlink(Operation):
    """Remove a name that is not a directory's."""

    CODE: ClassVar[int] = 3
    parent: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Rmdir(Operation):
    CODE: ClassVar[int] = 4
    parent: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Rename(Operation):
    """`exchange` swaps two names; otherwise the target is replaced if `replace`."""

    CODE: ClassVar[int] = 5
    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    replace: bool = True
    exchange: bool = False


@dataclass(frozen=True, slots=True)
class SetAttributes(Operation):
    """None leaves an attribute as it is. Times are ns since the epoch, size is bytes."""

    CODE: ClassVar[int] = 6
    ino: int
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Write(Operation):
    """The data follows the operation in the log."""

    CODE: ClassVar[int] = 7
    ino: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SetXattr(Operation):
    CODE: ClassVar[int] = 8
    ino: int
    name: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class RemoveXattr(Operation):
    CODE: ClassVar[int] = 9
    ino: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Drop(Operation):
    """Free inodes without a name, once nobody holds them."""

    CODE: ClassVar[int] = 10
    inos: list[int]


@dataclass(frozen=True, slots=True)
class Fork(Operation):
    """A copy of a directory tree beside it. `serials` are handed out from `serial` on, one
    an inode; `items` and `item_bytes` tell what it costs."""

    CODE: ClassVar[int] = 11
    ino: int
    name: bytes
    serial: int
    serials: int
    items: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Reclaim(Operation):
    """Remove a unit as a whole: a directory with all below it, or a file. `number` and
    `entry` are its line in the log of what was reclaimed, `forgotten` the last number that
    goes from there; `items` tells what it costs."""

    CODE: ClassVar[int] = 12
    parent: int
    name: bytes
    ino: int
    number: int
    entry: bytes
    forgotten: int
    items: int


_TYPES: dict[int, type[Operation]] = {
    type_.CODE: type_
    for type_ in (
        Create, Link, Unlink, Rmdir, Rename, SetAttributes, Write, SetXattr, RemoveXattr, Drop,
        Fork, Reclaim,
    )
}  # fmt: skip
_VALUES = {
    type_: attrgetter("CODE", *(field.name for field in fields(type_))) for type_ in _TYPES.values()
}
_PACKER = msgpack.Packer(use_bin_type=True)


def pack(operation: Operation) -> bytes:
    packed: bytes = _PACKER.pack(_VALUES[type(operation)](operation))
    return packed


def unpack(data: bytes) -> Operation:
    """Raises ValueError (or a subclass) when the bytes are no operation."""
    try:
        code, *values = msgpack.unpackb(data, raw=False)
        if code not in _TYPES:
            raise ValueError(f"operation {code} is unknown to this release")
        return _TYPES[code](*values)
    except TypeError as fault:
        raise ValueError(f"no operation: {fault}") from None

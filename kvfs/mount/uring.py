"""Reads of the device without a thread each: io_uring, by its system calls.

A read by a thread costs two changes of threads, 60 to 80 us of the 110 that a small one takes;
here it is one call, and its end is an event of the loop. The structures are those of
include/uapi/linux/io_uring.h.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct

log = logging.getLogger(__name__)

_SETUP, _ENTER = 425, 426  # numbers of system calls, the same on all machines
_MAP_SQES = 0x10000000
_MMAP_READ_WRITE, _MMAP_SHARED_POPULATE = 1 | 2, 1 | 0x8000
_READV, _READ = 1, 22
# opcode, flags, priority, fd, offset, address, length, flags of the call, user data, rest
_SQE = Struct("=BBHiQQIIQ24x")
_CQE = Struct("=QiI")  # user data, result, flags
_IOVEC_MAX = 1024
_ENTRIES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip


class _SubmissionOffsets(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("head", "tail", "mask", "entries", "flags", "dropped", "array", "unused")
    ] + [("address", ctypes.c_uint64)]


class _CompletionOffsets(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("head", "tail", "mask", "entries", "overflow", "cqes", "flags", "unused")
    ] + [("address", ctypes.c_uint64)]


class _Parameters(ctypes.Structure):
    _fields_ = [
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread_cpu", ctypes.c_uint32),
        ("sq_thread_idle", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 3),
        ("sq", _SubmissionOffsets),
        ("cq", _CompletionOffsets),
    ]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """What must not be given up before the kernel is done with it."""

    buffers: Sequence[memoryview]
    iovecs: object
    done: Callable[[int], None]


class Ring:
    """Reads under way, at most as many as `has_room` allows. `fd` is readable when some are done;
    `finish` then tells who waits. Used by one thread."""

    def __init__(self) -> None:
        """Raises OSError where the kernel has it not, or not for us."""
        parameters = _Parameters()
        self.fd = _call(_SETUP, _ENTRIES, ctypes.byref(parameters))
        sq, cq = parameters.sq, parameters.cq
        size = max(
            sq.array + 4 * parameters.sq_entries, cq.cqes + _CQE.size * parameters.cq_entries
        )
        self._memory = _map(self.fd, size, 0)
        self._sqes = _map(self.fd, (_SQE.size) * parameters.sq_entries, _MAP_SQES)
        self._words = self._memory.cast("I")
        self._sq_tail, self._sq_mask = sq.tail // 4, self._words[sq.mask // 4]
        self._cq_head, self._cq_tail = cq.head // 4, cq.tail // 4
        self._cq_mask, self._cqes = self._words[cq.mask // 4], cq.cqes
        for entry in range(parameters.sq_entries):
            self._words[sq.array // 4 + entry] = entry
        self._under_way: dict[int, _UnderWay] = {}
        self._next = 0

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    @property
    def has_room(self) -> bool:
        return len(self._under_way) < _ENTRIES

    def read(
        self, fd: int, offset: int, buffers: Sequence[memoryview], done: Callable[[int], None]
    ) -> None:
        """Fill the buffers from `offset` on; `done` is told the bytes that were read, or -errno.
        Raises OSError when it cannot be begun."""
        assert self.has_room and len(buffers) <= _IOVEC_MAX
        code, address, length, iovecs = _target(buffers)
        tail = self._words[self._sq_tail]
        self._next += 1
        _SQE.pack_into(
            self._sqes, (tail & self._sq_mask) * _SQE.size,
            code, 0, 0, fd, offset, address, length, 0, self._next,
        )  # fmt: skip
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF
        self._under_way[self._next] = _UnderWay(buffers, iovecs, done)
        try:
            _call(_ENTER, self.fd, 1, 0, 0, None, 0)
        except OSError:
            self._words[self._sq_tail] = tail
            del self._under_way[self._next]
            raise

    def finish(self) -> None:
        head = self._words[self._cq_head]
        while head != self._words[self._cq_tail]:
            place = self._cqes + (head & self._cq_mask) * _CQE.size
            number, result, _ = _CQE.unpack_from(self._memory, place)
            head = (head + 1) & 0xFFFFFFFF
            self._words[self._cq_head] = head
            self._under_way.pop(number).done(result)


def open_ring() -> Ring | None:
    """None where there is none: threads do it then. Elsewhere than on x86, which keeps memory
    in order by itself, Python has no means to."""
    if platform.machine() != "x86_64":
        return None
    try:
        return Ring()
    except OSError as failure:
        log.info("no io_uring: %s; threads read the device", os.strerror(failure.errno or 0))
        return None


def _target(buffers: Sequence[memoryview]) -> tuple[int, int, int, object]:
    """Opcode, address, length, and what has to be kept."""
    if len(buffers) == 1:
        return _READ, _address(buffers[0]), len(buffers[0]), None
    iovecs = (ctypes.c_uint64 * (2 * len(buffers)))()
    for number, buffer in enumerate(buffers):
        iovecs[2 * number : 2 * number + 2] = [_address(buffer), len(buffer)]
    return _READV, ctypes.addressof(iovecs), len(buffers), iovecs


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _map(fd: int, size: int, offset: int) -> memoryview:
    address = _libc.mmap(None, size, _MMAP_READ_WRITE, _MMAP_SHARED_POPULATE, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code or errno.ENOMEM, "the ring cannot be mapped")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")

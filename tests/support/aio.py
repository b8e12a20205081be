"""Linux's asynchronous I/O, which Python does not offer."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct

# io_setup, io_submit, io_getevents, io_destroy
_NUMBERS = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1)}
MACHINE_IS_KNOWN = platform.machine() in _NUMBERS
_PWRITE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Writer:
    """Writes one buffer at a time, from its beginning, to the beginning of a file."""

    def __init__(self) -> None:
        self._setup, self._submit, self._events, self._destroy = _NUMBERS[platform.machine()]
        self._context = ctypes.c_ulong(0)
        _checked(_libc.syscall(self._setup, 1, ctypes.byref(self._context)))

    def write(self, fd: int, buffer: mmap.mmap) -> None:
        """All of it, from its submission to its completion."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        length = len(buffer)
        block = ctypes.create_string_buffer(
            struct.pack("<QIiHhIQQqQII", 0, 0, 0, _PWRITE, 0, fd, address, length, 0, 0, 0, 0)
        )
        blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        _checked(_libc.syscall(self._submit, self._context, 1, blocks))
        event = ctypes.create_string_buffer(32)
        _checked(_libc.syscall(self._events, self._context, 1, 1, event, None))
        (result,) = struct.unpack_from("<q", event.raw, 16)
        assert result == length, result

    def close(self) -> None:
        _checked(_libc.syscall(self._destroy, self._context))


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

"""Bytes that come from a file or a pipe, of which the first were looked at already."""

from __future__ import annotations

from mount_tools.moving.bytes import read_upto
from mount_tools.moving.entries import RefusedError

HEAD = 512


class Source:
    """`count` bytes were read so far."""

    def __init__(self, fd: int) -> None:
        head = bytearray(HEAD)
        self.head = bytes(head[: read_upto(fd, memoryview(head))])
        """The first bytes; they will be read again."""
        self.allowed: int | None = None
        """How much may still be read. Then RefusedError: nobody needs more for a header."""
        self._fd = fd
        self._left = memoryview(self.head)

    def fill(self, buffer: memoryview) -> int:
        """How far the buffer was filled: less than all only at the end."""
        if self.allowed is not None:
            self.allowed -= len(buffer)
            if self.allowed < 0:
                raise RefusedError("a header that is longer than any session needs")
        known = min(len(buffer), len(self._left))
        buffer[:known] = self._left[:known]
        self._left = self._left[known:]
        return known + read_upto(self._fd, buffer[known:])

    def read(self, size: int) -> bytes:
        """Fewer bytes only at the end."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.fill(memoryview(buffer))])

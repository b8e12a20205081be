"""Requests of the kernel, read from /dev/fuse and answered there.

A request is a step of the filesystem's. What is in memory is answered before the next request
is read; a step that waits goes on in the loop. Nothing that a handler raises ends the daemon:
it becomes an errno.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import Any

from kvfs.engine.buffers import BufferPool
from kvfs.engine.io import DeadlineExceeded
from kvfs.mount import protocol
from kvfs.mount.attach import Connection, detach
from kvfs.mount.executor import start
from kvfs.mount.protocol import ANSWER, HEAD_SIZE, OPERATIONS, REQUEST, Call, Opcode

log = logging.getLogger(__name__)

# Those that wait for a device that does not answer must not keep out those that need none.
_IN_FLIGHT_MAX = 1000
_IDLE_BUFFERS_MAX = 8
# Nobody waits any longer for the answer; a signal; nothing there.
_HARMLESS = (errno.ENOENT, errno.EINTR, errno.EAGAIN)


class Session:
    """Serves one mount. `deadline_seconds`: a request that waits for longer is answered with
    ETIMEDOUT. `in_flight`: how many wait; more than a thousand are not taken at once."""

    def __init__(
        self,
        connection: Connection,
        filesystem: Any,
        loop: asyncio.AbstractEventLoop,
        deadline_seconds: float,
    ) -> None:
        self._connection = connection
        self._fd = connection.fd
        self.loop = loop
        self._deadline_seconds = deadline_seconds
        self._handlers: dict[int, tuple[Any, Callable[[bytes], tuple[Any, ...]]]] = {
            opcode: (getattr(filesystem, operation.method), operation.arguments)
            for opcode, operation in OPERATIONS.items()
            if hasattr(filesystem, operation.method)
        }
        self._write = filesystem.write
        self._agreed = getattr(filesystem, "agreed", lambda capabilities: None)
        self._head = memoryview(bytearray(HEAD_SIZE))
        self._pool = BufferPool(protocol.REQUEST_SIZE_MAX, _IDLE_BUFFERS_MAX)
        self._data = self._pool.take()
        self.in_flight = 0
        self._is_mounted = True
        self._is_stopping = False
        self._ended: asyncio.Future[None] = loop.create_future()

    # -- from mount to unmount

    async def serve(self) -> None:
        """Until unmounted or stopped; then what is under way is answered."""
        self.loop.add_reader(self._fd, self._receive)
        try:
            await self._ended
        finally:
            self.loop.remove_reader(self._fd)

    def close(self) -> None:
        """Unmount."""
        detach(self._connection, is_mounted=self._is_mounted)

    def stop(self, error: BaseException | None = None) -> None:
        """Read no more requests; `serve` raises the error, or returns."""
        self._is_stopping = True
        self.loop.remove_reader(self._fd)
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)
        self._end_if_idle()

    def notify(self, notice: bytes) -> None:
        """Tell the kernel something, from a thread of its own: it may wait for a lock that a
        request of ours holds. Raises OSError: ENOENT for what the kernel does not know."""
        os.write(self._fd, notice)

    def _end_if_idle(self) -> None:
        if self._is_stopping and not self.in_flight and not self._ended.done():
            self._ended.set_result(None)

    # -- a request

    def _receive(self) -> None:
        try:
            size = os.readv(self._fd, (self._head, self._data))
        except OSError as failure:
            if failure.errno == errno.ENODEV:
                self._is_mounted = False
                self.stop()
            elif failure.errno not in _HARMLESS:
                self.stop(failure)
            return
        _, opcode, unique, inode, uid, gid, pid, extensions = REQUEST.unpack_from(self._head)
        call = Call(inode, uid, gid, pid)
        try:
            if opcode == Opcode.WRITE:
                self._receive_write(unique, call)
            else:
                self._dispatch(opcode, unique, call, self._body(size - 8 * extensions))
        except Exception as failure:
            if opcode in protocol.UNANSWERED:
                _not_answered("a request", None, failure)
            else:
                self._answer(unique, "a request", None, failure)

    def _body(self, size: int) -> bytes:
        if size <= HEAD_SIZE:
            return bytes(self._head[REQUEST.size : size])
        return bytes(self._head[REQUEST.size :]) + bytes(self._data[: size - HEAD_SIZE])

    def _dispatch(self, opcode: int, unique: int, call: Call, body: bytes) -> None:
        found = self._handlers.get(opcode)
        if found is None:
            self._refuse(opcode, unique, body)
            return
        handler, arguments = found
        result = handler(call, *arguments(body))
        if not isinstance(result, GeneratorType):
            self._answer(unique, handler.__name__, result, None)
            return
        if opcode in protocol.UNANSWERED:
            start(self.loop, result, None, partial(_not_answered, handler.__name__))
            return
        self._begin()
        ended = partial(self._end, unique, handler.__name__)
        start(self.loop, result, self._deadline_seconds, ended)

    def _refuse(self, opcode: int, unique: int, body: bytes) -> None:
        if opcode == Opcode.INIT:
            agreement = protocol.agreement(body)
            self._agreed(agreement.capabilities)
            self._answer(unique, "init", protocol.init_answer(agreement), None)
        elif opcode not in protocol.UNANSWERED:
            # The kernel then does without, and mostly asks no more.
            self._send(unique, -errno.ENOSYS, b"")

    def _receive_write(self, unique: int, call: Call) -> None:
        handle, offset, size, flags = protocol.write_arguments(self._head)
        buffer = self._data
        step = self._write(call, handle, offset, buffer[:size], flags)
        self._begin()
        waits = self.in_flight
        start(self.loop, step, self._deadline_seconds, partial(self._end_write, unique, buffer))
        if self.in_flight >= waits:
            # It is still under way, and its data is in that buffer.
            self._data = self._pool.take()

    def _end_write(
        self, unique: int, buffer: memoryview, value: Any, error: Exception | None
    ) -> None:
        if buffer is not self._data:
            self._pool.give(buffer)
        self._end(unique, "write", value, error)

    # -- its answer

    def _begin(self) -> None:
        self.in_flight += 1
        if self.in_flight == _IN_FLIGHT_MAX:
            self.loop.remove_reader(self._fd)

    def _end(self, unique: int, name: str, value: Any, error: Exception | None) -> None:
        self._answer(unique, name, value, error)
        self.in_flight -= 1
        if self._is_stopping:
            self._end_if_idle()
        elif self.in_flight == _IN_FLIGHT_MAX - 1:
            self.loop.add_reader(self._fd, self._receive)

    def _answer(self, unique: int, name: str, value: Any, error: Exception | None) -> None:
        if error is None:
            try:
                self._send(unique, 0, b"" if value is None else value)
                return
            except Exception as fault:  # ours: it is no answer
                error = fault
        self._send(unique, -errno_of(name, error), b"")

    def _send(self, unique: int, error: int, payload: bytes | memoryview) -> None:
        try:
            os.writev(self._fd, (ANSWER.pack(ANSWER.size + len(payload), error, unique), payload))
        except OSError as failure:
            if failure.errno not in (*_HARMLESS, errno.ENODEV):
                log.error("an answer cannot be given: %s", failure)


def errno_of(name: str, failure: Exception) -> int:
    """What the kernel is told of a failure of a request; what is no OSError is logged."""
    match failure:
        case OSError():
            return failure.errno or errno.EIO
        case DeadlineExceeded():
            log.error("%s: no answer from the device within the deadline", name)
            return errno.ETIMEDOUT
    log.error("%s failed", name, exc_info=failure)
    return errno.EIO


def _not_answered(name: str, _value: Any, error: Exception | None) -> None:
    if error is not None:
        log.error("%s failed", name, exc_info=error)

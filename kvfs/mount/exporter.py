"""Serves the metrics over HTTP, from a thread with a loop of its own.

The mount's loop only says its figures, at most once a second whoever asks; the text is made
here, and a client that is slow, hostile or one of many waits here. No more are accepted than
are served, and who comes while all places are taken gets that of the oldest: a scraper is done
within milliseconds, so what holds a place for longer is something else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from ipaddress import ip_address

from kvfs.engine.device import DeviceError
from kvfs.mount.config import MetricsAddress

log = logging.getLogger(__name__)

Ask = Callable[[Callable[[], None]], None]
Text = Callable[[], bytes]

_CONNECTIONS_MAX = 16
_BACKLOG = 128
_PACE_SECONDS = 0.01  # between two that are accepted
_DEADLINE_SECONDS = 10.0  # for a request and its answer
_FIGURES_SECONDS = 5.0
_FRESH_SECONDS = 1.0
_JOIN_SECONDS = 1.0
_REQUEST_MAX = 8192
_END = b"\r\n\r\n"


def listen(where: MetricsAddress) -> socket.socket:
    """Raises DeviceError."""
    family = socket.AF_INET6 if ip_address(where.address).version == 6 else socket.AF_INET
    address = (where.address, where.port)
    try:
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as failure:
        why = os.strerror(failure.errno or 0)
        raise DeviceError(
            f"metrics cannot be served on {where.address} port {where.port} ({why}): choose "
            f"another --metrics-port or --metrics-address"
        ) from None
    listener.setblocking(False)
    return listener


@contextmanager
def exporting(listener: socket.socket | None, ask: Ask, take: Callable[[], Text]) -> Iterator[None]:
    """`ask` has something called in the mount's loop, where `take` takes the figures; what it
    returns makes the text of them. Without a listener nothing is served."""
    if listener is None:
        yield
        return
    exporter = _Exporter(listener, ask, take)
    try:
        yield
    finally:
        exporter.close()


class _Exporter:
    def __init__(self, listener: socket.socket, ask: Ask, take: Callable[[], Text]) -> None:
        self._listener = listener
        self._ask = ask
        self._take = take
        self._text = b""
        self._fresh_until = 0.0
        self._serving: dict[asyncio.Task[None], None] = {}
        self._making = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())
        # It ends with the process, if it should not end before.
        self._thread = threading.Thread(target=self._run, name="kvfs-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        self._loop.close()

    # -- clients

    async def _accept(self) -> None:
        try:
            while True:
                await self._accept_one()
                await asyncio.sleep(_PACE_SECONDS)
        finally:
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept_one(self) -> None:
        try:
            connection, _ = await self._loop.sock_accept(self._listener)
        except OSError as failure:  # it has gone again, or descriptors are short
            log.warning("a client of the metrics is not accepted: %s", failure.strerror)
            await asyncio.sleep(_FRESH_SECONDS)
            return
        if len(self._serving) >= _CONNECTIONS_MAX:
            oldest = next(iter(self._serving))
            del self._serving[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(connection))
        self._serving[task] = None
        task.add_done_callback(lambda task: self._serving.pop(task, None))

    async def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, asyncio.TimeoutError):
            try:
                await asyncio.wait_for(self._answer(connection), _DEADLINE_SECONDS)
            except (OSError, asyncio.TimeoutError):
                raise
            except Exception:
                log.exception("the metrics cannot be served")

    async def _answer(self, connection: socket.socket) -> None:
        method, path = await self._request(connection)
        if method not in (b"GET", b"HEAD"):
            status, text = "405 Method Not Allowed", b"only GET\n"
        elif path.partition(b"?")[0] != b"/metrics":
            status, text = "404 Not Found", b"the metrics are at /metrics\n"
        else:
            status, text = await self._metrics()
        head = (
            f"HTTP/1.1 {status}\r\n"
            "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(text)}\r\n"
            "Connection: close\r\n\r\n"
        )
        answer = head.encode() + (b"" if method == b"HEAD" else text)
        await self._loop.sock_sendall(connection, answer)

    async def _request(self, connection: socket.socket) -> tuple[bytes, bytes]:
        """Method and path, both empty for what is no request."""
        request = b""
        while _END not in request:
            part = await self._loop.sock_recv(connection, _REQUEST_MAX)
            request += part
            if not part or len(request) > _REQUEST_MAX:
                return b"", b""
        words = request.split(b"\r\n", 1)[0].split(b" ")
        return (words[0], words[1]) if len(words) == 3 else (b"", b"")

    # -- what they are told

    async def _metrics(self) -> tuple[str, bytes]:
        async with self._making:
            if self._loop.time() >= self._fresh_until:
                try:
                    make = await asyncio.wait_for(self._figures(), _FIGURES_SECONDS)
                except asyncio.TimeoutError:
                    return "503 Service Unavailable", b"the mount does not answer\n"
                self._text = make()
                self._fresh_until = self._loop.time() + _FRESH_SECONDS
            return "200 OK", self._text

    def _figures(self) -> asyncio.Future[Text]:
        figures: Future[Text] = Future()

        def take() -> None:
            if figures.set_running_or_notify_cancel():
                try:
                    figures.set_result(self._take())
                except Exception as failure:
                    figures.set_exception(failure)

        self._ask(take)
        return asyncio.wrap_future(figures, loop=self._loop)

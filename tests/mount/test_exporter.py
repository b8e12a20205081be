"""Metrics over HTTP: what is served, to clients of every kind, and that they hold up nobody."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvfs.mount import exporter
from kvfs.mount.config import MetricsAddress
from kvfs.mount.exporter import exporting, listen
from kvfs.mount.mounts import find_mount
from tests.support.command import error_line
from tests.support.mounter import Mounter, kvfs
from tests.support.ports import LOCALHOST, free_port

SECONDS = 30


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOCALHOST, port, timeout=SECONDS)
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read()


def send(port: int, request: bytes) -> bytes:
    """Whatever is answered to that, until the connection is closed."""
    with socket.create_connection((LOCALHOST, port), timeout=SECONDS) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def names(text: bytes) -> set[bytes]:
    lines = text.splitlines()
    return {line.split(b" ")[0].split(b"{")[0] for line in lines if not line.startswith(b"#")}


@pytest.fixture
def served(mounter: Mounter) -> tuple[Mounter, int]:
    """A mount that serves metrics, and the port."""
    port = free_port()
    mounter.mount("--metrics-port", str(port))
    return mounter, port


# -- a mount


def test_the_figures_of_the_file_are_served(served: tuple[Mounter, int]) -> None:
    mounter, port = served
    (mounter.mountpoint / "f").write_bytes(os.urandom(100_000))
    status, text = get(port)
    assert status == 200
    assert names(text) == names((mounter.mountpoint / ".kvfs" / "metrics").read_bytes())
    (operations,) = (line for line in text.splitlines() if line.startswith(b"kvfs_operations_"))
    assert float(operations.split()[1]) > 0


def test_clients_that_do_nothing_hold_up_neither_scrapers_nor_the_unmount(
    served: tuple[Mounter, int],
) -> None:
    mounter, port = served
    with ExitStack() as idle:
        for begun in [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: a\r\n"] * 20:
            client = idle.enter_context(socket.create_connection((LOCALHOST, port), SECONDS))
            client.sendall(begun)
        assert get(port)[0] == 200
        (mounter.mountpoint / "f").write_bytes(b"still here")
        assert (mounter.mountpoint / "f").read_bytes() == b"still here"
        mounter.umount()
    assert mounter.has_ended
    with pytest.raises(ConnectionRefusedError):
        get(port)


def test_a_port_in_use_is_said_in_one_line_and_nothing_is_mounted(mounter: Mounter) -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        port = taken.getsockname()[1]
        result = mounter.mount("--metrics-port", str(port), check=False)
    wanted = f"cannot be served on {LOCALHOST} port {port} (Address already in use): choose another"
    assert wanted in error_line(result)
    assert find_mount(mounter.mountpoint) is None
    mounter.mount("--metrics-port", str(port))
    assert get(port)[0] == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metrics-address", "localhost"), "'localhost' is not an IP address"),
        (("--metrics-port", "0"), "Invalid value for '--metrics-port'"),
        (("--metrics-port", "65536"), "Invalid value for '--metrics-port'"),
    ],
)
def test_what_is_no_address_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_line(kvfs("mount", "/mnt", "x", *arguments, check=False), status=2)


# -- the server


Text = Callable[[], bytes]


@contextmanager
def server(take: Callable[[], Text], ask: exporter.Ask = lambda call: call()) -> Iterator[int]:
    """One with figures of the test's own; its port."""
    port = free_port()
    with listen(MetricsAddress(LOCALHOST, port)) as listener, exporting(listener, ask, take):
        yield port


def test_answers_are_those_of_http() -> None:
    with server(lambda: lambda: b"a 1\n") as port:
        assert get(port) == (200, b"a 1\n")
        assert get(port, "/metrics?x=y") == (200, b"a 1\n")
        assert get(port, method="HEAD") == (200, b"")
        assert get(port, "/") == (404, b"the metrics are at /metrics\n")
        assert get(port, method="POST")[0] == 405
        head, text = send(port, b"GET /metrics HTTP/1.0\r\n\r\n").split(b"\r\n\r\n")
        assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
        assert b"Content-Length: 4" in head and b"Connection: close" in head
        assert text == b"a 1\n"


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"GET\r\n\r\n", b"\0" * 9000, b"GET " * 9000])
def test_what_is_no_request_is_refused(request_: bytes) -> None:
    with server(lambda: lambda: b"a 1\n") as port:
        try:
            answer = send(port, request_)
        except ConnectionError:  # it did not read all of it
            answer = b""
        assert not answer or answer.startswith(b"HTTP/1.1 405 ")
        assert get(port) == (200, b"a 1\n")


def test_an_address_may_be_of_the_sixth_version() -> None:
    try:
        listener = listen(MetricsAddress("::1", free_port()))
    except exporter.DeviceError:
        pytest.skip("there is no ::1 here")
    with listener, exporting(listener, lambda call: call(), lambda: lambda: b"a 1\n"):
        address = listener.getsockname()[:2]
        with socket.create_connection(address, timeout=SECONDS) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_many_scrapers_cost_the_mounts_loop_no_more_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "_FRESH_SECONDS", 3600.0)
    taken: list[int] = []

    def take() -> Text:
        taken.append(threading.get_ident())
        return lambda: b"a %d\n" % len(taken)

    with server(take) as port:
        assert [get(port)[1] for _ in range(9)] == [b"a 1\n"] * 9


def test_figures_come_from_who_is_asked_and_the_text_is_made_elsewhere() -> None:
    """As the mount's loop has to be: it takes figures, and makes no text."""
    asked: list[Callable[[], None]] = []
    made_in: list[int] = []

    def make() -> bytes:
        made_in.append(threading.get_ident())
        return b"a 1\n"

    with server(lambda: make, asked.append) as port:
        client = threading.Thread(target=get, args=(port,))
        client.start()
        deadline = time.monotonic() + SECONDS
        while not asked:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        asked.pop()()
        client.join(SECONDS)
    assert made_in and made_in[0] != threading.get_ident()


def test_a_mount_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_FIGURES_SECONDS", 0.05)
    asked: list[Callable[[], None]] = []
    with server(lambda: lambda: b"a 1\n", asked.append) as port:
        assert get(port) == (503, b"the mount does not answer\n")
        asked.pop()()  # nobody waits for it any more
        assert get(port)[0] == 503


def test_a_fault_of_ours_ends_one_answer_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    faults = [ZeroDivisionError("a fault")]

    def take() -> Text:
        if faults:
            raise faults.pop()
        return lambda: b"a 1\n"

    with server(take) as port:
        with pytest.raises(http.client.RemoteDisconnected):
            get(port)
        assert get(port) == (200, b"a 1\n")
    (record,) = (one for one in caplog.records if one.levelno == logging.ERROR)
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


def test_who_takes_too_long_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 0.05)
    with server(lambda: lambda: b"a 1\n") as port:
        assert send(port, b"GET /metrics") == b""


def test_who_comes_when_all_places_are_taken_gets_that_of_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 3600.0)
    with server(lambda: lambda: b"a 1\n") as port, ExitStack() as idle:
        clients = [
            idle.enter_context(socket.create_connection((LOCALHOST, port), SECONDS))
            for _ in range(exporter._CONNECTIONS_MAX + 1)
        ]
        assert clients[0].recv(1) == b"", "it was closed"
        assert get(port) == (200, b"a 1\n")
        assert clients[1].recv(1) == b""
        clients[-1].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert clients[-1].recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_its_answer_delays_no_end() -> None:
    large = b"a 1\n" * 4_000_000
    with server(lambda: lambda: large) as port:
        client = socket.create_connection((LOCALHOST, port), SECONDS)
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    with client:
        assert not [one for one in threading.enumerate() if one.name == "kvfs-metrics"]

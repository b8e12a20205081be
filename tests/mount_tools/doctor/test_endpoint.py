"""Prometheus' text as engines print it, and which ports are asked for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mount_tools.doctor.endpoint import may_ask, parse_samples, read_endpoint

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-0.6B"} 3.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-0.6B"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="a \\"{quoted}\\" name"} 0.97
vllm:prefix_cache_hits_total{engine="0"} 1.5e+06
vllm:prefix_cache_hits_total{engine="1"} 500000.0 1731000000000
process_open_fds NaN
some_bucket{le="+Inf"} 4
"""


@contextmanager
def served(text: str, status: int = 200) -> Iterator[int]:
    """The port on which it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_samples_of_an_engine() -> None:
    samples = parse_samples(VLLM)
    assert samples == {
        "vllm:num_requests_running": 3.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:kv_cache_usage_perc": 0.97,
        "vllm:prefix_cache_hits_total": 2e6,
        "some_bucket": 4.0,
    }


@given(st.text())
def test_any_text_is_read_without_failing(text: str) -> None:
    assert all(isinstance(value, float) for value in parse_samples(text).values())


def test_an_endpoint_is_read_and_what_is_none_is_none() -> None:
    with served(VLLM) as port:
        endpoint = read_endpoint(port)
        assert endpoint is not None
        assert endpoint.first(["vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"]) == 0.97
        assert endpoint.first(["unknown"]) is None
    assert read_endpoint(port) is None
    with served("<html>", 200) as port:
        assert read_endpoint(port) is None
    with served(VLLM, 404) as port:
        assert read_endpoint(port) is None


def test_a_port_that_accepts_and_says_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert read_endpoint(silent.getsockname()[1]) is None


@pytest.mark.parametrize(
    ("port", "command", "asked"),
    [
        (8000, ["vllm", "serve", "model"], True),
        (29500, ["torchrun", "train.py"], False),
        (4242, ["vllm", "serve", "--port", "4242"], True),
        (4242, ["vllm", "serve", "--port=4242"], True),
        (4242, ["engine", "--rank-port", "4242"], False),
        (4242, [], False),
    ],
)
def test_unusual_ports_are_not_asked(port: int, command: list[str], asked: bool) -> None:
    assert may_ask(port, command) is asked

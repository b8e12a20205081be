"""Mooncake's store with its files as the lower tier, over TCP, and its master, all on this
machine: mooncake_files.py DIR BACKEND

BACKEND is `file_per_key`, `bucket` or `offset_allocator`. What is stored goes to files with the
master's next heartbeat, a second at least; then its copy in memory is let go, as it is when memory
is full, so that loads are of the files.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mooncake
from content import chunk, digest
from serving import Outcome, serve

CHUNKS, CHUNK_SIZE = 64, 4 * 1024 * 1024
BUCKET_KEYS = 8  # a bucket is written when it is full; a heartbeat may come in between
KEYS = [f"chunk-{number}" for number in range(CHUNKS)]
MEMORY, BUFFER = 512 * 1024 * 1024, 64 * 1024 * 1024
# It goes on counting files that are gone, and stops to store when they come to the limit.
FILES = 16 * MEMORY
WAIT_SECONDS = 120
SETTINGS = {
    "MC_MS_AUTO_DISC": "0",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(BUCKET_KEYS),
}


def main() -> None:
    directory, backend = sys.argv[1:]
    os.environ |= SETTINGS
    os.environ["MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR"] = f"{backend}_storage_backend"
    # Of its default, 2 TiB, the one file of the offset allocator takes all at once.
    limit = MEMORY if backend == "offset_allocator" else FILES
    os.environ["MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"] = str(limit)
    master = f"127.0.0.1:{_start_master()}"
    from mooncake.store import MooncakeDistributedStore

    segment = f"127.0.0.1:{_free_port()}"
    store_client = MooncakeDistributedStore()
    failed = store_client.setup(
        segment, "P2PHANDSHAKE", MEMORY, BUFFER, "tcp", "", master, None, True, directory
    )
    if failed:
        raise OSError(f"Mooncake's client cannot begin: {failed}")
    least = BUCKET_KEYS if backend == "bucket" else 1
    made = [bytes(chunk(number, CHUNK_SIZE)) for number in range(CHUNKS)]

    def store() -> Outcome:
        started = time.perf_counter()
        for key, data in zip(KEYS, made, strict=True):
            if failed := store_client.put(key, data):
                raise OSError(f"Mooncake stores nothing: {failed}")
        _until(lambda: len(on_disk()) > CHUNKS - least, "in files")
        seconds = time.perf_counter() - started
        stored = on_disk()
        _until(lambda: not clear(stored), "out of memory")
        return Outcome(seconds, CHUNKS * CHUNK_SIZE, 0, digest(made))

    def load() -> Outcome:
        started = time.perf_counter()
        got = [store_client.get(key) for key in KEYS]
        seconds = time.perf_counter() - started
        for key, data in zip(KEYS, got, strict=True):
            if not data:
                # The master goes on to believe in a file that is gone, and stores no other.
                store_client.remove(key, True)
        hits = sum(bool(data) for data in got)
        whole = [data or new for data, new in zip(got, made, strict=True)]
        return Outcome(seconds, hits * CHUNK_SIZE, hits, digest(whole))

    def on_disk() -> list[str]:
        replicas = store_client.batch_get_replica_desc(KEYS)
        return [key for key in replicas if any(r.is_local_disk_replica() for r in replicas[key])]

    def clear(stored: list[str]) -> list[str]:
        """Those of them that are in memory still: who asks for one keeps it there for a moment."""
        store_client.batch_replica_clear(stored, segment)
        replicas = store_client.batch_get_replica_desc(stored)
        return [key for key in replicas if any(r.is_memory_replica() for r in replicas[key])]

    if os.listdir(directory):
        time.sleep(3)  # the files of a former process are told to the master with a heartbeat
    serve(store, load)


def _start_master() -> int:
    """Its port. It ends with this process."""
    home, port = Path(mooncake.__file__).parent, _free_port()
    subprocess.Popen(
        [
            "setpriv", "--pdeathsig", "KILL", home / "mooncake_master", f"--rpc_port={port}",
            f"--metrics_port={_free_port()}", "--enable_offload=true", "--default_kv_lease_ttl=10",
            "--logtostderr=true",
        ],
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=os.environ | {"LD_LIBRARY_PATH": str(home)},
    )  # fmt: skip
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return port
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was stored is not {what} after {WAIT_SECONDS} s")
        time.sleep(0.01)


main()

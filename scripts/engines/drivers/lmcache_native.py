"""LMCache's client in C++ for its adapter `fs_native`: lmcache_native.py DIR"""

from __future__ import annotations

import os
import select
import sys
import time

from content import chunk, digest
from lmcache.lmcache_fs import LMCacheFSClient
from serving import Outcome, serve

WORKERS = 4  # the adapter's default
CHUNKS, CHUNK_SIZE = 64, 4 * 1024 * 1024
# As the adapter forms them: model, rank, group, hash of the chunk.
KEYS = [f"kv@00000000@{number % 4:08x}@{number:016x}" for number in range(CHUNKS)]


def main() -> None:
    client = LMCacheFSClient(sys.argv[1], WORKERS)
    made = [chunk(number, CHUNK_SIZE) for number in range(CHUNKS)]

    def finish(request: int) -> list[bool]:
        select.select([client.event_fd()], [], [])
        os.eventfd_read(client.event_fd())
        for number, succeeded, _, found in client.drain_completions():
            if number == request:
                return found or [succeeded] * CHUNKS
        raise RuntimeError("the client has not answered")

    def store() -> Outcome:
        started = time.perf_counter()
        stored = finish(client.submit_batch_set(KEYS, [memoryview(data) for data in made]))
        seconds = time.perf_counter() - started
        return Outcome(seconds, sum(stored) * CHUNK_SIZE, 0, digest(made))

    def load() -> Outcome:
        into = [memoryview(bytearray(CHUNK_SIZE)) for _ in KEYS]
        started = time.perf_counter()
        found = finish(client.submit_batch_get(KEYS, into))
        seconds = time.perf_counter() - started
        got = [data if hit else new for data, hit, new in zip(into, found, made, strict=True)]
        return Outcome(seconds, sum(found) * CHUNK_SIZE, sum(found), digest(got))

    serve(store, load)


main()

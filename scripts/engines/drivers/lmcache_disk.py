"""LMCache's backend on a local disk, as its engine uses it: lmcache_disk.py DIR

LMCACHE_LOCAL_DISK and its like are read as the engine reads them. The index is in memory alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import torch
from content import chunk, digest
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from serving import Outcome, serve

LAYERS, TOKENS, HEADS, HEAD_SIZE = 32, 256, 8, 128
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * HEAD_SIZE])
CHUNKS, CHUNK_SIZE = 8, 2 * SHAPE.numel()
KEYS = [CacheEngineKey("model", 1, 0, number + 1, torch.bfloat16) for number in range(CHUNKS)]


def main() -> None:
    os.environ |= {
        "LMCACHE_LOCAL_DISK": f"file://{sys.argv[1]}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "64",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
        "LMCACHE_LOCAL_CPU": "false",
    }
    config = LMCacheEngineConfig.from_env()
    shape = (LAYERS, 2, TOKENS, HEADS, HEAD_SIZE)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, shape)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    memory = LocalCPUBackend(config, metadata)
    disk = LocalDiskBackend(config, loop, memory, "cpu")
    made = [torch.from_numpy(chunk(number, CHUNK_SIZE)) for number in range(CHUNKS)]

    def store() -> Outcome:
        stored = []
        for data in made:
            one = memory.allocate(SHAPE, torch.bfloat16, MemoryFormat.KV_2LTD)
            one.tensor.view(torch.uint8).flatten().copy_(data)
            stored.append(one)
        started = time.perf_counter()
        disk.batched_submit_put_task(KEYS, stored)
        while any(disk.exists_in_put_tasks(key) for key in KEYS):
            time.sleep(0.001)
        seconds = time.perf_counter() - started
        for one in stored:
            one.ref_count_down()
        return Outcome(seconds, CHUNKS * CHUNK_SIZE, 0, digest(data.numpy() for data in made))

    def load() -> Outcome:
        started = time.perf_counter()
        there = [key for key in KEYS if disk.contains(key)]
        found = dict(zip(there, disk.batched_get_blocking(there), strict=True)) if there else {}
        seconds = time.perf_counter() - started
        got = []
        for key, data in zip(KEYS, made, strict=True):
            one = found.get(key)
            got.append(data if one is None else one.tensor.view(torch.uint8).flatten().clone())
            if one is not None:
                one.ref_count_down()
        hits = sum(one is not None for one in found.values())
        return Outcome(seconds, hits * CHUNK_SIZE, hits, digest(data.numpy() for data in got))

    serve(store, load)


main()

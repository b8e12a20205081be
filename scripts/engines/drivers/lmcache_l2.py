"""An adapter of LMCache's second level, which its server keeps KV with: lmcache_l2.py DIR TYPE

TYPE is `fs` (Python) or `fs_native` (threads in C++). Settings are the adapter's defaults.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from argparse import Namespace

import torch
from content import chunk, digest
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from serving import Outcome, serve

CHUNKS, CHUNK_SIZE = 64, 4 * 1024 * 1024
KEYS = [ObjectKey(number.to_bytes(16, "big"), "model", 0) for number in range(CHUNKS)]


class Chunks:
    """Memory of the first level: one after the other."""

    def __init__(self) -> None:
        self.memory = torch.zeros(CHUNKS * CHUNK_SIZE, dtype=torch.uint8)
        self.parts = self.memory.split(CHUNK_SIZE)
        self.objects = [
            TensorMemoryObj(part, self._metadata(number), None)
            for number, part in enumerate(self.parts)
        ]

    def _metadata(self, number: int) -> MemoryObjMetadata:
        return MemoryObjMetadata(
            shape=torch.Size([CHUNK_SIZE]),
            dtype=torch.uint8,
            address=number * CHUNK_SIZE,
            phy_size=CHUNK_SIZE,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )

    def fill(self, numbers: list[int]) -> None:
        """As they are computed."""
        for number in numbers:
            self.parts[number].numpy()[:] = chunk(number, CHUNK_SIZE)

    def digest(self) -> str:
        return digest(part.numpy() for part in self.parts)


def main() -> None:
    directory, kind = sys.argv[1:]
    chunks = Chunks()
    spec = json.dumps({"type": kind, "base_path": directory})
    config = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[spec])).adapters[0]
    size = chunks.memory.numel()
    memory = L1MemoryDesc(ptr=chunks.memory.data_ptr(), size=size, align_bytes=1)
    adapter = create_l2_adapter(config, l1_memory_desc=memory)
    wholes = {0: MemoryLayoutDesc(shapes=[], dtypes=[])}

    def store() -> Outcome:
        chunks.fill(list(range(CHUNKS)))
        started = time.perf_counter()
        task = adapter.submit_store_task(KEYS, chunks.objects)
        _wait(adapter.get_store_event_fd())
        if not adapter.pop_completed_store_tasks()[task].is_successful():
            raise OSError("LMCache has not stored all")
        return Outcome(time.perf_counter() - started, size, 0, chunks.digest())

    def load() -> Outcome:
        chunks.memory.zero_()
        started = time.perf_counter()
        lookup = adapter.submit_lookup_and_lock_task(KEYS, wholes)
        _wait(adapter.get_lookup_and_lock_event_fd())
        held = adapter.query_lookup_and_lock_result(lookup)
        there = [number for number in range(CHUNKS) if held.test(number)]
        found = []
        if there:
            task = adapter.submit_load_task(
                [KEYS[number] for number in there], [chunks.objects[number] for number in there]
            )
            _wait(adapter.get_load_event_fd())
            loaded = adapter.query_load_result(task)
            found = [number for place, number in enumerate(there) if loaded.test(place)]
        seconds = time.perf_counter() - started
        adapter.submit_unlock([KEYS[number] for number in there])
        chunks.fill(sorted(set(range(CHUNKS)) - set(found)))
        return Outcome(seconds, len(found) * CHUNK_SIZE, len(found), chunks.digest())

    serve(store, load)


def _wait(event: int) -> None:
    select.select([event], [], [])
    os.eventfd_read(event)


main()

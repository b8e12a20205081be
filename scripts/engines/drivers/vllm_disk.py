"""vLLM's offload to one file on the disk, which lives as long as its process: vllm_disk.py DIR

`DiskBackend` as it is, but for the copying between blocks of a GPU and its own buffers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from content import chunk, digest
from serving import Outcome, serve

# isort: split
import torch
from vllm.v1.simple_kv_offload import disk_backend
from vllm.v1.simple_kv_offload.disk_backend import DiskBackend

LAYERS, LAYER_BYTES = 32, 128 * 1024  # of a block
BLOCKS, SLOTS = 48, 64


class Done:
    """An event of a copy that is done when it returns."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


def copy(sources: list[int], targets: list[int], between: tuple[Any, Any]) -> None:
    for source, target in zip(*between, strict=True):
        target[targets] = source[sources]


def replace_the_gpu() -> None:
    disk_backend.pin_tensor = lambda tensor: None
    disk_backend.build_params = lambda source, target, *_, **__: (
        list(source.values()),
        list(target.values()),
    )
    disk_backend.copy_blocks = copy
    torch.Event = Done


def main() -> None:
    replace_the_gpu()
    caches = {
        f"layer.{layer}": torch.from_numpy(
            chunk(layer, BLOCKS * LAYER_BYTES).reshape(BLOCKS, LAYER_BYTES)
        ).view(torch.int8)
        for layer in range(LAYERS)
    }
    backend = DiskBackend()
    file = Path(sys.argv[1]) / "offload.bin"
    backend.init(caches, torch.device("cpu"), None, None, str(file), SLOTS, LAYERS * LAYER_BYTES)
    blocks = list(range(BLOCKS))
    slots = [(11 * block) % SLOTS for block in blocks]  # all over the file

    def transfer(sources: list[int], targets: list[int], *, is_store: bool) -> Outcome:
        done: list[Any] = []
        started = time.perf_counter()
        backend.launch_copy(sources, targets, is_store, 0, done)
        while not done:
            threads = (backend._store_thread, backend._load_thread)
            if not all(thread.is_alive() for thread in threads):
                raise RuntimeError("a thread of the backend has ended")
            time.sleep(0.0005)
        seconds = time.perf_counter() - started
        whole = digest(cache.numpy() for cache in caches.values())
        return Outcome(seconds, BLOCKS * LAYERS * LAYER_BYTES, BLOCKS, whole)

    def store() -> Outcome:
        return transfer(blocks, slots, is_store=True)

    def load() -> Outcome:
        for cache in caches.values():
            cache.zero_()
        return transfer(slots, blocks, is_store=False)

    serve(store, load)


main()

"""LMCache's own storage backends, driven in this process without a GPU.

Used where `lmcache` can be imported: it comes with `pip install lmcache==0.5.6`, or with
`--no-deps` and of what it asks for only what these modules import: numba, nvtx, aiofile,
aiofiles, aiohttp, blake3, msgspec, py-cpuinfo, pyzmq, fastapi, httpx, uvicorn, cryptography,
protobuf, redis, grpcio, and opentelemetry's api, sdk and exporters.
Settings are the defaults but for the size of the memory that it reads into.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import threading
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

from scripts.bench.peers.peer import Layers, Peer

_STAGING_GIB = 0.5  # a session has to fit
_DISK_GIB = 64
_HIDDEN = 1024  # of the shape (tokens, 2, hidden) that a layer's bytes are given
_WORKERS = 4  # LMCache's default, of the backend on a local disk too
_DIGEST_SIZE = 8


class _Backend(Peer):
    """A `StorageBackendInterface` with a key for each layer, as `use_layerwise` has it. All
    layers are asked for at once, which is faster than LMCache's own way of one after the
    other; then they are copied from its memory, as they would be to a GPU."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # It would count its uses over the network, and log each step.
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        import torch
        from lmcache.utils import LayerCacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.torch, self.key_type, self.format = torch, LayerCacheEngineKey, MemoryFormat.KV_T2D
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=_STAGING_GIB,
            local_disk=str(root),
            max_local_disk_size=_DISK_GIB,
            use_layerwise=True,
            remote_url=f"fs://host:0{root}",
            remote_serde="naive",
        )
        metadata = LMCacheMetadata("kv", 1, 1, 0, 0, torch.uint8, (1, 2, 256, 8, _HIDDEN // 8))
        self.memory = LocalCPUBackend(config, metadata)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.backend = self.make(config, metadata)
        self.keys: dict[str, list[Any]] = {}

    @abstractmethod
    def make(self, config: Any, metadata: Any) -> Any:
        """The backend."""

    def save(self, session: str, layers: Layers) -> None:
        chunk = int.from_bytes(_digest(session), "little")
        keys = [
            self.key_type("kv", 1, 0, chunk, self.torch.uint8, layer_id=layer)
            for layer in range(len(layers))
        ]
        for key, data in zip(keys, layers.values(), strict=True):
            shape = self.torch.Size([len(data) // (2 * _HIDDEN), 2, _HIDDEN])
            stored = self.memory.allocate(shape, self.torch.uint8, self.format)
            memoryview(stored.byte_array).cast("B")[:] = data
            self.backend.submit_put_task(key, stored)
            while self.backend.exists_in_put_tasks(key):
                time.sleep(0.001)
            stored.ref_count_down()
        self.keys[session] = keys

    def restore(self, session: str, into: Layers) -> None:
        found = self.backend.batched_get_blocking(self.keys[session])
        for stored, view in zip(found, into.values(), strict=True):
            tensor = self.torch.frombuffer(view, dtype=self.torch.uint8)
            tensor.copy_(stored.tensor.flatten())
            stored.ref_count_down()

    def remove(self, session: str) -> None:
        for key in self.keys.pop(session):
            self.backend.remove(key)

    def end(self) -> None:
        self.backend.close()
        self.memory.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


class LMCacheDisk(_Backend):
    name = "LMCache local disk"

    def make(self, config: Any, metadata: Any) -> Any:
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        return LocalDiskBackend(config, self.loop, self.memory, "cpu")


class LMCacheFs(_Backend):
    name = "LMCache fs"

    def make(self, config: Any, metadata: Any) -> Any:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        return RemoteBackend(config, metadata, self.loop, self.memory, "cpu")


class LMCacheNativeFs(Peer):
    """The client in C++ below its `fs_native` adapter, which reads into memory of the caller:
    all layers at once, with the adapter's default of four threads."""

    name = "LMCache fs_native"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        from lmcache.lmcache_fs import LMCacheFSClient

        self.client = LMCacheFSClient(str(root), _WORKERS)
        self.keys: dict[str, list[str]] = {}

    def save(self, session: str, layers: Layers) -> None:
        self.keys[session] = _native_keys(session, len(layers))
        self._wait(self.client.submit_batch_set(self.keys[session], [*layers.values()]))

    def restore(self, session: str, into: Layers) -> None:
        self._wait(self.client.submit_batch_get(self.keys[session], [*into.values()]))

    def remove(self, session: str) -> None:
        self._wait(self.client.submit_batch_delete(self.keys.pop(session)))

    def _wait(self, request: int) -> None:
        select.select([self.client.event_fd()], [], [])
        os.eventfd_read(self.client.event_fd())
        for number, succeeded, message, found in self.client.drain_completions():
            if number == request and (not succeeded or not all(found or [True])):
                raise OSError(f"LMCache's client: {message or 'a layer is missing'}")

    def end(self) -> None:
        self.client.close()


def _native_keys(session: str, layers: int) -> list[str]:
    """As the adapter forms them: model, rank, group, hash of the chunk."""
    return [f"kv@00000000@{layer:08x}@{_digest(session).hex()}" for layer in range(layers)]


def _digest(session: str) -> bytes:
    return hashlib.blake2b(session.encode(), digest_size=_DIGEST_SIZE).digest()

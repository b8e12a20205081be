"""vLLM's tiering of KV, for a model on the CPU: `TieringOffloadingSpec` as it is, but for the
copying between the model's blocks and the first tier, for which vLLM has kernels for GPUs alone."""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Copies(OffloadingWorker):
    """Of one group of layers and one block a chunk. Done when they are submitted."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._pages = [cache.tensor for cache in caches.tensors]
        self._chunks = [
            region.create_next_worker_view(cache.page_size_bytes) for cache in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self._pages, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._chunks, src_spec, self._pages, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _copy(self, job_id: int, sources, source, targets, target) -> bool:
        rows, into = (torch.from_numpy(spec.block_ids).long() for spec in (source, target))
        for one, other in zip(sources, targets, strict=True):
            other[into] = one[rows]
        self._done.append(TransferResult(job_id, success=True))
        return True


class TieringOnCpu(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return Copies(kv_caches, region)

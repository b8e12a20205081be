"""The thin edge: vLLM's calls, handed on to the scheduler's half and the workers' half."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvfs.vllm.model import shapes_of
from kvfs.vllm.place import Place
from kvfs.vllm.plan import Plan
from kvfs.vllm.scheduling import Planner
from kvfs.vllm.settings import Settings
from kvfs.vllm.worker import Worker

_NUMBER = re.compile(r"\d+")


@dataclass
class _Step(KVConnectorMetadata):  # type: ignore[misc]
    plan: Plan


class KVFSConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Sessions on a KVFS mount as a second place for the KV of prefixes."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ValueError, with what to do, if the engine is not one that this can serve."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = Settings.of(self._kv_transfer_config)
        shapes = shapes_of(vllm_config, kv_cache_config)
        place = Place(settings.path)
        self._planner: Planner | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._planner = Planner(place, shapes, is_by_request=settings.sessions == "request")
        else:
            shape = shapes[vllm_config.parallel_config.rank % len(shapes)]
            self._worker = Worker(place, shape, settings, _agreed if len(shapes) > 1 else bool)

    # The scheduler's half

    @property
    def _scheduler(self) -> Planner:
        assert self._planner is not None
        return self._planner

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Loaded layer by layer in the step that uses them."""
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is about to run."""
        self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of a step."""
        new = scheduler_output.scheduled_new_reqs
        cached = scheduler_output.scheduled_cached_reqs
        before = {one.req_id: one.num_computed_tokens for one in new}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = scheduler_output.num_scheduled_tokens
        state = scheduler_output.kv_connector_block_state
        plan = self._scheduler.plan(
            {name: count + scheduled[name] for name, count in before.items()},
            lambda name: state.get_block_ids(name)[0],
            scheduler_output.finished_req_ids,
        )
        if not self._kv_transfer_config.is_kv_producer:
            plan.saves.clear()
        return _Step(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers could not load."""
        if connector_output.invalid_block_ids:
            self._scheduler.failed()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Its pages are free at once: what is saved was copied in the step that computed it."""
        self._scheduler.finished(request)
        return False, None

    # A worker's half

    @property
    def _here(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's memory, and the kernel that writes to it: all layers have the same."""
        names = sorted(kv_caches, key=_numbers)
        layer = self._vllm_config.compilation_config.static_forward_context[names[0]]

        def write(key: Any, value: Any, pages: Any, slots: Any) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, pages, slots)

        self._here.use({name: kv_caches[name] for name in names}, write)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin with the first layer."""
        self._here.start(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer's attention."""
        self._here.wait(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """All layers are saved at once, when none of the step's loads is known to have failed."""

    def wait_for_save(self) -> None:
        """Copies; they are written in the background."""
        self._here.save(self._plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The pages of this step that do not hold what they should."""
        return self._here.take_errors()

    def flush(self) -> None:
        """Return when all that was saved is written."""
        self._here.flush()

    def shutdown(self) -> None:
        """Write what is on its way."""
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for one by one."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not saved is computed again."""
        return False

    @property
    def _plan(self) -> Plan:
        step = self._get_connector_metadata()
        assert isinstance(step, _Step)
        return step.plan


def _agreed(has_failed: bool) -> bool:
    """Whether it has on any rank: the layers of one are computed from what the others loaded."""
    failed = torch.tensor(has_failed, dtype=torch.int32)
    torch.distributed.all_reduce(failed, group=get_tp_group().cpu_group)
    return bool(failed)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]

"""How full the memory of an accelerator is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes in use, of so many in all."""

    used: int
    total: int

    @property
    def used_pct(self) -> float:
        """How full it is."""
        return 100 * self.used / self.total


MemoryGauge = Callable[[], DeviceMemory]


def gauge_of(device: torch.device) -> MemoryGauge | None:
    """What tells how full that device is; None for the host's memory, which is the daemon's
    and the kernel's to keep."""
    return partial(_cuda_memory, device) if device.type == "cuda" else None


def _cuda_memory(device: torch.device) -> DeviceMemory:
    """What torch holds for this process and nobody uses counts as free: it is there for the next
    tensor, and only `empty_cache` would give it to other processes."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(total - free - unused, total)

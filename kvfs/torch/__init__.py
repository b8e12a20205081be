"""The agent's side of KVFS: a `transformers.Cache` that lives in a mounted ring."""

from kvfs.torch.cache import KVFSCache
from kvfs.torch.errors import (
    FingerprintError,
    HotBudgetError,
    NotASessionError,
    NotKVFSError,
    SessionBusyError,
)
from kvfs.torch.hot import HotPool
from kvfs.torch.memory import DeviceMemory
from kvfs.torch.router import KVRouter

__all__ = [
    "DeviceMemory",
    "FingerprintError",
    "HotBudgetError",
    "HotPool",
    "KVFSCache",
    "KVRouter",
    "NotASessionError",
    "NotKVFSError",
    "SessionBusyError",
]

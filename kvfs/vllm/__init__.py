"""A KV connector for vLLM: what its requests computed, in sessions on a KVFS mount.

Chosen by `kv_connector="KVFSConnector"` and `kv_connector_module_path="kvfs.vllm"`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVFSConnector"]


def __getattr__(name: str) -> Any:
    """The connector alone needs vLLM; tests of the other parts go without it."""
    if name != "KVFSConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvfs.vllm.connector import KVFSConnector

    return KVFSConnector

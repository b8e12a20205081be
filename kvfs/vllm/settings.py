"""What `kv_connector_extra_config` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STAGING_MIB = 256


@dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`."""

    path: Path
    """A directory on a KVFS mount."""
    sessions: str
    """`prompt`: every request hits what any stored; `request`: only its own conversation."""
    sync: bool
    """Whether each save is durable before the next is written; else within 30 s."""
    staging_mib: int
    """Memory of each worker for what is on its way to the mount."""

    @classmethod
    def of(cls, transfer: Any) -> Settings:
        """From vLLM's KVTransferConfig; ValueError, with what to do, if something is wrong."""
        told = dict(transfer.kv_connector_extra_config)
        if "path" not in told:
            raise ValueError(
                'KVFSConnector needs a directory on a KVFS mount: "kv_connector_extra_config": '
                '{"path": "/mnt/kv/vllm"}'
            )
        settings = cls(
            path=Path(told.pop("path")),
            sessions=told.pop("sessions", "prompt"),
            sync=bool(told.pop("sync", False)),
            staging_mib=int(told.pop("staging_mib", _STAGING_MIB)),
        )
        if told:
            raise ValueError(f"KVFSConnector does not know the setting {sorted(told)[0]!r}")
        if settings.sessions not in ("prompt", "request"):
            raise ValueError(f'"sessions" is "prompt" or "request", not {settings.sessions!r}')
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                "KVFSConnector computes again what cannot be loaded: set "
                '"kv_load_failure_policy": "recompute" in the kv_transfer_config'
            )
        return settings

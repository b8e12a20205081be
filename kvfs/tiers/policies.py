"""Policies by name: what a profile and `kvfs replay` choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvfs.engine.policy import Policy
from kvfs.tiers.gittins import GittinsPolicy
from kvfs.tiers.policy import LRU, S3FIFO, HeatPolicy

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "lru": LRU,
    "s3fifo": S3FIFO,
    "heat": HeatPolicy,
    "gittins": GittinsPolicy,
}
DEFAULT_POLICY = "gittins"

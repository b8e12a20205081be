"""Which directory a warm file lies in."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from cachetools import LRUCache

from kvfs.tiers.profiles import Profile

_DIGITS_AT_THE_END = re.compile(rb"[0-9]+\Z")
_SESSIONS_MAX = 65_536


@dataclass(slots=True)
class Shards:
    """The shards of sessions whose name and device were told; of others by their id. It is no
    harm if it differs between two files of a session: a warm file is found by looking."""

    profile: Profile = field(default_factory=Profile)
    _told: LRUCache[int, int] = field(default_factory=lambda: LRUCache(_SESSIONS_MAX))

    def wants(self, session_id: int) -> bool:
        """Whether it should be told of that session."""
        return self.profile.shard_by == "device_id" and session_id not in self._told

    def tell(self, session_id: int, name: bytes, device_id: int | None) -> None:
        self._told[session_id] = shard_of(session_id, name, device_id, self.profile)

    def of(self, session_id: int) -> int:
        told = self._told.get(session_id)
        return shard_of(session_id, b"", None, self.profile) if told is None else told


def shard_of(session_id: int, name: bytes, device_id: int | None, profile: Profile) -> int:
    """Less than `profile.shards`. By device: what the session's xattr says, else the digits
    that end its name. By session, and for a session that names no device: by its id's hash,
    so that neighbours are spread."""
    if profile.shard_by == "device_id":
        if device_id is None:
            device_id = _device_in(name)
        if device_id is not None:
            return device_id % profile.shards
    digest = hashlib.md5(str(session_id).encode(), usedforsecurity=False).hexdigest()
    return int(digest[:8], 16) % profile.shards


def _device_in(name: bytes) -> int | None:
    digits = _DIGITS_AT_THE_END.search(name)
    return int(digits[0]) if digits else None

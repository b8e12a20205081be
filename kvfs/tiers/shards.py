"""Which directory a warm file lies in."""

from __future__ import annotations

import hashlib
import re

from kvfs.tiers.profiles import Profile

_DIGITS_AT_THE_END = re.compile(rb"[0-9]+\Z")


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

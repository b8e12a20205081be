"""Which directory a warm file lies in."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers import profiles
from kvfs.tiers.profiles import Profile
from kvfs.tiers.shards import shard_of

IOT = profiles.load("iot")
NAMES = st.binary(max_size=255)
DEVICES = st.none() | st.integers(0, 2**64)


@given(st.integers(0, 2**64 - 1), NAMES, DEVICES, st.integers(1, 2**24), st.booleans())
def test_a_shard_is_one_of_those_that_there_are(
    session: int, name: bytes, device: int | None, shards: int, by_device: bool
) -> None:
    profile = Profile(shards=shards, shard_by="device_id" if by_device else "session")
    assert 0 <= shard_of(session, name, device, profile) < shards


@given(st.integers(0, 2**64 - 1), NAMES, DEVICES)
def test_by_session_it_is_the_hash_of_the_id_alone(
    session: int, name: bytes, device: int | None
) -> None:
    digest = hashlib.md5(str(session).encode()).hexdigest()
    assert shard_of(session, name, device, Profile()) == int(digest[:8], 16) % 65_536


@given(st.integers(0, 2**64 - 1), st.text("abc-_.", max_size=200), st.integers(0, 10**50))
def test_by_device_it_is_what_the_session_or_else_its_name_says(
    session: int, prefix: str, device: int
) -> None:
    name = f"{prefix}{device}".encode()
    assert shard_of(session, name, None, IOT) == device % IOT.shards
    assert shard_of(session, name, 7, IOT) == 7
    assert shard_of(session, name + b"x", None, IOT) == shard_of(session, b"", None, IOT)


def test_sessions_without_a_device_are_spread() -> None:
    """Neighbouring ids, as the ring gives them."""
    profile = Profile(shards=64, shard_by="device_id")
    filled = Counter(shard_of(session, b"chat", None, profile) for session in range(64 * 100))
    assert len(filled) == 64
    assert max(filled.values()) < 150

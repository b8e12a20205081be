"""What the adapter refuses, each with one line that says what to do."""

from __future__ import annotations


class NotKVFSError(ValueError):
    """The path given to `KVFSCache.open` does not lie on a KVFS mount."""


class NotASessionError(ValueError):
    """The directory exists, but what it holds was not written by this adapter."""


class FingerprintError(ValueError):
    """The session holds the KV of another model, dtype or layout."""


class SessionBusyError(RuntimeError):
    """Another cache, in this process or in another one, has the session open."""


class HotBudgetError(ValueError):
    """The hot bytes allowed are less than two layers of a session."""

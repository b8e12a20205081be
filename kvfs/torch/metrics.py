"""What a router counts, by name, as Prometheus' text."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvfs.torch.counters import Counters
from kvfs.torch.memory import MemoryGauge

Tier = Literal["hot", "warm", "cold"]
TIERS: tuple[Tier, ...] = ("hot", "warm", "cold")
"""From the fastest to the slowest."""

_LATENCIES_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_RECENT_READS = 1000


@dataclass(frozen=True)
class Hot:
    """What accelerator memory holds now: bytes, and open sessions with KV in it or without."""

    used_bytes: int
    budget_bytes: int
    hot_sessions: int
    idle_sessions: int


@dataclass(frozen=True)
class Found:
    """Where a turn found the KV of its session: bytes in hot memory, and in `below`."""

    hot_bytes: int
    below_bytes: int
    below: Tier

    @property
    def tier(self) -> Tier | None:
        """The slowest that holds part of the session; None if it has no KV yet."""
        if self.below_bytes:
            return self.below
        return "hot" if self.hot_bytes else None


class RouterMetrics:
    """The counters of one router. Safe to use from several threads."""

    def __init__(self, hot: Callable[[], Hot], memory: MemoryGauge | None = None) -> None:
        """Both are asked whenever the text is made."""
        self._registry = registry = CollectorRegistry()
        self._cold_reads_ms: deque[float] = deque(maxlen=_RECENT_READS)
        self._hot_bytes = self._below_bytes = 0
        self._lock = threading.Lock()
        self._turns = Counter(
            "kv_turns",
            "Turns, by the slowest tier that held part of the session",
            ["tier"],
            registry=registry,
        )
        self._found = Counter(
            "kv_found_bytes",
            "KV that was there when a turn began, by the tier that held it",
            ["tier"],
            registry=registry,
        )
        self._moved = Counter(
            "kv_moved_bytes",
            "KV brought in from warm memory or through the mount, or written to the files",
            ["way"],
            registry=registry,
        )
        self._waited = Counter(
            "kv_wait_seconds", "Time that forward calls stood still for KV", registry=registry
        )
        self._evict_ms = Histogram(
            "kv_warm_evict_latency_ms",
            "Time to move KV of one session out of hot memory, to where it is warm",
            buckets=_LATENCIES_MS,
            registry=registry,
        )
        self._cold_read_ms = Histogram(
            "kv_cold_read_latency_ms",
            "Time that a turn spent reading a session which it found cold",
            buckets=_LATENCIES_MS,
            registry=registry,
        )
        self._faults = Counter(
            "kv_daemon_faults",
            "Turns and moves that failed because the mount did not do what was asked",
            registry=registry,
        )
        self._reopened = Counter(
            "kv_reopened_sessions",
            "Sessions that were taken up again after the daemon came back",
            registry=registry,
        )
        sessions = Gauge(
            "kv_sessions",
            "Open sessions: hot with KV in hot memory, idle without",
            ["state"],
            registry=registry,
        )
        sessions.labels("hot").set_function(lambda: hot().hot_sessions)
        sessions.labels("idle").set_function(lambda: hot().idle_sessions)
        for name, what, value in (
            ("kv_hot_bytes", "Hot memory that holds KV", lambda: hot().used_bytes),
            ("kv_hot_budget_bytes", "Hot memory that KV may take", lambda: hot().budget_bytes),
            ("kv_hot_hit_rate", "Share of kv_found_bytes that was hot", self._hot_hit_rate),
            ("kv_cold_read_p99_ms", "Of the last 1000 cold reads", self._cold_read_p99_ms),
        ):
            Gauge(name, what, registry=registry).set_function(value)
        if memory is not None:
            self._tell_of(memory)
        for tier in TIERS:
            self._turns.labels(tier)
            self._found.labels(tier)

    def _tell_of(self, memory: MemoryGauge) -> None:
        total = Gauge("kv_device_memory_bytes", "Memory of the device", registry=self._registry)
        total.set_function(lambda: memory().total)
        what = "Memory of the device that is in use, by whomever"
        used = Gauge("kv_device_memory_used_bytes", what, registry=self._registry)
        used.set_function(lambda: memory().used)

    def turn(self, found: Found, before: Counters, after: Counters) -> None:
        """A turn has ended; the counters are those of its cache."""
        with self._lock:
            self._hot_bytes += found.hot_bytes
            self._below_bytes += found.below_bytes
        if found.tier is not None:
            self._turns.labels(found.tier).inc()
        self._found.labels("hot").inc(found.hot_bytes)
        self._found.labels(found.below).inc(found.below_bytes)
        for way, field in (
            ("warm", "fetched_bytes_warm"),
            ("mount", "fetched_bytes_mount"),
            ("written", "written_bytes"),
        ):
            self._moved.labels(way).inc(getattr(after, field) - getattr(before, field))
        self._waited.inc(after.wait_seconds - before.wait_seconds)
        if found.tier == "cold":
            milliseconds = (after.fetch_seconds - before.fetch_seconds) * 1000
            self._cold_read_ms.observe(milliseconds)
            self._cold_reads_ms.append(milliseconds)

    def evicted(self, seconds: float) -> None:
        """KV of a session has left hot memory."""
        self._evict_ms.observe(seconds * 1000)

    def fault(self) -> None:
        """The mount did not do what was asked."""
        self._faults.inc()

    def reopened(self) -> None:
        """A session was taken up again."""
        self._reopened.inc()

    def text(self) -> str:
        """In Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def _hot_hit_rate(self) -> float:
        with self._lock:
            found = self._hot_bytes + self._below_bytes
            return self._hot_bytes / found if found else 1.0

    def _cold_read_p99_ms(self) -> float:
        recent = list(self._cold_reads_ms)
        return float(np.percentile(recent, 99)) if recent else 0.0

"""The numbers of stats.json in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvfs.engine.latency import BOUNDS, Latencies

_BYTES = {
    "total", "free", "available", "live", "segment_size", "unsaved", "payload_written",
    "device_written", "carried", "reclaimed", "limit", "taken", "leased", "spare",
    "evicted", "promoted", "taken_over",
}  # fmt: skip

_WARM_NOW = {"limit", "taken", "leased", "spare"}

_HELP = {
    "total": "What the ring can hold",
    "free": "What may still be written",
    "available": "What is free, and what reclaim may remove now",
    "live": "What files and their metadata take, shared bytes once",
    "inodes": "Files, directories and other inodes",
    "segments": "Segments of the ring",
    "segment_size": "The length of a segment",
    "epoch": "Mounts that could write, since mkfs",
    "unsaved": "Answered, and not in the ring yet",
    "operations": "Operations that changed something",
    "payload_written": "What of files went to the ring, after compression",
    "device_written": "All that went to the device",
    "frames": "Frames written",
    "flushes": "Flushes of the device",
    "checkpoints": "Checkpoints written",
    "cleaned_segments": "Segments whose live part was carried forward",
    "carried": "What of files was carried forward by cleaning",
    "reclaimed_units": "Sessions, and files of pools, that were reclaimed",
    "reclaimed": "What reclaimed units took",
    "recovered_operations": "Taken from the operation log at the mount",
    "replayed_frames": "Frames read again at the mount",
    "limit": "The most that the warm tier may take of the tmpfs",
    "taken": "What the warm tier takes of the tmpfs",
    "leased": "What of the warm tier clients may have mapped",
    "spare": "What waits in the tmpfs to be taken by the warm tier",
    "hits": "Extents read from warm memory",
    "hit_bytes": "What was read from warm memory",
    "evicted_files": "Warm files given up",
    "evicted": "What warm files took that were given up",
    "promoted": "What was brought from the ring into warm memory",
    "taken_over": "What the last daemon left in warm memory",
    "damaged": "Warm copies that failed their checksum",
    "read_only": "1 if nothing can be written",
    "unrecovered": "1 if this mount does not show what the last daemon had answered",
    "superblock_lost": "1 if one of the two superblocks could not be read at the mount",
    "damage": "1 if the ring is damaged",
    "failure": "1 if the device failed and nothing more is written",
}


def metrics(stats: Mapping[str, Any], latencies: Mapping[str, Latencies]) -> bytes:
    """`stats` is the document of stats.json."""
    registry = CollectorRegistry()
    registry.register(_Stats(stats, latencies))
    return generate_latest(registry)


class _Stats(Collector):
    def __init__(self, stats: Mapping[str, Any], latencies: Mapping[str, Latencies]) -> None:
        self._stats = stats
        self._latencies = latencies

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        for name, value in stats["space"].items():
            yield GaugeMetricFamily(_name(f"space_{name}", name), _help(name), value)
        for name in ("unsaved", "segments", "segment_size", "epoch"):
            yield GaugeMetricFamily(_name(name, name), _help(name), stats[name])
        for name in ("read_only", "unrecovered", "superblock_lost", "damage", "failure"):
            yield GaugeMetricFamily(_name(name, name), _help(name), bool(stats[name]))
        yield from _shadow(stats["shadow"], is_failed=bool(stats["failure"]))
        for name, value in stats["counters"].items():
            yield CounterMetricFamily(_name(name, name), _help(name), value)
        for name, value in stats["warm"].items():
            kind = GaugeMetricFamily if name in _WARM_NOW else CounterMetricFamily
            yield kind(_name(f"warm_{name}", name), _help(name), value)
        text = "1 while warm memory stays above 88 %, and nothing is brought in on a guess"
        yield GaugeMetricFamily("kvfs_warm_strained", text, stats["strained"])
        yield from _heat(stats["heat"])
        yield from _hot(stats["hot_uses"])
        yield from _prefetch(stats["prefetch"])
        yield from _known_by_name(stats["hot_hit_rate"], self._latencies)
        yield from _scrub(stats["scrub"])
        errors = CounterMetricFamily("kvfs_read_errors", "Reads that failed", labels=["kind"])
        for kind, count in stats["errors"].items():
            errors.add_metric([kind], count)
        yield errors


def _known_by_name(
    hot_hit_rate: float | None, latencies: Mapping[str, Latencies]
) -> Iterable[Metric]:
    """Under the names that operators of agents know, and as histograms."""
    if hot_hit_rate is not None:
        text = "Share of blocks that agents found on the accelerator, as far as they tell"
        yield GaugeMetricFamily("kv_hot_hit_rate", text, hot_hit_rate)
    evict, cold = latencies["warm_evict"], latencies["cold_read"]
    text = "For a group of sessions to go down to the ring: the 99th percentile"
    yield GaugeMetricFamily("kv_warm_evict_latency_ms", text, 1000 * evict.quantile(0.99))
    text = "A read of the device, until it is checked and decoded: the 99th percentile"
    yield GaugeMetricFamily("kv_cold_read_p99_ms", text, 1000 * cold.quantile(0.99))
    ring = latencies["ring_write"]
    yield _histogram("kvfs_ring_write_seconds", "Frames written, per MiB of longer ones", ring)
    yield _histogram("kvfs_warm_evict_seconds", "A group of sessions going down", evict)
    yield _histogram("kvfs_cold_read_seconds", "Reads of the device", cold)


def _heat(heat: Mapping[str, Any]) -> Iterable[Metric]:
    text = "Mean heat of the sessions that were used lately"
    yield GaugeMetricFamily("kvfs_session_heat_mean", text, heat["mean"])
    text = "Sessions that were used lately: above 1.8 times the mean heat, below 0.9, or between"
    sessions = GaugeMetricFamily("kvfs_sessions_by_heat", text, labels=["temperature"])
    for temperature in ("hot", "warm", "cold"):
        sessions.add_metric([temperature], heat[temperature])
    yield sessions


def _hot(uses: Mapping[str, Any]) -> Iterable[Metric]:
    text = "Blocks that agents found on the accelerator, as far as they tell"
    yield CounterMetricFamily("kvfs_hot_hits", text, uses["hits"])
    text = "Blocks that agents did not find there"
    yield CounterMetricFamily("kvfs_hot_misses", text, uses["misses"])


def _shadow(shadow: Mapping[str, Any], *, is_failed: bool) -> Iterable[Metric]:
    text = "1 while the device has failed: fsync fails"
    yield GaugeMetricFamily("kvfs_device_failed", text, is_failed)
    text = "What was answered while the device was away, and is not on it yet"
    yield GaugeMetricFamily("kvfs_shadow_bytes", text, shadow["used"])
    text = "The most that may be answered while the device is away"
    yield GaugeMetricFamily("kvfs_shadow_limit_bytes", text, shadow["limit"])
    counters = shadow["counters"]
    text = "Times that the device failed, and was waited for"
    yield CounterMetricFamily("kvfs_device_failures", text, counters["failures"])
    text = "Times that it came back, with all that was answered written home"
    yield CounterMetricFamily("kvfs_device_returns", text, counters["returns"])
    text = "Frames that were written again then"
    yield CounterMetricFamily("kvfs_rewritten_frames", text, counters["rewritten_frames"])


def _histogram(name: str, text: str, latencies: Latencies) -> Metric:
    bounds = [*(f"{bound:.6g}" for bound in BOUNDS), "+Inf"]
    buckets = list(zip(bounds, accumulate(latencies.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=latencies.total)


def _scrub(stats: Mapping[str, Any]) -> Iterable[Metric]:
    now = {
        "running": "1 while the ring is scrubbed",
        "share": "How much of this pass is done, 0 to 1",
        "position_bytes": "Where on the device it is",
    }
    for name, text in now.items():
        yield GaugeMetricFamily(f"kvfs_scrub_{name}", text, stats[name.removesuffix("_bytes")])
    text = "When the last pass ended, since 1970; 0 for never"
    yield GaugeMetricFamily("kvfs_scrub_finished_seconds", text, stats["finished"] or 0)
    since = {
        "passes": "Scrubs of the whole ring",
        "found": "What a scrub found that is not what was written",
        "healed": "What of it was in memory, and was written anew",
    }
    for name, text in since.items():
        yield CounterMetricFamily(f"kvfs_scrub_{name}", text, stats[name])


def _prefetch(stats: Mapping[str, Any]) -> Iterable[Metric]:
    labels = ["outcome", "reason"]
    sessions = CounterMetricFamily(
        "kvfs_prefetched_sessions", "Brought in, and then used or not", labels=labels
    )
    size = CounterMetricFamily("kvfs_prefetched_bytes", "What was read for that", labels=labels[:1])
    for outcome in ("right", "wrong"):
        for reason, count in stats[outcome].items():
            sessions.add_metric([outcome, reason], count)
        size.add_metric([outcome], stats[f"{outcome}_bytes"])
    return sessions, size


def _name(name: str, quantity: str) -> str:
    return f"kvfs_{name}_bytes" if quantity in _BYTES else f"kvfs_{name}"


def _help(name: str) -> str:
    return _HELP.get(name, name.replace("_", " "))

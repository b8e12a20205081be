"""A mounted KVFS, by what its daemon says."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mount_tools.common import CommandError, describe_os_error, format_size
from mount_tools.doctor.check import Check, Question, Status
from mount_tools.mountpoints import answered, read_stats

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SCRUB_DAYS_MAX = 14
_DAY_SECONDS = 24 * 3600
_WARM_MIN = 1024**3
_READS_MIN = 1000
_WARM_HITS_WANTED = 0.5
_HOT_HITS_WANTED = 0.95
_COLD_P99_WANTED_MS = 1.0
_FREE_SHARE_WANTED = 0.1


def checks(mountpoint: Path) -> Iterator[Check]:
    """Does not wait for longer than a few seconds for a daemon that hangs."""
    answer = Question(
        f"mount {mountpoint}",
        "daemon",
        "it answers",
        "a mount whose daemon ended or hangs serves nothing",
        f"kvfs umount --force {mountpoint}, then kvfs mount {mountpoint} DEV",
    )
    try:
        document = read_stats(mountpoint).document
    except CommandError as failure:
        is_foreign = "another user" in str(failure)
        yield answer.unknown(str(failure)) if is_foreign else answer.bad(Status.ERROR, str(failure))
        return
    except OSError as failure:
        yield answer.bad(Status.ERROR, describe_os_error(failure))
        return
    yield answer.ok(f"process {document['pid']} answers")
    yield from judge(mountpoint, document, time.time())


def warm_directory(mountpoint: Path) -> Path | None:
    """Of its configuration; None where it is not told."""
    file = mountpoint / ".kvfs" / "config.toml"
    try:
        told = tomllib.loads(answered(mountpoint, file.read_text)).get("warm_directory")
    except (CommandError, OSError, ValueError):
        return None
    return Path(told) if isinstance(told, str) else None


def judge(mountpoint: Path, stats: dict[str, Any], now: float) -> Iterator[Check]:
    """`stats` is the document of stats.json, `now` in seconds since 1970."""

    def ask(name: str, wanted: str, why: str, command: str | None = None) -> Question:
        return Question(f"mount {mountpoint}", name, wanted, why, command)

    yield _damage(
        stats,
        ask(
            "damage",
            "none, and the device works",
            "a damaged ring is mounted read-only; a failed device takes nothing more",
            f"kvfs umount {mountpoint}; kvfs fsck {stats['source']} --repair",
        ),
    )
    yield _errors(
        stats["errors"],
        ask(
            "errors",
            "none",
            "reads that the device refused, or whose bytes are not what was written",
            f"kvfs scrub {mountpoint}; dmesg",
        ),
    )
    yield _scrub(
        stats["scrub"],
        now,
        ask(
            "scrub",
            f"a whole pass within {_SCRUB_DAYS_MAX} days, nothing rotten",
            "rot is found while a copy may still be somewhere",
            f"kvfs scrub {mountpoint}",
        ),
    )
    yield _space(
        stats["space"],
        ask(
            "free space",
            f"{_FREE_SHARE_WANTED:.0%} or more, counting what reclaim may remove",
            "cleaning costs more the fuller the ring is; without reclaim writes fail",
            "kvfs ls; rm -r what is not needed, or a larger ring (kvfs plan)",
        ),
    )
    yield _warm_limit(
        stats["warm"],
        ask(
            "warm memory",
            "1 GiB or more",
            "a session that fits is resumed at the speed of memory",
            f"kvfs mount {mountpoint} DEV --warm SIZE",
        ),
    )
    yield _warm_hits(
        stats,
        ask(
            "warm hits",
            f"{_WARM_HITS_WANTED:.0%} or more of reads",
            "the rest waits for the device",
            f"kvfs mount {mountpoint} DEV --warm SIZE; hints of agents (docs/prefetch.md)",
        ),
    )
    yield _hot_hits(
        stats["hot_hit_rate"],
        ask(
            "hot hits",
            f"{_HOT_HITS_WANTED:.0%} or more, as far as agents tell",
            "what is not on the accelerator is fetched while layers compute",
            "a larger HotPool (hot_bytes=), or fewer sessions a process",
        ),
    )
    yield _cold_reads(
        stats["latency"]["cold_read"],
        ask(
            "cold reads",
            f"p99 at most {_COLD_P99_WANTED_MS:g} ms",
            "a resume waits for the slowest of them",
            f"kvfs doctor {stats['source']} (scheduler, PCIe, wear)",
        ),
    )


def _damage(stats: dict[str, Any], question: Question) -> Check:
    for name in ("damage", "failure"):
        if stats[name]:
            return question.bad(Status.ERROR, str(stats[name]))
    if stats["unrecovered"]:
        found = "what the last daemon had answered is not shown: mount without -o ro"
        return question.bad(Status.WARNING, found)
    if stats["superblock_lost"]:
        found = "one of the two superblocks could not be read at the mount"
        return question.bad(Status.WARNING, found)
    return question.ok("none")


def _errors(errors: dict[str, int], question: Question) -> Check:
    found = ", ".join(f"{count} {kind}" for kind, count in errors.items())
    return question.judged(found, good=not any(errors.values()), otherwise=Status.WARNING)


def _scrub(scrub: dict[str, Any], now: float, question: Question) -> Check:
    if scrub["rotten"]:
        found = f"{len(scrub['rotten'])} rotten extents in this or the last pass"
        return question.bad(Status.ERROR, found)
    if scrub["finished"] is None:
        return question.bad(Status.ADVICE, "never finished on this ring")
    days = (now - scrub["finished"]) / _DAY_SECONDS
    found = f"{days:.1f} days ago"
    return question.judged(found, good=days <= _SCRUB_DAYS_MAX, otherwise=Status.WARNING)


def _space(space: dict[str, int], question: Question) -> Check:
    left = max(space["free"], space["available"])
    found = f"{format_size(left)} of {format_size(space['total'])}"
    good = left >= space["total"] * _FREE_SHARE_WANTED
    return question.judged(found, good=good, otherwise=Status.WARNING)


def _warm_limit(warm: dict[str, int], question: Question) -> Check:
    found = f"{format_size(warm['taken'])} in use of at most {format_size(warm['limit'])}"
    return question.judged(found, good=warm["limit"] >= _WARM_MIN, otherwise=Status.ADVICE)


def _warm_hits(stats: dict[str, Any], question: Question) -> Check:
    hits, cold = stats["warm"]["hits"], stats["latency"]["cold_read"]["count"]
    if hits + cold < _READS_MIN:
        return question.unknown(f"only {hits + cold} reads since the mount")
    share = hits / (hits + cold)
    return question.judged(f"{share:.1%}", good=share >= _WARM_HITS_WANTED, otherwise=Status.ADVICE)


def _hot_hits(rate: float | None, question: Question) -> Check:
    if rate is None:
        return question.unknown("no agent has told (KVRouter does)")
    return question.judged(f"{rate:.1%}", good=rate >= _HOT_HITS_WANTED, otherwise=Status.ADVICE)


def _cold_reads(latency: dict[str, float], question: Question) -> Check:
    if not latency["count"]:
        return question.unknown("none since the mount")
    found = f"p50 {latency['p50_ms']:g} ms, p99 {latency['p99_ms']:g} ms"
    good = latency["p99_ms"] <= _COLD_P99_WANTED_MS
    return question.judged(found, good=good, otherwise=Status.ADVICE)

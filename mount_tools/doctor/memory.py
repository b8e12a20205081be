"""Memory: how much, in which pages, and what the warm tier may take of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvfs.mount.memory import cgroup_limit
from mount_tools.common import format_size, parse_size
from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.measure import measured_copy
from mount_tools.doctor.mountinfo import Filesystem, filesystem_of
from mount_tools.doctor.system import System

_GIB = 1024**3
_WARM_MOST = 16 * _GIB
_PAGES = "/sys/kernel/mm/transparent_hugepage"
_COPY_WANTED = 4e9

_AVAILABLE = Question(
    "memory",
    "available",
    "more than the warm tier may take (a quarter of all, at most 16 GiB)",
    "warm memory is a tmpfs: what is not there is swapped, or the kernel ends a process",
    "kvfs mount MNT DEV --warm SIZE",
)
_CGROUP = Question(
    "memory",
    "limit of the control group",
    "none, or 2 GiB and more",
    "warm memory counts in it, and the mount takes at most half of it",
    "systemctl set-property UNIT MemoryMax=SIZE (a container: --memory SIZE)",
)
_HUGE = Question(
    "memory",
    "transparent huge pages",
    "madvise or always",
    "buffers that are touched in pages of 2 MiB cost a tenth of those in 4 KiB",
    f"echo madvise > {_PAGES}/enabled",
)
_SHMEM = Question(
    "memory",
    "huge pages in tmpfs",
    "not deny",
    "root's daemon mounts a tmpfs with large pages for warm memory; deny forbids all of them",
    f"echo never > {_PAGES}/shmem_enabled (never leaves it to each mount)",
)
_RESERVED = Question(
    "memory",
    "reserved huge pages",
    "none that nobody uses",
    "neither a tmpfs nor the page cache can use them",
    "sysctl -w vm.nr_hugepages=0",
)
_COPY = Question(
    "memory",
    "bandwidth of a copy",
    f"{_COPY_WANTED / 1e9:.0f} GB/s or more",
    "a warm session is loaded at most that fast",
    "look for a processor's power limit, busy neighbours, or memory on another node (numactl -H)",
)


def checks(system: System) -> Iterator[Check]:
    facts = meminfo(system)
    yield _available(facts)
    yield _cgroup(system, facts)
    yield _huge(system)
    yield _shmem(system)
    yield _reserved(facts)
    if system.is_this_machine:
        yield judge_copy(measured_copy())


def meminfo(system: System) -> dict[str, int]:
    """Of /proc/meminfo: bytes by name, and numbers of pages."""
    facts = {}
    for line in (system.text("/proc/meminfo") or "").splitlines():
        match = re.fullmatch(r"(\S+):\s+(\d+)( kB)?", line)
        if match:
            facts[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return facts


def _available(facts: dict[str, int]) -> Check:
    total, available = facts.get("MemTotal"), facts.get("MemAvailable")
    if total is None or available is None:
        return _AVAILABLE.unknown("/proc/meminfo cannot be read", "free -h")
    found = f"{format_size(available)} of {format_size(total)}"
    good = available > min(_WARM_MOST, total // 4)
    return _AVAILABLE.judged(found, good=good, otherwise=Status.WARNING)


def _cgroup(system: System, facts: dict[str, int]) -> Check:
    if not system.exists("/proc/self/cgroup"):
        return _CGROUP.unknown("/proc/self/cgroup cannot be read")
    limit, total = cgroup_limit(system.root), facts.get("MemTotal")
    if limit is None or (total is not None and limit >= total):
        return _CGROUP.ok("none")
    good = limit >= 2 * _GIB
    return _CGROUP.judged(format_size(limit), good=good, otherwise=Status.WARNING)


def _huge(system: System) -> Check:
    chosen = _chosen(system.text(f"{_PAGES}/enabled"))
    if chosen is None:
        return _HUGE.unknown(f"{_PAGES}/enabled cannot be read")
    return _HUGE.judged(chosen, good=chosen != "never", otherwise=Status.ADVICE)


def _shmem(system: System) -> Check:
    chosen = _chosen(system.text(f"{_PAGES}/shmem_enabled"))
    if chosen is None:
        return _SHMEM.unknown(f"{_PAGES}/shmem_enabled cannot be read")
    return _SHMEM.judged(chosen, good=chosen != "deny", otherwise=Status.WARNING)


def _chosen(text: str | None) -> str | None:
    match = re.search(r"\[(\S+)\]", text or "")
    return match[1] if match else None


def _reserved(facts: dict[str, int]) -> Check:
    free, size = facts.get("HugePages_Free"), facts.get("Hugepagesize")
    if free is None or size is None:
        return _RESERVED.unknown("/proc/meminfo does not tell")
    found = f"{format_size(free * size)} reserved and not used"
    return _RESERVED.judged(found, good=free * size < _GIB, otherwise=Status.ADVICE)


# -- the tmpfs


def tmpfs_checks(system: System, directory: Path) -> Iterator[Check]:
    """Of the directory in which warm memory lies."""
    facts = meminfo(system)
    filesystem = filesystem_of(system, directory)
    size_question = Question(
        "memory",
        f"size of {directory}",
        "a quarter of the memory (at most 16 GiB), 1 GiB at the least",
        "warm memory is a directory of it",
        f"mount -o remount,size=16G {filesystem.mountpoint if filesystem else directory} "
        "(a container: --shm-size 16g)",
    )
    pages_question = Question(
        "memory",
        f"large pages of {directory}",
        "huge=within_size, or a mount by root, which brings its own",
        "fresh memory costs 60 us a MiB in pages of 2 MiB, 900 in pages of 4 KiB",
        f"mount -t tmpfs -o huge=within_size,size=16G,mode=0700,uid={os.geteuid()} tmpfs DIR, "
        "then kvfs mount --warm-dir DIR",
    )
    if filesystem is None:
        yield size_question.unknown("the table of mounts cannot be read", f"df -h {directory}")
        yield pages_question.unknown("the table of mounts cannot be read")
        return
    if filesystem.kind != "tmpfs":
        found = f"{filesystem.kind} on {filesystem.mountpoint}, not a tmpfs"
        yield size_question.bad(Status.WARNING, found, "kvfs mount MNT DEV --warm-dir TMPFS")
        return
    yield _size(system, directory, filesystem, facts, size_question)
    huge = next((each for each in filesystem.options if each.startswith("huge=")), "huge=never")
    good = huge not in ("huge=never", "huge=deny")
    if not good and os.geteuid() == 0 and filesystem.mountpoint == Path("/dev/shm"):
        yield pages_question.ok(f"{huge}; root's daemon mounts its own on it")
    else:
        yield pages_question.judged(huge, good=good, otherwise=Status.ADVICE)


def _size(
    system: System,
    directory: Path,
    filesystem: Filesystem,
    facts: dict[str, int],
    question: Question,
) -> Check:
    size = _size_of(system, directory, filesystem, facts)
    if size is None:
        return question.unknown("neither the table of mounts nor statfs tells")
    wanted = min(_WARM_MOST, facts.get("MemTotal", 0) // 4)
    if size < _GIB:
        return question.bad(Status.WARNING, format_size(size))
    return question.judged(format_size(size), good=size >= wanted, otherwise=Status.ADVICE)


def _size_of(
    system: System, directory: Path, filesystem: Filesystem, facts: dict[str, int]
) -> int | None:
    """By its option; without one it is half of the memory (tmpfs(5))."""
    if system.is_this_machine:
        try:
            status = os.statvfs(directory)
        except OSError:
            return None
        return status.f_blocks * status.f_frsize
    option = next((each for each in filesystem.options if each.startswith("size=")), None)
    if option is not None:
        return parse_size(option.removeprefix("size="))
    return facts["MemTotal"] // 2 if "MemTotal" in facts else None


def judge_copy(bytes_a_second: float) -> Check:
    """Of one thread's copy."""
    found = f"{bytes_a_second / 1e9:.1f} GB/s by one thread (measured in less than a second)"
    good = bytes_a_second >= _COPY_WANTED
    return _COPY.judged(found, good=good, otherwise=Status.ADVICE)

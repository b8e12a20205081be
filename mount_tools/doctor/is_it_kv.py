"""Is it KV? Three steps that operators do by hand, as one report on a process.

What the allocator gave out against what it keeps; how full the pool of KV blocks is; which
sessions are long. What cannot be seen from outside is said so, with the way to see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvfs.mount.mounts import mounts
from mount_tools.common import CommandError, format_size
from mount_tools.doctor import gpu
from mount_tools.doctor.check import NOTHING, Check, Question, Status
from mount_tools.doctor.endpoint import Endpoint, may_ask, read_endpoint
from mount_tools.doctor.process import Held, Memory, command_line, held_by, memory_of
from mount_tools.doctor.system import System
from mount_tools.mountpoints import answered
from mount_tools.sessions import Session, find_sessions

_STEP_1, _STEP_2, _STEP_3 = "1 allocated, reserved", "2 blocks in use", "3 sessions by length"
_FRAGMENTED_SHARE = 0.2
_POOL_FULL_SHARE = 0.95
_KV_SHARE = 0.5
_USED_BY_ENGINE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")


@dataclass(frozen=True, slots=True)
class Seen:
    """All that was seen of a process and its children. `gpu_bytes` is None where nobody tells."""

    pid: int
    command: str
    processes: int
    memory: Memory
    gpu_bytes: int | None
    held: Held
    endpoint: Endpoint | None
    listens: tuple[int, ...]
    sessions: Sequence[Session]

    @property
    def open_sessions(self) -> list[Session]:
        return [each for each in self.sessions if each.path in self.held.open_sessions]

    def told(self, *names: str) -> float | None:
        """By the process itself: the first of these metrics that it has."""
        return None if self.endpoint is None else self.endpoint.first(names)

    @property
    def kv_bytes(self) -> tuple[int, bool] | None:
        """KV that the process holds, and whether that is exact. Else at most that: what the
        sessions have that it has open. None where nothing tells."""
        told = self.told("kv_hot_bytes")
        if told is not None:
            return int(told), True
        if self.held.open_sessions:
            return sum(session.size for session in self.open_sessions), False
        return None


def look_at(system: System, pid: int, metrics_port: int | None) -> Seen:
    """Raises CommandError when there is no such process, or it shows nothing."""
    try:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        raise CommandError(f"there is no process {pid}; list them with: ps aux") from None
    except psutil.AccessDenied:
        raise CommandError(f"process {pid} is another user's: run as root") from None
    pids = [pid, *(child.pid for child in children)]
    memories = [memory for each in pids if (memory := memory_of(system, each)) is not None]
    if not memories:
        raise CommandError(f"process {pid} has ended")
    held = held_by(system, pids, mounts())
    listens, endpoint = endpoint_of(system, pids, metrics_port)
    return Seen(
        pid=pid,
        command=" ".join(command_line(system, pid)) or "?",
        processes=len(pids),
        memory=sum(memories, Memory()),
        gpu_bytes=gpu.memory_of(system, set(pids)),
        held=held,
        endpoint=endpoint,
        listens=tuple(sorted(listens)),
        sessions=_sessions(held),
    )


def endpoint_of(
    system: System, pids: list[int], metrics_port: int | None = None
) -> tuple[set[int], Endpoint | None]:
    """The ports on which these processes listen, and the first of their endpoints that tells."""
    ports = {port: pid for pid in pids for port in _listening(pid)}
    if metrics_port is not None:
        asked = {metrics_port}
    else:
        asked = {port for port, pid in ports.items() if may_ask(port, command_line(system, pid))}
    answers = (read_endpoint(port) for port in sorted(asked))
    return set(ports), next((each for each in answers if each is not None), None)


def _listening(pid: int) -> list[int]:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):
        return []
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def _sessions(held: Held) -> list[Session]:
    """Of the mounts that it has something open on, the longest first; of one that hangs none."""
    found: list[Session] = []
    for mountpoint in held.mounts:
        try:
            found += answered(mountpoint, lambda top=mountpoint: list(find_sessions(top)))  # type: ignore[misc]
        except (CommandError, OSError):
            continue
    return sorted(found, key=lambda session: session.size, reverse=True)


# -- the report


def checks(seen: Seen) -> Iterator[Check]:
    yield _memory(seen)
    yield _allocator(seen)
    yield _pool(seen)
    yield _requests(seen)
    yield _warm(seen)
    yield _length(seen)


def verdict(seen: Seen) -> str:
    """One line: is it KV?"""
    where, used = _biggest(seen)
    known = seen.kv_bytes
    pool = seen.told(*_USED_BY_ENGINE)
    if known is None and pool is not None:
        return (
            f"the engine's KV pool is {pool:.0%} full; the pool itself is of a fixed size, so "
            f"{format_size(used)} of {where} does not grow with it"
        )
    if known is None:
        return "it cannot be told: the process has no session open here and no metrics were read"
    kv, is_exact = known
    share = kv / used if used else 0.0
    amount = f"{format_size(kv)} of {format_size(used)} {where} ({share:.0%})"
    if is_exact:
        return f"{'yes' if share >= _KV_SHARE else 'no'}: {amount} is KV"
    # An adapter holds a layer at most twice: slabs, and a workspace in which they are gathered.
    # What is kept past KVFS (a DynamicCache, an engine's own pool) nobody sees from outside.
    if 2 * share < _KV_SHARE:
        return (
            f"no, as far as it is in KVFS: the sessions that it has open are {amount}; it holds "
            f"them twice at the most"
        )
    return f"maybe: the sessions that it has open are {amount}; it says itself how much is hot"


def _biggest(seen: Seen) -> tuple[str, int]:
    if seen.gpu_bytes is not None:
        return "GPU memory", seen.gpu_bytes
    return "resident memory", seen.memory.rss


def _memory(seen: Seen) -> Check:
    question = Question(
        _STEP_1, "memory of the process", NOTHING,
        "anonymous memory is weights, KV and all else that was allocated; shared is warm memory "
        "that is mapped",
    )  # fmt: skip
    memory = seen.memory
    on_gpu = "not told" if seen.gpu_bytes is None else format_size(seen.gpu_bytes)
    return question.ok(
        f"resident {format_size(memory.rss)} (anonymous {format_size(memory.anon)}, files "
        f"{format_size(memory.file)}, shared {format_size(memory.shmem)}) in {seen.processes} "
        f"processes; GPU {on_gpu}"
    )


def _allocator(seen: Seen) -> Check:
    known = judge_allocator(_STEP_1, seen.endpoint)
    if known is not None:
        return known
    question = _fragmentation(_STEP_1)
    if seen.held.has_torch:
        command = "in it: torch.cuda.memory_allocated(), torch.cuda.memory_reserved()"
        return question.unknown("only the process itself knows", command)
    if seen.held.is_whole:
        return question.unknown("no libtorch is mapped in this process")
    return question.unknown("another user's process: run as root")


def judge_allocator(group: str, endpoint: Endpoint | None) -> Check | None:
    """None where the process does not tell (KVRouter on a GPU does)."""
    samples = {} if endpoint is None else endpoint.samples
    allocated = samples.get("kv_torch_allocated_bytes")
    reserved = samples.get("kv_torch_reserved_bytes")
    if allocated is None or not reserved:
        return None
    unused = (reserved - allocated) / reserved
    found = (
        f"{format_size(allocated)} allocated, {format_size(reserved)} reserved: {unused:.0%} unused"
    )
    good = unused < _FRAGMENTED_SHARE
    return _fragmentation(group).judged(found, good=good, otherwise=Status.WARNING)


def _fragmentation(group: str) -> Question:
    return Question(
        group,
        "torch's allocator",
        f"less than {_FRAGMENTED_SHARE:.0%} of what it keeps unused",
        "what is reserved and not allocated is fragmented, or waits to be used again: it is not KV",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and one HotPool for all sessions",
    )


def _pool(seen: Seen) -> Check:
    question = Question(
        _STEP_2,
        "KV pool",
        f"less than {_POOL_FULL_SHARE:.0%} full",
        "a full pool preempts requests, or moves KV down and up again",
        "fewer sessions at once, or a larger pool (vLLM: --gpu-memory-utilization; KVFS: "
        "HotPool(bytes))",
    )
    endpoint = seen.endpoint
    if endpoint is None:
        return question.unknown(
            _no_metrics(seen), f"kvfs doctor --pid {seen.pid} --metrics-port PORT"
        )
    used, budget = endpoint.first(["kv_hot_bytes"]), endpoint.first(["kv_hot_budget_bytes"])
    if used is not None and budget:
        found, share = f"{format_size(used)} of {format_size(budget)}", used / budget
    else:
        told = seen.told(*_USED_BY_ENGINE)
        if told is None:
            found = f"port {endpoint.port} tells of no KV pool that is known here"
            return question.unknown(found, f"curl localhost:{endpoint.port}/metrics")
        found, share = "by the engine's own figure", told
    status = Status.ADVICE if used is not None else Status.WARNING
    return question.judged(
        f"{share:.0%} ({found})", good=share < _POOL_FULL_SHARE, otherwise=status
    )


def _no_metrics(seen: Seen) -> str:
    if seen.listens:
        ports = ", ".join(map(str, seen.listens))
        return f"it listens on {ports}: none is known to tell metrics (unusual ones are not asked)"
    return "it tells no metrics: it listens on no port of this machine"


def _requests(seen: Seen) -> Check:
    question = Question(
        _STEP_2, "requests", "none that wait",
        "requests wait when no block is free for their prompt",
        "more memory for KV, or fewer clients",
    )  # fmt: skip
    running, waiting = seen.told(*_RUNNING), seen.told(*_WAITING)
    if running is None or waiting is None:
        return question.unknown("not told")
    found = f"{running:.0f} running, {waiting:.0f} waiting"
    return question.judged(found, good=waiting == 0, otherwise=Status.ADVICE)


def _warm(seen: Seen) -> Check:
    question = Question(
        _STEP_2, "KVFS", NOTHING,
        "warm files are the daemon's memory, counted as shared in who maps them; open layer "
        "files cost no memory",
    )  # fmt: skip
    held = seen.held
    if not held.is_whole:
        return question.unknown("another user's process: run as root")
    return question.ok(
        f"{format_size(held.warm_mapped)} of warm files mapped, {held.warm_open} open; "
        f"{held.open_files} files open on mounts, of {len(held.open_sessions)} sessions"
    )


def _length(seen: Seen) -> Check:
    question = Question(
        _STEP_3, "longest sessions", NOTHING,
        "a few long sessions take what many short ones would: fork, window= or rm them",
    )  # fmt: skip
    if not seen.sessions:
        return question.unknown("it has nothing open on a mount that answers", "kvfs ls MNT")
    size = sum(session.size for session in seen.sessions)
    tenth = seen.sessions[: max(1, len(seen.sessions) // 10)]
    share = sum(session.size for session in tenth) / size if size else 0.0
    opened = sum(session.size for session in seen.open_sessions)
    return question.ok(
        f"{len(seen.sessions)} sessions of {format_size(size)}; it has {len(seen.open_sessions)} "
        f"open, of {format_size(opened)}; the longest tenth holds {share:.0%}"
    )


def is_open(seen: Seen, path: Path) -> bool:
    return path in seen.held.open_sessions

"""GPUs, as nvidia-smi tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mount_tools.common import format_size
from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.system import System

_MIB = 1024**2
_FULL_SHARE = 0.92


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bytes of its memory."""

    index: int
    name: str
    total: int
    used: int


def gpus(system: System) -> list[Gpu] | None:
    """None where there is no nvidia-smi that works."""
    text = system.output(
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.used",
        "--format=csv,noheader,nounits",
    )
    return None if text is None else [gpu for line in text.splitlines() if (gpu := _gpu(line))]


def memory_of(system: System, pids: set[int]) -> int | None:
    """Bytes on all GPUs of some processes. None where it is not told: no nvidia-smi, or a
    container, which sees other numbers of processes than the driver."""
    text = system.output(
        "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"
    )
    rows = [line.split(",") for line in (text or "").splitlines()]
    found = [int(used) * _MIB for pid, used in _numbers(rows) if int(pid) in pids]
    return sum(found) if found else None


def checks(system: System) -> Iterator[Check]:
    found = gpus(system)
    question = Question(
        "GPU",
        "memory",
        f"less than {_FULL_SHARE:.0%} in use",
        "above, torch's allocator begins to fail on pieces that do not fit between others",
        "kvfs doctor --pid PID (tells reserved against allocated); a smaller HotPool, or fewer "
        "sessions",
    )
    if not found:
        yield question.unknown("no nvidia-smi that tells of a GPU", "nvidia-smi")
    for gpu in found or ():
        share = gpu.used / gpu.total if gpu.total else 0.0
        told = (
            f"{gpu.index} {gpu.name}: {format_size(gpu.used)} of {format_size(gpu.total)} "
            f"({share:.0%})"
        )
        yield question.judged(told, good=share < _FULL_SHARE, otherwise=Status.WARNING)


def _gpu(line: str) -> Gpu | None:
    """`0, NVIDIA H100 80GB HBM3, 81559, 12345`; `[N/A]` where it does not know."""
    parts = [part.strip() for part in line.split(",")]
    try:
        return Gpu(int(parts[0]), parts[1], int(parts[2]) * _MIB, int(parts[3]) * _MIB)
    except (ValueError, IndexError):
        return None


def _numbers(rows: list[list[str]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if len(row) == 2 and all(cell.strip().isdecimal() for cell in row):
            yield row[0], row[1]

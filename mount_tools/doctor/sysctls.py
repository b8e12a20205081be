"""Numbers that the kernel lets one set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.system import System


@dataclass(frozen=True, slots=True)
class _Sysctl:
    name: str
    wanted: str
    is_good: Callable[[int], bool]
    otherwise: Status
    value: int
    why: str

    @property
    def path(self) -> str:
        return f"/proc/sys/{self.name.replace('.', '/')}"

    @property
    def question(self) -> Question:
        command = f"sysctl -w {self.name}={self.value}"
        return Question("kernel", self.name, self.wanted, self.why, command)


_SWAPPINESS = _Sysctl(
    "vm.swappiness", "at most 10, or no swap", lambda n: n <= 10, Status.WARNING, 1,
    "warm memory is a tmpfs, and the kernel may swap that out: a warm read is then a cold one",
)  # fmt: skip
_SYSCTLS = (
    _Sysctl(
        "vm.vfs_cache_pressure", "1 to 100", lambda n: 1 <= n <= 100, Status.ADVICE, 100,
        "above, the kernel forgets names and inodes of the mount early and asks for them again; "
        "with 0 it never gives them back",
    ),
    _Sysctl(
        "vm.max_map_count", "65530 or more", lambda n: n >= 65530, Status.WARNING, 262144,
        "each warm file that is in use is a mapping of the daemon, and engines map files too",
    ),
    _Sysctl(
        "vm.dirty_ratio", "at most 40", lambda n: n <= 40, Status.ADVICE, 20,
        "the ring passes by the page cache; what others leave in it comes down at once, and "
        "readers of the same device wait for it",
    ),
    _Sysctl(
        "vm.dirty_background_ratio", "at most 10", lambda n: n <= 10, Status.ADVICE, 5,
        "so that others' writes begin early and go on evenly beside reads of the ring",
    ),
)  # fmt: skip
_AIO = Question(
    "kernel",
    "fs.aio-max-nr",
    "65536 or more, a fifth of it free",
    "KVFS uses io_uring and threads; engines and databases beside it use the kernel's AIO, and "
    "fail with EAGAIN when it is used up",
    "sysctl -w fs.aio-max-nr=1048576",
)


def checks(system: System) -> Iterator[Check]:
    yield _swappiness(system)
    for each in _SYSCTLS:
        value = system.number(each.path)
        if value is None:
            yield each.question.unknown(f"{each.path} cannot be read")
        else:
            good = each.is_good(value)
            yield each.question.judged(str(value), good=good, otherwise=each.otherwise)
    yield _aio(system)


def _swappiness(system: System) -> Check:
    value, swaps = system.number(_SWAPPINESS.path), system.text("/proc/swaps")
    if value is None:
        return _SWAPPINESS.question.unknown(f"{_SWAPPINESS.path} cannot be read")
    has_none = swaps is not None and len(swaps.splitlines()) <= 1
    good = has_none or _SWAPPINESS.is_good(value)
    found = f"{value}, and no swap" if has_none else str(value)
    return _SWAPPINESS.question.judged(found, good=good, otherwise=_SWAPPINESS.otherwise)


def _aio(system: System) -> Check:
    limit, used = system.number("/proc/sys/fs/aio-max-nr"), system.number("/proc/sys/fs/aio-nr")
    if limit is None:
        return _AIO.unknown("/proc/sys/fs/aio-max-nr cannot be read")
    found = f"{limit}, {used or 0} in use"
    good = limit >= 65536 and (used or 0) <= limit * 0.8
    return _AIO.judged(found, good=good, otherwise=Status.ADVICE)

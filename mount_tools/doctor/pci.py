"""The links of GPUs and NVMe disks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.system import System

_DEVICES = "/sys/bus/pci/devices"
_NVME = 0x010802
_DISPLAYS = (0x0300, 0x0302, 0x1200)  # VGA, 3D, and processing accelerators (PCI class codes)
_MAKERS = {0x10DE: "NVIDIA GPU", 0x1002: "AMD GPU", 0x8086: "Intel GPU"}
_WHY = (
    "KV goes through this link on each resume; a slot of fewer lanes, or of an older generation, "
    "halves it"
)


@dataclass(frozen=True, slots=True)
class _Link:
    speed: float
    lanes: int

    @classmethod
    def read(cls, system: System, place: str, which: str) -> _Link | None:
        """`which` is current or max. `16.0 GT/s PCIe`; `Unknown` where there is no such link."""
        speed = re.match(r"([\d.]+) GT/s", system.text(f"{place}/{which}_link_speed") or "")
        lanes = system.number(f"{place}/{which}_link_width")
        return cls(float(speed[1]), lanes) if speed and lanes else None

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.lanes}"


def checks(system: System) -> Iterator[Check]:
    found = False
    for address in system.names(_DEVICES):
        kind = _kind(system, f"{_DEVICES}/{address}")
        if kind is not None:
            found = True
            yield _check(system, address, kind)
    if not found:
        question = Question("PCIe", "GPU and NVMe", "at full speed and width", _WHY)
        yield question.unknown("none on this machine's bus, as far as it shows one", "lspci -vv")


def _kind(system: System, place: str) -> str | None:
    """None for other devices."""
    try:
        code = int(system.text(f"{place}/class") or "", 16)
        maker = int(system.text(f"{place}/vendor") or "", 16)
    except ValueError:
        return None
    if code == _NVME:
        return "NVMe"
    return _MAKERS.get(maker) if code >> 8 in _DISPLAYS else None


def _check(system: System, address: str, kind: str) -> Check:
    place = f"{_DEVICES}/{address}"
    now, most = _Link.read(system, place, "current"), _Link.read(system, place, "max")
    question = Question(
        "PCIe",
        f"{kind} {address}",
        f"{most or 'its full speed and width'}",
        _WHY,
        f"lspci -vv -s {address} | grep Lnk (then: another slot, or the BIOS' link speed)",
    )
    if now is None or most is None:
        return question.unknown("the kernel does not tell (a virtual device)", question.command)
    if now.lanes < most.lanes:
        return question.bad(Status.WARNING, f"{now}: fewer lanes than it has")
    if now.speed < most.speed:
        # A GPU that has nothing to do slows its link down.
        is_idle = kind != "NVMe"
        status = Status.ADVICE if is_idle else Status.WARNING
        hint = "; GPUs do that while idle, look again under load" if is_idle else ""
        return question.bad(status, f"{now}: slower than it could be{hint}")
    return question.ok(str(now))

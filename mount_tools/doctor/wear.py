"""SSDs: which, and how worn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.system import System

_WARNING_PCT, _ADVICE_PCT = 90, 70
_HOT_CELSIUS = 70
_DATA_UNIT = 512_000  # bytes of a unit in the log page (NVM Express base specification, 5.16.1.3)


@dataclass(frozen=True, slots=True)
class Smart:
    """The health log of an NVMe disk, as far as it was told."""

    used_pct: int
    spare_pct: int
    spare_threshold_pct: int
    written_bytes: int
    media_errors: int
    celsius: int | None


def checks(system: System) -> Iterator[Check]:
    """Of each disk that is no partition, no loop device and no dm."""
    for disk in system.names("/sys/block"):
        if system.exists(f"/sys/block/{disk}/device"):
            yield _check(system, disk)


def _check(system: System, disk: str) -> Check:
    question = Question(
        "wear",
        disk,
        f"less than {_ADVICE_PCT} % of its life used, spare blocks, no media errors",
        "a ring writes all that agents think; a worn disk slows down, then refuses writes",
        "replace the disk; kvfs plan MODEL --tokens-a-day N --tbw TB tells how fast it wears",
    )
    if not disk.startswith("nvme"):
        return question.unknown(
            f"{_describe(system, disk)}; it tells no wear here", f"smartctl -a /dev/{disk}"
        )
    smart = read_smart(system, disk)
    if smart is None:
        found = f"{_describe(system, disk)}; wear is told to root by nvme-cli or smartmontools"
        return question.unknown(found, f"sudo nvme smart-log /dev/{disk}")
    found = (
        f"{_describe(system, disk)}; {smart.used_pct} % used, "
        f"{smart.written_bytes / 1e12:.1f} TB written, {smart.spare_pct} % spare, "
        f"{smart.media_errors} media errors"
    )
    if smart.celsius is not None:
        found += f", {smart.celsius} C"
    return question.ok(found) if _is_well(smart) else question.bad(_status(smart), found)


def _is_well(smart: Smart) -> bool:
    return _status(smart) is Status.OK


def _status(smart: Smart) -> Status:
    if smart.spare_pct < smart.spare_threshold_pct or smart.used_pct >= 100:
        return Status.ERROR
    if smart.media_errors or smart.used_pct >= _WARNING_PCT:
        return Status.WARNING
    is_hot = smart.celsius is not None and smart.celsius > _HOT_CELSIUS
    return Status.ADVICE if is_hot or smart.used_pct >= _ADVICE_PCT else Status.OK


def _describe(system: System, disk: str) -> str:
    """Model and kind; which cells an SSD has no kernel tells."""
    model = (
        system.text(f"/sys/block/{disk}/device/model") or ""
    ).strip() or "a disk without a name"
    spins = system.number(f"/sys/block/{disk}/queue/rotational")
    zoned = system.text(f"/sys/block/{disk}/queue/zoned")
    kind = {0: "SSD", 1: "rotating"}.get(-1 if spins is None else spins, "kind unknown")
    return f"{model} ({kind}{', zoned' if zoned not in (None, 'none') else ''})"


def read_smart(system: System, disk: str) -> Smart | None:
    """By `nvme`, else `smartctl`; both want root."""
    log = _parsed(system.output("nvme", "smart-log", f"/dev/{disk}", "-o", "json"))
    if log is None:
        whole = _parsed(system.output("smartctl", "-A", "-j", f"/dev/{disk}"))
        log = (whole or {}).get("nvme_smart_health_information_log")
        is_kelvin = False
    else:
        is_kelvin = True
    return None if not isinstance(log, dict) else _smart(log, is_kelvin=is_kelvin)


def _smart(log: dict[str, Any], *, is_kelvin: bool) -> Smart | None:
    """nvme-cli shortened some names, and tells degrees in Kelvin."""
    try:
        celsius = log.get("temperature")
        return Smart(
            used_pct=int(log.get("percent_used", log.get("percentage_used"))),  # type: ignore[arg-type]
            spare_pct=int(log.get("avail_spare", log.get("available_spare"))),  # type: ignore[arg-type]
            spare_threshold_pct=int(
                log.get("spare_thresh", log.get("available_spare_threshold", 0))
            ),
            written_bytes=int(log["data_units_written"]) * _DATA_UNIT,
            media_errors=int(log.get("media_errors", 0)),
            celsius=None if celsius is None else int(celsius) - (273 if is_kelvin else 0),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _parsed(text: str | None) -> dict[str, Any] | None:
    try:
        document = json.loads(text or "")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None

"""Rates, from one look at a mount to the next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mount_tools.top.source import Seen

_LOOKS = 120
_SMOOTHED_LOOKS = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """A second: operations and units as counts, all others in bytes. `payload` is what programs
    read and the files' bytes that were written, `device` what that took there."""

    operations: float
    payload_read: float
    device_read: float
    payload_written: float
    device_written: float
    promoted: float
    evicted: float
    reclaimed_units: float


@dataclass(slots=True)
class History:
    """The last looks at one mount: begins anew when it was mounted again."""

    rates: deque[Rates] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    _looks: deque[Seen] = field(default_factory=lambda: deque(maxlen=_SMOOTHED_LOOKS))

    @property
    def newest(self) -> Seen | None:
        return self._looks[-1] if self._looks else None

    def add(self, seen: Seen) -> bool:
        """Whether it is another mount than before."""
        before = self.newest
        is_other = before is not None and not seen.is_of_the_same_mount(before)
        if is_other:
            self._looks.clear()
            self.rates.clear()
        elif before is not None:
            self.rates.append(_between(before, seen))
        self._looks.append(seen)
        return is_other

    @property
    def amplification(self) -> float | None:
        """Bytes written to the device for each of files, over the last looks; None when nothing
        was written."""
        if len(self._looks) < 2:
            return None
        first, last = self._looks[0].stats["counters"], self._looks[-1].stats["counters"]
        return amplification(
            last["device_written"] - first["device_written"],
            last["payload_written"] - first["payload_written"],
        )


def amplification(device_written: int, payload_written: int) -> float | None:
    return device_written / payload_written if payload_written else None


def _between(before: Seen, after: Seen) -> Rates:
    seconds = max(after.at - before.at, 1e-3)

    def rate(group: str, name: str) -> float:
        return float(after.stats[group][name] - before.stats[group][name]) / seconds

    return Rates(
        operations=rate("counters", "operations"),
        payload_read=rate("counters", "payload_read"),
        device_read=rate("counters", "device_read"),
        payload_written=rate("counters", "payload_written"),
        device_written=rate("counters", "device_written"),
        promoted=rate("warm", "promoted"),
        evicted=rate("warm", "evicted"),
        reclaimed_units=rate("counters", "reclaimed_units"),
    )

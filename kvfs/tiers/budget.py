"""What guesses may use of the device: the bandwidth that demand leaves.

A wrong guess may cost bandwidth, never a demand read its place. So demand and guesses draw on
one bucket of tokens, a token a byte, that fills at the device's measured bandwidth: demand
without asking, guesses only from what is left. And while a demand read waits for a thread no
guess begins. (Of what has begun, demand goes first in the threads' queue: see engine/io.py.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

_BURST_SECONDS = 0.1
_DEBT_SECONDS = 1.0
# A lower measurement takes so much of the one before: a device that has little to do looks slow.
_SLOWER = 0.98
_SAMPLE_MIN = 16 * 1024 * 1024


@dataclass(slots=True)
class Bandwidth:
    """Bytes a second, measured while something is read; what was once seen fades slowly."""

    rate: float = 500e6
    _busy_since: float = 0.0
    _in_flight: int = 0
    _bytes: int = 0
    _seconds: float = 0.0

    def began(self, now: float) -> None:
        if self._in_flight == 0:
            self._busy_since = now
        self._in_flight += 1

    def ended(self, size: int, now: float) -> None:
        self._in_flight -= 1
        self._bytes += size
        self._seconds += now - self._busy_since
        self._busy_since = now
        if self._bytes >= _SAMPLE_MIN and self._seconds > 0:
            self.rate = max(self._bytes / self._seconds, self.rate * _SLOWER)
            self._bytes, self._seconds = 0, 0.0


@dataclass(slots=True)
class Budget:
    """At most `in_flight_max` guesses at once. Times are seconds of one clock that does not
    go back."""

    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    in_flight_max: int = 1
    in_flight: int = 0
    _tokens: float = 0.0
    _filled_at: float = -inf

    @property
    def rate(self) -> float:
        return self.bandwidth.rate

    def demand(self, size: int, now: float) -> None:
        """So many bytes were read for somebody who waits. A debt is forgiven beyond what the
        device does in a second: guesses wait for demand, not for its past."""
        self._fill(now)
        self._tokens = max(self._tokens - size, -self.rate * _DEBT_SECONDS)

    def begin(self, size: int, now: float, *, demand_waits: bool) -> bool:
        """Whether a guess of about so many bytes may begin now; then it wants one of `end`. One
        that is larger than the bucket may, too, and those after it wait for longer."""
        self._fill(now)
        if demand_waits or self.in_flight >= self.in_flight_max or self._tokens <= 0:
            return False
        self._tokens -= size
        self.in_flight += 1
        self.bandwidth.began(now)
        return True

    def end(self, estimate: int, size: int, now: float) -> None:
        """A guess that was to read about `estimate` bytes has read `size`."""
        assert self.in_flight > 0
        self.in_flight -= 1
        self._tokens += estimate - size
        self.bandwidth.ended(size, now)

    def _fill(self, now: float) -> None:
        filled = self._tokens + (now - self._filled_at) * self.rate
        self._tokens = min(filled, self.rate * _BURST_SECONDS)
        self._filled_at = now

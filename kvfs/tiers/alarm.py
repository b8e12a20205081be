"""A level that has been too high for so long that something has to be done about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Alarm:
    """On once the level has been above `limit` at each look for `seconds`, until it is not."""

    limit: float
    seconds: float
    is_on: bool = False
    _since: float | None = None

    def saw(self, level: float, now: float) -> bool:
        """A look at a time in seconds, which does not go back. Whether it went on, or off, by
        that: so it can be told once."""
        was_on = self.is_on
        if level <= self.limit:
            self._since = None
        elif self._since is None:
            self._since = now
        self.is_on = self._since is not None and now - self._since >= self.seconds
        return self.is_on != was_on

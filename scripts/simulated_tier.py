"""A warm tier in simulated time, for programs that ask what the planner would do."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from kvfs.engine.io import Completion, Step, wait
from kvfs.tiers.profiles import Profile

_PROFILE = Profile()


@dataclass(slots=True)
class Up:
    """A session in memory, or on its way there until `whole_at`."""

    since: float
    whole_at: float
    size: int
    by_guess: bool


class SimulatedTier:
    """`limit` bytes of memory, of which the least recently used groups go as the profile says,
    before a device that reads one session after the other at `bandwidth` bytes a second; demand
    goes before guesses. Implements kvfs.tiers.planner.Tier."""

    def __init__(self, bandwidth: float, limit: float = inf, profile: Profile = _PROFILE) -> None:
        self.now = 0.0
        self.sizes: dict[int, int] = {}
        self.up: OrderedDict[int, Up] = OrderedDict()
        self.taken = 0
        self.evicted = 0
        self.demanded = 0
        self.byte_seconds = 0.0
        self._bandwidth = bandwidth
        self._fill = limit * profile.warm_fill_pct / 100
        self._group = profile.warm_group
        self._free_at = 0.0
        self._arrivals: list[tuple[float, int, Completion[None]]] = []

    # -- kvfs.tiers.planner.Tier

    is_strained = False

    def is_whole(self, session: int) -> bool:
        return session in self.up

    def promote(self, session: int) -> Step[int]:
        size = self.size(session)
        arrives = max(self.now, self._free_at) + self.seconds_to_read(session)
        self._free_at = arrives
        self._put(session, Up(self.now, arrives, size, by_guess=True))
        arrival: Completion[None] = Completion()
        heapq.heappush(self._arrivals, (arrives, session, arrival))
        yield from wait(arrival)
        return size

    def demote(self, sessions: list[int]) -> Step[None]:
        for session in self.up.keys() & set(sessions):
            self._drop(session)
        return
        yield

    # -- what else happens

    def size(self, session: int) -> int:
        return self.sizes.get(session, 0)

    def seconds_to_read(self, session: int) -> float:
        return self.size(session) / self._bandwidth

    def demand(self, session: int, size: int) -> None:
        """Somebody reads the session, and waits until it is there; then it has `size` bytes."""
        up = self.up.get(session)
        if up is None:
            taken = self.seconds_to_read(session)
            self.demanded += self.size(session)
            self._free_at = max(self.now, self._free_at) + taken
            self._put(session, Up(self.now, self.now + taken, self.size(session), by_guess=False))
        else:
            self.up.move_to_end(session)
        self.grew(session, size)

    def grew(self, session: int, size: int) -> None:
        """By what was written."""
        self.sizes[session] = size
        up = self.up.get(session)
        if up is not None:
            self._account(up)
            self.taken += size - up.size
            up.size = size
            self._make_room()

    def goes_on(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now:
            self.now, _, arrival = heapq.heappop(self._arrivals)
            arrival.finish()
        self.now = now

    def _put(self, session: int, up: Up) -> None:
        self.up[session] = up
        self.taken += up.size
        self._make_room()

    def _make_room(self) -> None:
        if self.taken > self._fill:
            for session in list(self.up)[: min(self._group, len(self.up) - 1)]:
                self._drop(session)
                self.evicted += 1

    def _drop(self, session: int) -> None:
        up = self.up.pop(session)
        self._account(up)
        self.taken -= up.size

    def _account(self, up: Up) -> None:
        self.byte_seconds += up.size * (self.now - up.since)
        up.since = self.now


def drive(step: Step[None]) -> Completion[None]:
    """To its end, each wait at a time of the simulation."""
    completion: Completion[None] = Completion()

    def resume() -> None:
        try:
            next(step).when_done(resume)
        except StopIteration:
            completion.finish()

    resume()
    return completion

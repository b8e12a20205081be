"""Traces of requests, and how many of their blocks a policy would have held. No bytes move.

A request hits the blocks that are held when it comes; then all its blocks are, and
the policy names what goes until no more than the capacity are left, those of the request not
spared. No block counts twice in a request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfs.engine.policy import Hint, Policy

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HintGiven:
    """After request number `request`, for all its blocks."""

    time_s: float
    request: int
    hint: Hint


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times, each a row of block ids 0 .. blocks - 1, the last
    block of the prompt first. `hints` in the order of their times."""

    times_s: Sequence[float]
    requests: Sequence[Ids]
    blocks: int
    hints: Sequence[HintGiven] = ()

    @property
    def accesses(self) -> int:
        return sum(map(len, self.requests))


@dataclass(slots=True)
class Replay:
    """One trace under one policy."""

    trace: Trace
    policy: Policy
    capacity: int

    def hit_ratio(self, on_request: Callable[[], None] = lambda: None) -> float:
        """Of the accesses to blocks. Call once: the policy has seen the trace then."""
        is_held = np.zeros(self.trace.blocks, bool)
        hits = 0
        for time_s, request in self._with_hints():
            hits += int(np.count_nonzero(is_held[request]))
            is_held[request] = True
            self.policy.touch(request, time_s)
            excess = len(self.policy) - self.capacity
            if excess > 0:
                victims = self.policy.victims(excess, time_s)
                self.policy.remove(victims)
                is_held[victims] = False
            on_request()
        return hits / self.trace.accesses

    def _with_hints(self) -> Iterator[tuple[float, Ids]]:
        trace = self.trace
        hints = iter(trace.hints)
        given = next(hints, None)
        for number, (time_s, request) in enumerate(zip(trace.times_s, trace.requests, strict=True)):
            while given is not None and given.time_s <= time_s and given.request < number:
                self.policy.hint(trace.requests[given.request], given.hint)
                given = next(hints, None)
            yield time_s, request


class Foreknowledge:
    """MIN: what is used furthest in the future goes, what comes not spared (Belady, "A study of
    replacement algorithms for a virtual-storage computer", 1966, with bypass). No policy has
    more hits. Blocks that are used next by the same request are as good as each other: only
    their number is kept."""

    def __init__(self, trace: Trace) -> None:
        self._accesses = trace.accesses
        self._next_uses = _next_uses(trace.requests)

    def hit_ratio(self, capacity: int) -> float:
        waiting = [0] * len(self._next_uses)  # held blocks, by the request that uses them next
        furthest: list[int] = []
        held = hits = 0
        for number, next_uses in enumerate(self._next_uses):
            hits += waiting[number]
            held -= waiting[number]
            waiting[number] = 0
            for user, count in next_uses:
                if not waiting[user]:
                    heapq.heappush(furthest, -user)
                waiting[user] += count
                held += count
            while held > capacity:
                user = -furthest[0]
                gone = min(held - capacity, waiting[user])
                waiting[user] -= gone
                held -= gone
                if not waiting[user]:
                    heapq.heappop(furthest)
        return hits / self._accesses


def _next_uses(requests: Sequence[Ids]) -> list[list[tuple[int, int]]]:
    """For each request: which later requests use its blocks next, and how many of them each."""
    users = np.repeat(np.arange(len(requests)), [len(request) for request in requests])
    ids = np.concatenate(requests)
    order = np.argsort(ids, kind="stable")
    ids, users = ids[order], users[order]
    is_used_again = ids[1:] == ids[:-1]
    pairs = users[:-1][is_used_again] * len(requests) + users[1:][is_used_again]
    found: list[list[tuple[int, int]]] = [[] for _ in requests]
    for pair, count in zip(
        *map(np.ndarray.tolist, np.unique(pairs, return_counts=True)), strict=True
    ):
        user, next_user = divmod(pair, len(requests))
        found[user].append((next_user, count))
    return found

"""Policies by name, and those of the books: LRU, S3-FIFO, heat."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

import numpy as np

from kvfs.engine.policy import Hint, Keys, Victims
from kvfs.tiers.heat import HeatMap
from kvfs.tiers.ranked import RankedPolicy, Values
from kvfs.tiers.slots import Slots


def _values(keys: Keys) -> list[int]:
    return keys.tolist() if isinstance(keys, np.ndarray) else list(keys)


class LRU:
    """Least recently used."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def touch(self, keys: Keys, now_s: float) -> None:
        held = self._held
        for key in _values(keys):
            held[key] = None
            held.move_to_end(key)

    def hint(self, keys: Keys, hint: Hint) -> None:
        """Nothing is made of it."""

    def victims(self, count: int, now_s: float) -> Victims:
        return np.fromiter(islice(self._held, count), np.int64)

    def remove(self, keys: Keys) -> None:
        for key in _values(keys):
            self._held.pop(key, None)

    forget = remove


class S3FIFO:
    """Three queues: what is new passes a small one, what was used meanwhile stays in the
    main one, and of what left the small one as many are remembered as the main one may hold.

    Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023.
    """

    _SMALL_SHARE = 0.1
    _USES_MAX = 3

    def __init__(self) -> None:
        self._small: OrderedDict[int, int] = OrderedDict()  # by key: uses since it came
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def touch(self, keys: Keys, now_s: float) -> None:
        for key in _values(keys):
            if key in self._small:
                self._small[key] = min(self._small[key] + 1, self._USES_MAX)
            elif key in self._main:
                self._main[key] = min(self._main[key] + 1, self._USES_MAX)
            elif key in self._ghosts:
                del self._ghosts[key]
                self._main[key] = 0
            else:
                self._small[key] = 0

    def hint(self, keys: Keys, hint: Hint) -> None:
        """Nothing is made of it."""

    def victims(self, count: int, now_s: float) -> Victims:
        """Goes through the queues as an eviction does; what it names waits at their heads."""
        small: list[int] = []
        main: list[int] = []
        named: list[int] = []
        small_target = self._SMALL_SHARE * len(self)
        while len(named) < count and (self._small or self._main):
            is_small = bool(self._small) and (len(self._small) >= small_target or not self._main)
            victim = self._next_of_small() if is_small else self._next_of_main()
            if victim is not None:
                named.append(victim)
                (small if is_small else main).append(victim)
        for queue, waiting in ((self._small, small), (self._main, main)):
            for key in reversed(waiting):
                queue[key] = 0
                queue.move_to_end(key, last=False)
        return np.array(named, np.int64)

    def _next_of_small(self) -> int | None:
        key, uses = self._small.popitem(last=False)
        if uses > 1:
            self._main[key] = 0
            return None
        return key

    def _next_of_main(self) -> int | None:
        key, uses = self._main.popitem(last=False)
        if uses > 0:
            self._main[key] = uses - 1
            return None
        return key

    def remove(self, keys: Keys) -> None:
        for key in _values(keys):
            if self._small.pop(key, None) is not None:
                self._ghosts[key] = None
            else:
                self._main.pop(key, None)
        while len(self._ghosts) > (1 - self._SMALL_SHARE) * len(self):
            self._ghosts.popitem(last=False)

    def forget(self, keys: Keys) -> None:
        for key in _values(keys):
            for queue in (self._small, self._main, self._ghosts):
                queue.pop(key, None)


class HeatPolicy(RankedPolicy):
    """The coldest by the heat map go first."""

    def __init__(self, history: int = 1 << 20) -> None:
        super().__init__(history)
        self._heat = HeatMap()

    def _used(self, slots: Slots) -> None:
        self._heat.access(slots)

    def _hinted(self, slots: Slots, hint: Hint) -> None:
        """Nothing is made of it."""

    def _worth(self, slots: Slots, now_s: float) -> Values:
        return self._heat.heat(slots)

    def _forgotten(self, slots: Slots) -> None:
        self._heat.forget(slots)

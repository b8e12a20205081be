"""What policies share that give every key a value: the lowest go next, found in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvfs.engine.policy import Hint, Keys, Victims
from kvfs.tiers.slots import Slots, SlotTable

Values = npt.NDArray[np.floating]
Scalar = TypeVar("Scalar", bound=np.generic)

# Of what is held one part in so many is a candidate. Candidates are chosen anew when one part in
# so many of them went, or when twice as many have gathered.
_POOL_SHARE = 8
_POOL_USED = 4
_POOL_MIN = 64


class RankedPolicy(ABC):
    """Not all values are computed at each eviction: those of the candidates are. These had the
    lowest when all were looked at, or came since, or were hinted at since.

    `history` limits how many keys are remembered that are no longer held, at about 150 bytes
    each.
    """

    def __init__(self, history: int = 1 << 20) -> None:
        self._history = history
        self._slots = SlotTable()
        self._is_known = np.zeros(0, bool)
        self._used_s = np.zeros(0)
        self._now_s = 0.0
        self._is_held = np.zeros(0, bool)
        self._held = 0
        self._pool: Slots = np.zeros(0, np.int64)
        self._is_pooled = np.zeros(0, bool)
        self._pool_left = 0  # victims until it is chosen anew
        self._pool_max = 0

    @abstractmethod
    def _used(self, slots: Slots) -> None:
        """At `_now_s`; `_is_known` and `_used_s` tell of the uses before."""

    @abstractmethod
    def _hinted(self, slots: Slots, hint: Hint) -> None: ...

    @abstractmethod
    def _worth(self, slots: Slots, now_s: float) -> Values: ...

    @abstractmethod
    def _forgotten(self, slots: Slots) -> None:
        """They may become slots of other keys."""

    def _grown(self, size: int) -> None:
        """Slots below `size` are used from now on."""
        self._is_known = grown(self._is_known, size)
        self._used_s = grown(self._used_s, size)
        self._is_held = grown(self._is_held, size)
        self._is_pooled = grown(self._is_pooled, size)

    def __len__(self) -> int:
        return self._held

    def touch(self, keys: Keys, now_s: float) -> None:
        slots = self._slots.take(keys)
        if self._slots.size > len(self._is_known):
            self._grown(self._slots.size)
        self._now_s = now_s
        self._used(slots)
        self._is_known[slots] = True
        self._used_s[slots] = now_s
        came = slots[~self._is_held[slots]]
        self._is_held[came] = True
        self._held += came.size
        self._nominate(came)
        if len(self._slots) - self._held > self._history:
            self._limit_history()

    def _limit_history(self) -> None:
        """The oldest go, more than must: this looks at all."""
        gone = np.flatnonzero(self._is_known & ~self._is_held)
        self._forget(gone[lowest(self._used_s[gone], gone.size - self._history * 7 // 8)])

    def hint(self, keys: Keys, hint: Hint) -> None:
        slots = self._slots.find(keys)
        self._hinted(slots, hint)
        self._nominate(slots)

    def _nominate(self, slots: Slots) -> None:
        slots = slots[self._is_held[slots] & ~self._is_pooled[slots]]
        self._is_pooled[slots] = True
        self._pool = np.concatenate([self._pool, slots])

    def victims(self, count: int, now_s: float) -> Victims:
        count = min(count, self._held)
        if count > self._pool_left or len(self._pool) > self._pool_max:
            self._choose_pool(count, now_s)
        worth = self._worth(self._pool, now_s)
        self._pool_left -= count
        return self._slots.keys(self._pool[lowest(worth, count)])

    def _choose_pool(self, count: int, now_s: float) -> None:
        held = np.flatnonzero(self._is_held)
        size = max(_POOL_USED * count, self._held // _POOL_SHARE, _POOL_MIN)
        self._is_pooled[self._pool] = False
        self._pool = held[lowest(self._worth(held, now_s), size)]
        self._is_pooled[self._pool] = True
        self._pool_left = size // _POOL_USED
        self._pool_max = 2 * size

    def remove(self, keys: Keys) -> None:
        slots = self._slots.find(keys)
        slots = slots[self._is_held[slots]]
        self._is_held[slots] = self._is_pooled[slots] = False
        self._held -= slots.size
        self._pool = self._pool[self._is_held[self._pool]]

    def forget(self, keys: Keys) -> None:
        self.remove(keys)
        self._forget(self._slots.find(keys))

    def _forget(self, slots: Slots) -> None:
        self._forgotten(slots)
        self._is_known[slots] = False
        self._slots.give_back(slots)


def lowest(values: Values, count: int) -> Slots:
    """The places of the `count` lowest values, the lowest first, the first among equals."""
    if count < values.size:
        bound = np.partition(values, count - 1)[count - 1] if count else -np.inf
        places = np.flatnonzero(values <= bound)
    else:
        places = np.arange(values.size)
    return places[np.argsort(values[places], kind="stable")][:count]


def grown(array: npt.NDArray[Scalar], size: int) -> npt.NDArray[Scalar]:
    """With zeros behind, up to `size` entries."""
    wider = np.zeros((size, *array.shape[1:]), array.dtype)
    wider[: len(array)] = array
    return wider

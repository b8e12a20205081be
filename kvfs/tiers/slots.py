"""Keys of any value as small ints, which arrays are indexed by."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfs.engine.policy import Keys

Slots = npt.NDArray[np.int64]


@dataclass(slots=True)
class SlotTable:
    """The slots of keys. A slot that was given back is given out again."""

    _slots: dict[int, int] = field(default_factory=dict)
    _keys: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    _free: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    @property
    def size(self) -> int:
        """Above all slots: what arrays by slot must hold."""
        return len(self._keys)

    def take(self, keys: Keys) -> Slots:
        """The slots of keys, new ones for those that have none."""
        slots = self._look_up(keys)
        missing = np.flatnonzero(slots < 0)
        if missing.size:
            if len(self._free) < missing.size:
                self._grow(int(missing.size))
            for place in missing.tolist():
                slot = slots[place] = self._free.pop()
                self._keys[slot] = key = int(keys[place])
                self._slots[key] = slot
        return slots

    def find(self, keys: Keys) -> Slots:
        """The slots of those keys that have one."""
        slots = self._look_up(keys)
        return slots[slots >= 0]

    def all(self) -> Slots:
        """The slots of all keys."""
        return np.fromiter(self._slots.values(), np.int64, len(self._slots))

    def keys(self, slots: Slots) -> npt.NDArray[np.int64]:
        return self._keys[slots]

    def give_back(self, slots: Slots) -> None:
        for key in self._keys[slots].tolist():
            self._free.append(self._slots.pop(key))

    def _look_up(self, keys: Keys) -> Slots:
        known = self._slots
        values = keys.tolist() if isinstance(keys, np.ndarray) else keys
        return np.array([known.get(key, -1) for key in values], np.int64)

    def _grow(self, wanted: int) -> None:
        size = self.size
        added = max(wanted, size // 4, 1024)
        self._keys = np.concatenate([self._keys, np.zeros(added, np.int64)])
        self._free = [*range(size + added - 1, size - 1, -1), *self._free]

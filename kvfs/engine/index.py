"""The index: ordered items, those that the ring holds and those on their way there.

`committed` items are what the frames on the device add up to, no more: that is
what a checkpoint describes. Changes of operations that are answered but not yet in
the ring lie above them. A batch is sealed (its changes become the items of one
commit unit) and later committed (its frames are on the device).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from kvfs.engine.format import ITEM_OVERHEAD, KIND_BYTE, Item, ItemKind
from kvfs.engine.io import Step

_KEY_END = b"\xff" * 18


@dataclass(slots=True)
class Index:
    """Items by key, newest first. `get` and `scan` are steps: an index that lies on
    the device has to wait for nodes."""

    _committed: SortedDict[bytes, bytes] = field(default_factory=SortedDict)
    _pending: SortedDict[bytes, tuple[int, bytes | None]] = field(default_factory=SortedDict)
    _open: dict[bytes, bytes | None] = field(default_factory=dict)
    _batch: int = 0
    inodes: int = 0
    size: int = 0  # bytes of the committed items as a checkpoint packs them

    def get(self, key: bytes) -> Step[bytes | None]:
        if key in self._pending:
            pending: tuple[int, bytes | None] = self._pending[key]
            return pending[1]
        return self.committed(key)
        yield

    def scan(self, low: bytes, high: bytes = _KEY_END, limit: int = 1 << 62) -> Step[list[Item]]:
        """The items with low <= key <= high, in order, at most `limit`."""
        found: list[Item] = []
        for item in self._merged(low, high):
            found.append(item)
            if len(found) == limit:
                break
        return found
        yield

    def put(self, key: bytes, value: bytes) -> None:
        self._open[key] = value
        self._pending[key] = (self._batch, value)

    def delete(self, key: bytes) -> None:
        self._open[key] = None
        self._pending[key] = (self._batch, None)

    @property
    def has_changes(self) -> bool:
        return bool(self._open)

    def seal(self) -> tuple[int, list[Item]]:
        """End the open batch: its number and its changes, by key."""
        sealed, items = self._batch, sorted(self._open.items())
        self._batch += 1
        self._open = {}
        return sealed, items

    def settle(self, batch: int, items: list[Item]) -> None:
        """The items of a sealed batch are committed: they no longer lie above."""
        for key, _ in items:
            pending = self._pending.get(key)
            if pending is not None and pending[0] <= batch:
                del self._pending[key]

    def apply(self, items: list[Item]) -> None:
        """Change the committed items: a commit unit is in the ring, or was replayed."""
        for key, value in items:
            old = self._committed.pop(key, None)
            if old is not None:
                self._count(key, old, -1)
            if value is not None:
                self._committed[key] = value
                self._count(key, value, 1)

    def _count(self, key: bytes, value: bytes, sign: int) -> None:
        self.size += sign * (ITEM_OVERHEAD + len(value))
        self.inodes += sign * (key[KIND_BYTE] == ItemKind.INODE)

    def committed(self, key: bytes) -> bytes | None:
        value: bytes | None = self._committed.get(key)
        return value

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        """All committed items, in order."""
        return list(self._committed.items())

    def __len__(self) -> int:
        return len(self._committed)

    def _merged(self, low: bytes, high: bytes) -> Iterator[Item]:
        above = self._pending.irange(low, high)
        next_above = next(above, None)
        for key in self._committed.irange(low, high):
            while next_above is not None and next_above <= key:
                value = self._pending[next_above][1]
                if value is not None:
                    yield next_above, value
                shadowed = next_above == key
                next_above = next(above, None)
                if shadowed:
                    break
            else:
                yield key, self._committed[key]
        while next_above is not None:
            value = self._pending[next_above][1]
            if value is not None:
                yield next_above, value
            next_above = next(above, None)

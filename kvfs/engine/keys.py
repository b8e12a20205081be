"""The keys of inodes: each has its own, which dies with it and its last extent.

What is encrypted under a dead key is noise as soon as the key is nowhere on the device:
two superblocks after the checkpoint that no longer holds it. Until that checkpoint it stays
here, since nodes of the one before still name the inode. Belongs to the loop's thread, but
for `find`, which others may call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvfs.engine.ciphers import new_secret
from kvfs.engine.format import (
    KEY_ENTRY,
    KIND_BYTE,
    TABLE_INODES,
    Extent,
    Item,
    ItemKind,
    key_owner,
)

PART_ENTRIES = 2048  # in the mean: then there are twice as many parts
_HASH = 0x9E37_79B9_7F4A_7C15  # Fibonacci hashing: Knuth, TAOCP 3, 6.4
_HASH_BITS = 64
Part = npt.NDArray[np.void]


class Keys:
    """In parts, as they are stored: an inode belongs to the part that its hash says.
    `changed` are those that the next checkpoint has to write."""

    def __init__(self, parts: list[Part] | None = None) -> None:
        self.parts = parts or [np.empty(0, KEY_ENTRY)]
        self.changed: set[int] = set()
        self._count = sum(map(len, self.parts))
        self._fresh: dict[int, bytes] = {}  # of inodes that are not in the ring yet
        self._told: set[int] = set()  # those of them that a frame names
        self._dead: set[int] = set()

    def __len__(self) -> int:
        return self._count

    # -- looking

    def find(self, ino: int) -> bytes | None:
        """The secret of an inode, if it has one."""
        fresh = self._fresh.get(ino)
        if fresh is not None:
            return fresh
        # Another thread sees one list or the other when parts are divided, not both.
        parts = self.parts
        entries = parts[_part_of(ino, len(parts))]
        at = _place(entries, ino)
        return None if at is None else entries["secret"][at].tobytes()

    def find_or_make(self, ino: int) -> bytes:
        """The secret that is to be used for what an inode writes."""
        secret = self.find(ino)
        if secret is None:
            secret = self._fresh[ino] = new_secret()
        return secret

    @property
    def fresh(self) -> int:
        """How many are of inodes that are not in the ring yet."""
        return len(self._fresh)

    @property
    def has_dead(self) -> bool:
        """Whether some died that the device still holds."""
        return bool(self._dead)

    # -- as units are committed, or replayed

    def untold(self, items: Iterable[Item]) -> Iterator[tuple[int, bytes]]:
        """The secrets that a commit unit has to name: those of inodes that are in none yet."""
        for ino, value in _inodes(items):
            if value is not None and ino not in self._told and self._find_stored(ino) is None:
                self._told.add(ino)
                yield ino, self.find_or_make(ino)

    def learn(self, ino: int, secret: bytes) -> None:
        """A unit that is being replayed names it."""
        self._fresh[ino] = secret

    def apply(self, extents: list[Extent], items: list[Item], dead: list[Extent]) -> None:
        """A commit unit is in the ring: extents came and went, and inodes."""
        made = {ino for ino, value in _inodes(items) if value is not None} & self._fresh.keys()
        if made:
            self._store({ino: self._fresh[ino] for ino in made})
            # Only now: other threads look here first.
            for ino in made:
                del self._fresh[ino]
            self._told -= made
        for extent in extents:
            self._count_extent(extent, 1)
        for extent in dead:
            self._count_extent(extent, -1)
        for ino, value in _inodes(items):
            if value is None:
                self._fresh.pop(ino, None)
                self._told.discard(ino)
                self._set_gone(ino)

    def _count_extent(self, extent: Extent, change: int) -> None:
        if extent.cipher:
            number = self._part_of(extent.key_id)
            entries = self.parts[number]
            at = _place(entries, extent.key_id)
            if at is not None:
                # On a damaged ring there may be more than are counted.
                entries["extents"][at] = max(0, int(entries["extents"][at]) + change)
                self._changed(number, at)

    def _set_gone(self, ino: int) -> None:
        number = self._part_of(ino)
        at = _place(self.parts[number], ino)
        if at is not None:
            self.parts[number]["has_inode"][at] = False
            self._changed(number, at)

    def _changed(self, number: int, at: int) -> None:
        self.changed.add(number)
        entries = self.parts[number]
        if not entries["extents"][at] and not entries["has_inode"][at]:
            self._dead.add(int(entries["ino"][at]))

    def _find_stored(self, ino: int) -> int | None:
        return _place(self.parts[self._part_of(ino)], ino)

    def _store(self, secrets: dict[int, bytes]) -> None:
        """Those of new inodes."""
        by_part: dict[int, list[tuple[int, int, bool, bytes]]] = defaultdict(list)
        for ino, secret in secrets.items():
            by_part[self._part_of(ino)].append((ino, 0, True, secret))
        for number, added in by_part.items():
            entries = np.concatenate([self.parts[number], np.array(added, KEY_ENTRY)])
            self.parts[number] = entries[np.argsort(entries["ino"])]
        self.changed.update(by_part)
        self._count += len(secrets)
        while self._count > PART_ENTRIES * len(self.parts):
            self._divide()

    def _divide(self) -> None:
        entries = np.concatenate(self.parts)
        entries = entries[np.argsort(entries["ino"])]
        count = 2 * len(self.parts)
        numbers = (entries["ino"] * np.uint64(_HASH)) >> np.uint64(_shift(count))
        self.parts = [entries[numbers == number] for number in range(count)]
        self.changed = set(range(count))

    def _part_of(self, ino: int) -> int:
        return _part_of(ino, len(self.parts))

    def learn_from(self, other: Keys) -> None:
        """What another table has and this one lacks."""
        stored = ((int(e["ino"]), e["secret"].tobytes()) for e in np.concatenate(other.parts))
        for ino, secret in [*stored, *other._fresh.items()]:
            if self.find(ino) is None:
                self.learn(ino, secret)

    def of(self, inodes: Iterable[int], extents: Iterable[Extent]) -> Keys:
        """A table of what is there and nothing else; who has no secret yet is given one."""
        used = Counter(extent.key_id for extent in extents if extent.cipher)
        there = set(inodes)
        entries = [
            (ino, used[ino], ino in there, self.find_or_make(ino))
            for ino in sorted(there | used.keys())
            if ino in there or self.find(ino) is not None
        ]
        keys = Keys([np.array(entries, KEY_ENTRY)])
        while len(keys) > PART_ENTRIES * len(keys.parts):
            keys._divide()
        keys.changed = set(range(len(keys.parts)))
        return keys

    def counts(self) -> set[tuple[int, int, bool]]:
        """Inode, live extents, and whether it is there, of all that is stored."""
        stored = np.concatenate(self.parts)
        return {(int(e["ino"]), int(e["extents"]), bool(e["has_inode"])) for e in stored}

    # -- checkpoints

    def living(self, number: int) -> Part:
        """The part of the table as a checkpoint stores it."""
        entries = self.parts[number]
        return entries[(entries["extents"] > 0) | (entries["has_inode"] > 0)]

    def checkpointed(self) -> None:
        """The device holds what is alive; the dead are forgotten."""
        for number in {self._part_of(ino) for ino in self._dead}:
            self._count -= len(self.parts[number])
            self.parts[number] = self.living(number)
            self._count += len(self.parts[number])
        self._dead.clear()
        self.changed.clear()


def _part_of(ino: int, count: int) -> int:
    return ((ino * _HASH) & (1 << _HASH_BITS) - 1) >> _shift(count)


def _shift(count: int) -> int:
    """The highest bits of the hash are the number of one of so many parts, a power of two."""
    return _HASH_BITS + 1 - count.bit_length()


def _place(entries: Part, ino: int) -> int | None:
    at = int(np.searchsorted(entries["ino"], np.uint64(ino)))
    return at if at < len(entries) and entries["ino"][at] == ino else None


def _inodes(items: Iterable[Item]) -> Iterator[tuple[int, bytes | None]]:
    for key, value in items:
        if key[0] == TABLE_INODES and key[KIND_BYTE] == ItemKind.INODE:
            yield key_owner(key), value

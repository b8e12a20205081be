"""The extents of files in use: where each lies, and how many slices refer to it."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from kvfs.engine.buffer import Kept
from kvfs.engine.codec import CodecChoice, Layout
from kvfs.engine.format import (
    REFERENCES,
    Extent,
    extent_key,
    references_key,
    round_up,
    unpack_references,
)
from kvfs.engine.index import Index
from kvfs.engine.io import Step
from kvfs.engine.nodes import error


@dataclass(slots=True)
class NewExtent:
    """An extent that is not in the ring yet: its bytes are the pieces, in order."""

    extent_id: int
    ino: int
    session_id: int
    offset: int
    size: int
    pieces: list[Kept]
    choice: CodecChoice
    layout: Layout


@dataclass(slots=True, eq=False)
class Known:
    """An extent that a file in use refers to.

    `references` counts its slices in the maps of all files, `users` the files in use
    among them, and what else needs it in memory. `extent` is where it lies, `new` its
    bytes until it does; both are None for one that the extent table lacks. `taken` is
    what it takes on the device, in bytes, once that is known; `given_up` is what of it is free
    once the ring says that nobody refers to it any longer.
    """

    extent_id: int
    references: int = 0
    extent: Extent | None = None
    new: NewExtent | None = None
    taken: int = 0
    given_up: int = 0
    users: int = 0


@dataclass(slots=True)
class ExtentTable:
    """The part of the extent table that is in use. `dropped` are those that lost their
    last reference since the last seal; `given_up` are the bytes of these, and of those whose
    end is on its way to the ring."""

    index: Index
    dropped: list[Known] = field(default_factory=list)
    given_up: int = 0
    _known: dict[int, Known] = field(default_factory=dict)

    def __getitem__(self, extent_id: int) -> Known:
        return self._known[extent_id]

    def __len__(self) -> int:
        return len(self._known)

    def find(self, extent_id: int) -> Step[Known]:
        """It stays as it is only until something else runs, unless it is used."""
        known = self._known.get(extent_id)
        if known is not None:
            return known
        value = yield from self.index.get(extent_key(extent_id))
        references = yield from self.index.get(references_key(extent_id))
        known = Known(extent_id, 1 if references is None else unpack_references(references))
        if value is not None:
            known.extent = Extent.unpack(extent_id, value)
            known.taken = round_up(known.extent.stored)
        return known

    def use(self, known: Known) -> None:
        self._known[known.extent_id] = known
        known.users += 1

    def let_go(self, known: Known) -> None:
        known.users -= 1
        if known.users == 0:
            del self._known[known.extent_id]

    def refer(self, known: Known, change: int) -> None:
        """So many more slices refer to it; without any it is dropped."""
        old, known.references = known.references, known.references + change
        if known.references == 0:
            self.index.delete(extent_key(known.extent_id))
            self.use(known)
            self.dropped.append(known)
            known.given_up = known.taken if known.extent is not None else 0
            self.given_up += known.given_up
        if known.references > 1:
            value = REFERENCES.pack(known.references)
            self.index.put(references_key(known.extent_id), value)
        elif old > 1:
            self.index.delete(references_key(known.extent_id))

    def ended(self, known: Known) -> None:
        """The ring says so."""
        self.given_up -= known.given_up
        self.let_go(known)

    def moved(self, extent: Extent) -> None:
        """It lies elsewhere now."""
        known = self._known.get(extent.extent_id)
        if known is not None:
            known.extent = extent


def place_of(known: Known) -> Extent:
    """Raises EIO when the extent table lacks it."""
    if known.extent is None:
        raise error(errno.EIO, f"extent {known.extent_id} is missing from the extent table")
    return known.extent

"""Hot memory: equal slabs and workspaces under one budget, for all sessions of a process.

KV is kept in slabs of one size, a block of tokens of one layer each, so that no churn of
sessions can fragment it. Attention wants a layer in one piece: its slabs are gathered in a
workspace. Two workspaces are the least a forward needs: one for the layer that computes,
one for the layer that is being fetched. Where the budget has room each layer keeps its
own, and only new tokens are copied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from kvfs.tiers.handles import HandleTable
from kvfs.torch.errors import HotBudgetError
from kvfs.torch.layout import RowLayout
from kvfs.torch.slab import Heads, Rows, TokenKV
from kvfs.torch.staging import whole_pages
from kvfs.torch.transfer import Mover, mover_for

DEFAULT_BUDGET_BYTES = 128 << 20
SLAB_BYTES = 256 << 10
WORKSPACES = 2
_GROWTH = 1.25


View = TypeVar("View", bound=TokenKV)


class _Memory(Generic[View]):
    """Memory of the pool, and how it was last seen: making a view anew costs 20 us."""

    def __init__(
        self, memory: torch.Tensor, see: Callable[[torch.Tensor, RowLayout], View]
    ) -> None:
        """`see` makes the view."""
        self.nbytes = memory.numel()
        self._memory = memory
        self._see = see
        self._view: View | None = None

    def seen_as(self, layout: RowLayout) -> View:
        """As K and V of that shape; what is in it stays."""
        view = self._view
        if view is None or (view.layout is not layout and view.layout != layout):
            view = self._view = self._see(self._memory, layout)
        return view


class Slab(_Memory[Rows]):
    """A block of tokens of one layer, in rows as in its file."""

    def __init__(self, mover: Mover, nbytes: int) -> None:
        """`nbytes` on the mover's device."""
        super().__init__(mover.memory(nbytes), mover.rows)


class Workspace(_Memory[Heads]):
    """Memory for one layer in one piece; `content` says what its first `valid` tokens are."""

    def __init__(self, mover: Mover, nbytes: int) -> None:
        """`nbytes` on the mover's device."""
        super().__init__(mover.memory(nbytes), mover.heads)
        self.content: object = None
        self.valid = 0


@dataclass
class _Lent:
    """The workspaces of one owner, and whether a forward of it runs."""

    spaces: list[Workspace] = field(default_factory=list)
    active: bool = False


class HotPool:
    """The hot bytes on one device that the caches of a process share.

    Safe to use from several threads.

    `on_pressure(nbytes)` is called, if it is set, when slabs of `nbytes` are wanted and not
    that many are free within the budget; it is called by the thread that uses a cache,
    before its forward takes them, so whoever owns the sessions may demote others then.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        slab_bytes: int = SLAB_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        """`budget_bytes` counts slabs and workspaces, in the memory of `device`.

        Without one it is 128 MiB, and is raised to two layers of the longest session.

        Raises:
            ValueError: a slab is not whole pages, or not even two fit the budget, or the
                device is neither the CPU nor a CUDA device.
        """
        if slab_bytes <= 0 or slab_bytes != whole_pages(slab_bytes):
            raise ValueError(f"a slab of {slab_bytes} bytes is not a whole number of pages")
        if budget_bytes is not None and budget_bytes < 2 * slab_bytes:
            raise HotBudgetError(
                f"a hot budget of {budget_bytes} bytes holds less than two slabs of "
                f"{slab_bytes}: give more bytes, or smaller slabs"
            )
        self.slab_bytes = slab_bytes
        self.on_pressure: Callable[[int], None] | None = None
        self.handles = HandleTable()
        self.mover = mover_for(torch.device(device))
        self._lock = threading.RLock()
        self._budget = DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes
        self._may_rise = budget_bytes is None
        self._slabs: list[Slab | None] = []
        self._idle: list[int] = []
        self._blank: list[int] = []
        self._lent: OrderedDict[object, _Lent] = OrderedDict()
        self._space_bytes = 0

    @property
    def device(self) -> torch.device:
        """Whose memory this is."""
        return self.mover.device

    @property
    def budget_bytes(self) -> int:
        """The most that slabs and workspaces take together."""
        return self._budget

    @property
    def used_bytes(self) -> int:
        """Bytes of the slabs that hold KV."""
        return self.used_slabs * self.slab_bytes

    @property
    def used_slabs(self) -> int:
        """Slabs that hold KV."""
        return len(self._slabs) - len(self._idle) - len(self._blank)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspaces."""
        return self._space_bytes

    @property
    def allocated_bytes(self) -> int:
        """What the pool has from the system: slabs in use and idle, and workspaces."""
        return (len(self._slabs) - len(self._blank)) * self.slab_bytes + self._space_bytes

    @property
    def free_slabs(self) -> int:
        """How many slabs can be taken now; workspaces of owners that rest make room."""
        with self._lock:
            busy = (lent.spaces for lent in self._lent.values() if lent.active)
            taken = sum(space.nbytes for spaces in busy for space in spaces)
            return max(0, self._budget - self.used_bytes - taken) // self.slab_bytes

    def slab(self, place: int, layout: RowLayout) -> Rows:
        """A slab that was taken, as rows of that shape."""
        slab = self._slabs[place]
        assert slab is not None
        return slab.seen_as(layout)

    def take(self, count: int) -> list[int]:
        """The places of up to `count` slabs, as many as are free; their content is undefined."""
        with self._lock:
            while self._free_now() < count and self._drop_a_workspace():
                pass
            return [self._take() for _ in range(min(count, max(0, self._free_now())))]

    def give(self, places: list[int]) -> None:
        """Take slabs back. Whoever still looks at one sees the next user's bytes."""
        if not places:
            return
        # The next user may be on another stream: the device must have done with them.
        self.mover.settle()
        with self._lock:
            self._idle += places

    def shrink(self, nbytes: int) -> int:
        """Give back to torch up to about `nbytes` that hold no KV: slabs, then workspaces of
        owners that rest. Returns the bytes."""
        with self._lock:
            before = self.allocated_bytes
            while before - self.allocated_bytes < nbytes and (
                self._drop_a_slab() or self._drop_a_workspace()
            ):
                pass
            return before - self.allocated_bytes

    def press(self, slabs: int) -> None:
        """Ask the owner of the sessions for room, if so many slabs are not free."""
        missing = slabs - self.free_slabs
        if missing > 0 and self.on_pressure is not None:
            self.on_pressure(missing * self.slab_bytes)

    def require(self, nbytes: int) -> None:
        """The budget is at least `nbytes`, two layers of a session, or is raised to it.

        Raises:
            HotBudgetError: it was given as less.
        """
        with self._lock:
            if nbytes > self._budget and not self._may_rise:
                raise HotBudgetError(
                    f"hot memory of {self._budget} bytes is less than two layers of a session "
                    f"({nbytes} bytes): give a larger budget, or none"
                )
            self._budget = max(self._budget, nbytes)

    def lend(self, owner: object, nbytes: int, want: int, slabs: int) -> list[Workspace] | None:
        """Workspaces of at least `nbytes` each, for a forward that will take `slabs` slabs.

        Two, and up to `want` where room for the slabs remains. They stay the owner's until
        `forgo`, or, once it rests, until slabs or another owner want the bytes.
        None: slabs take the room of the two, so that some must be given back first.

        Raises:
            HotBudgetError: two of them are more than the whole budget.
        """
        need = whole_pages(nbytes)
        with self._lock:
            self.require(WORKSPACES * need)
            lent = self._lent.setdefault(owner, _Lent())
            self._lent.move_to_end(owner)
            lent.active = True
            # The smallest ones first in line to go.
            lent.spaces.sort(key=lambda space: space.nbytes, reverse=True)
            while lent.spaces and lent.spaces[-1].nbytes < need:
                self._drop(lent)
            kept = slabs * self.slab_bytes
            while len(lent.spaces) > WORKSPACES and not self._make_room(kept):
                self._drop(lent)
            # Larger ones if that fits, so that a session that grows need not come each time.
            roomy = whole_pages(int(need * _GROWTH))
            if not lent.spaces and self._make_room(WORKSPACES * roomy + kept):
                self._fill(lent, WORKSPACES, roomy, keep=kept)
            self._fill(lent, WORKSPACES, need, keep=0)
            if len(lent.spaces) < WORKSPACES:
                return None
            self._fill(lent, want, lent.spaces[0].nbytes, keep=kept)
            return list(lent.spaces)

    def rest(self, owner: object) -> None:
        """The owner's forward is over: its workspaces may go if others want the bytes."""
        with self._lock:
            if owner in self._lent:
                self._lent[owner].active = False

    def forgo(self, owner: object) -> None:
        """The owner's workspaces are not needed any more."""
        with self._lock:
            lent = self._lent.pop(owner, _Lent())
            while lent.spaces:
                self._drop(lent)

    # Under the lock

    def _free_now(self) -> int:
        return (self._budget - self.used_bytes - self._space_bytes) // self.slab_bytes

    def _take(self) -> int:
        if self._idle:
            return self._idle.pop()
        place = self._blank.pop() if self._blank else len(self._slabs)
        if place == len(self._slabs):
            self._slabs.append(None)
        self._slabs[place] = Slab(self.mover, self.slab_bytes)
        return place

    def _fill(self, lent: _Lent, count: int, nbytes: int, keep: int) -> None:
        """Up to `count` workspaces, as long as `keep` bytes remain for slabs."""
        while len(lent.spaces) < count and self._make_room(nbytes + keep):
            self._add(lent, nbytes)

    def _make_room(self, nbytes: int) -> bool:
        while not self._has_room(nbytes) and self._drop_a_workspace():
            pass
        return self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self.used_bytes + self._space_bytes + nbytes <= self._budget

    def _add(self, lent: _Lent, nbytes: int) -> None:
        while self.allocated_bytes + nbytes > self._budget and self._drop_a_slab():
            pass
        lent.spaces.append(Workspace(self.mover, nbytes))
        self._space_bytes += nbytes

    def _drop_a_slab(self) -> bool:
        """One that holds no KV."""
        if not self._idle:
            return False
        place = self._idle.pop()
        self._slabs[place] = None
        self._blank.append(place)
        return True

    def _drop_a_workspace(self) -> bool:
        """Of the owner that rests longest."""
        for lent in self._lent.values():
            if lent.spaces and not lent.active:
                self._drop(lent)
                return True
        return False

    def _drop(self, lent: _Lent) -> None:
        self._space_bytes -= lent.spaces.pop().nbytes

"""Rows between files and hot memory: in place in host memory, by streams with a device.

On a device, what runs in the background runs on a side stream, beside what computes. Four
rules keep the two in order:

- `beside`: the side stream begins after what was queued where the work was given out, so it
  never overwrites what a kernel has yet to read;
- `join`: the compute stream waits for the side stream before it uses what was fetched;
- a piece of staging carries an event, and its next user waits for that;
- `settle`: the host waits for both before it writes what came from the device, and before a
  slab goes to another user.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kvfs.torch.layout import RowLayout
from kvfs.torch.slab import (
    DeviceHeads,
    DeviceRows,
    Heads,
    HostHeads,
    HostRows,
    Rows,
    by_token,
    bytes_of,
)
from kvfs.torch.staging import page_aligned, piece_bytes, staging

Part = tuple[Rows, int, int]
"""Tokens [first, last) of a slab."""


class Mover(Protocol):
    """Memory of one device and the ways to it. Safe to use from several threads."""

    @property
    def device(self) -> torch.device:
        """Where hot memory is."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory of the device that is used again and again: uint8, shape [nbytes]."""

    def rows(self, memory: torch.Tensor, layout: RowLayout) -> Rows:
        """Such memory, seen as rows of a file."""

    def heads(self, memory: torch.Tensor, layout: RowLayout) -> Heads:
        """Such memory, seen head by head."""

    def staging(self, layout: RowLayout) -> AbstractContextManager[memoryview]:
        """Host memory for rows on their way, of whole rows and whole pages."""

    def outgoing(self, parts: Iterable[Part], layout: RowLayout) -> Iterator[list[memoryview]]:
        """The rows of parts of slabs in host memory, in order, a few MiB of whole rows at a time;
        valid until the next are asked for."""

    def rows_of(self, kv: torch.Tensor) -> memoryview:
        """K and V, `[2, batch, kv_heads, n, head_dim]`, as n rows of a file."""

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` for another thread, in order after what this thread has queued so far."""

    def join(self) -> None:
        """What this thread queues from now on comes after what is queued beside it."""

    def settle(self) -> None:
        """Return when all is done that this thread has queued, and what is beside it."""


def mover_for(device: torch.device) -> Mover:
    """By the kind of device; ValueError if it is neither the CPU nor a CUDA device."""
    if device.type == "cpu":
        return HostMover()
    if device.type == "cuda":
        return DeviceMover(device)
    raise ValueError(f"hot memory is on the CPU or on a CUDA device, not on {device}")


class HostMover:
    """Hot memory is host memory: nothing is queued, and files are read and written in place."""

    device = torch.device("cpu")

    def memory(self, nbytes: int) -> torch.Tensor:
        """Page-aligned and touched."""
        with torch.inference_mode(False):
            return torch.frombuffer(page_aligned(nbytes), dtype=torch.uint8)

    def rows(self, memory: torch.Tensor, layout: RowLayout) -> Rows:
        """Seen by numpy too."""
        return HostRows(memory, layout)

    def heads(self, memory: torch.Tensor, layout: RowLayout) -> Heads:
        """Turned by numpy."""
        return HostHeads(memory, layout)

    def staging(self, layout: RowLayout) -> AbstractContextManager[memoryview]:
        """A piece that all pools of the process share."""
        return staging(layout)

    def outgoing(self, parts: Iterable[Part], layout: RowLayout) -> Iterator[list[memoryview]]:
        """Where they lie."""
        waiting: list[memoryview] = []
        for slab, first, last in parts:
            assert isinstance(slab, HostRows)
            waiting.append(slab.rows(first, last))
            if sum(map(len, waiting)) >= piece_bytes(layout):
                yield waiting
                waiting = []
        if waiting:
            yield waiting

    def rows_of(self, kv: torch.Tensor) -> memoryview:
        """A copy."""
        return bytes_of(by_token(kv))

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """As it is."""
        return work

    def join(self) -> None:
        """Nothing is queued."""

    def settle(self) -> None:
        """Nothing is queued."""


class DeviceMover:
    """Hot memory of a device, reached through pinned staging.

    `torch.cpu` has the streams and events of `torch.cuda`, as ones that do nothing: with the
    CPU as its device this does all but pin memory and run beside.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` without an index is the current one."""
        self._api: Any = torch.get_device_module(device)
        self.device = torch.empty(0, device=device).device
        self._pinned = device.type != "cpu"
        self._side = self._api.Stream(self.device)
        self._lock = threading.Lock()
        self._idle: deque[_Piece] = deque()

    def memory(self, nbytes: int) -> torch.Tensor:
        """From torch's allocator, which keeps it for the next user when it is given up."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def rows(self, memory: torch.Tensor, layout: RowLayout) -> Rows:
        """Out of the host's reach."""
        return DeviceRows(memory, layout)

    def heads(self, memory: torch.Tensor, layout: RowLayout) -> Heads:
        """Turned on the device."""
        return DeviceHeads(memory, layout)

    @contextmanager
    def staging(self, layout: RowLayout) -> Iterator[memoryview]:
        """Pinned; it may be left while the device still reads it."""
        length = piece_bytes(layout)
        piece = self._take(length)
        piece.done.synchronize()
        try:
            yield piece.memory[:length]
        finally:
            piece.done = self._now()
            # All are kept, as many as threads used at once: the device may still read this one.
            with self._lock:
                self._idle.append(piece)

    def outgoing(self, parts: Iterable[Part], layout: RowLayout) -> Iterator[list[memoryview]]:
        """Copied to staging."""
        width = layout.row_bytes
        with self.staging(layout) as memory:
            filled = 0
            for slab, first, last in parts:
                assert isinstance(slab, DeviceRows)
                while first < last:
                    upto = min(last, first + (len(memory) - filled) // width)
                    end = filled + (upto - first) * width
                    slab.get_rows(first, upto, memory[filled:end])
                    first, filled = upto, end
                    if filled == len(memory):
                        self.settle()
                        yield [memory]
                        filled = 0
            if filled:
                self.settle()
                yield [memory[:filled]]

    def rows_of(self, kv: torch.Tensor) -> memoryview:
        """A copy, in pinned memory that torch keeps for the next one."""
        rows = by_token(kv)
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self._pinned)
        host.copy_(rows, non_blocking=True)
        self.settle()
        return bytes_of(host)

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """On the side stream."""
        queued = self._now()

        def run() -> None:
            with self._api.stream(self._side):
                self._side.wait_event(queued)
                work()

        return run

    def join(self) -> None:
        """The current stream waits for the side stream; the host does not."""
        self._current().wait_event(self._now(self._side))

    def settle(self) -> None:
        """The host waits for the current stream and for the side stream."""
        self._now().synchronize()
        self._now(self._side).synchronize()

    def _current(self) -> Any:
        return self._api.current_stream(self.device)

    def _now(self, stream: Any = None) -> Any:
        """An event that comes when what is queued now, on the current stream or this, is done."""
        event = self._api.Event()
        event.record(self._current() if stream is None else stream)
        return event

    def _take(self, length: int) -> _Piece:
        with self._lock:
            # The one that was left first: the device has most likely done with it.
            for piece in self._idle:
                if length <= len(piece.memory):
                    self._idle.remove(piece)
                    return piece
        return _Piece(length, self._pinned, self._api.Event())


class _Piece:
    """Host memory from a page on; `done` comes when the device has no more use for it."""

    def __init__(self, nbytes: int, pinned: bool, done: Any) -> None:
        memory = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=pinned)
        shift = -memory.data_ptr() % mmap.PAGESIZE
        self.memory = bytes_of(memory[shift : shift + nbytes])
        self.done = done

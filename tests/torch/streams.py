"""Streams and events of a device that is not there: which accesses to memory are in no order.

Stands in place of `torch.cuda`. Everything happens at once, on the CPU, but is accounted for as
on a GPU: what is queued on a stream comes after what was queued there before, after
what that stream waited for, and after what the host has waited for; after nothing else. Clocks
are vector clocks, one entry a stream. What host threads do is in the order in which they do it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]


def later_of(*clocks: Clock) -> Clock:
    return {key: max(clock.get(key, 0) for clock in clocks) for key in set().union(*clocks)}


@dataclass
class Watched:
    """One slab, workspace or piece, and who used it last."""

    keep: Any
    address: int
    nbytes: int
    written: Clock = field(default_factory=dict)
    read: Clock = field(default_factory=dict)


class Streams:
    """The module that `torch.get_device_module` gives."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.accesses = 0
        self.host: Clock = {}
        self.lock = threading.RLock()
        self._numbers = itertools.count()
        self._watched: list[Watched] = []
        self._thread = threading.local()
        self._default = self.Stream(None)

    # What DeviceMover uses

    def Stream(self, device: Any) -> Stream:  # noqa: N802
        return Stream(self, next(self._numbers))

    def Event(self) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        current: Stream = getattr(self._thread, "current", self._default)
        return current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """What the worker threads run in: the torch calls there are seen, too."""
        self._thread.current = stream
        try:
            with Seen(self):
                yield
        finally:
            self._thread.current = self._default

    # What is accounted for

    def watch(self, keep: Any, address: int, nbytes: int) -> None:
        with self.lock:
            if self.find(address) is None:
                self._watched.append(Watched(keep, address, nbytes))

    def find(self, address: int) -> Watched | None:
        found = (one for one in self._watched if one.address <= address < one.address + one.nbytes)
        return next(found, None)

    def queue(self, what: str, reads: list[int], writes: list[int]) -> None:
        """A kernel on the current stream of this thread."""
        with self.lock:
            stream = self.current_stream()
            stream.clock = later_of(stream.clock, self.host)
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            self._access(what, stream.clock, stream.number, reads, writes)

    def on_host(self, what: str, memory: memoryview, write: bool) -> None:
        """The host itself reads or writes."""
        with self.lock:
            touched = [address_of(memory)]
            self._access(what, self.host, None, *(([], touched) if write else (touched, [])))

    def _access(
        self, what: str, clock: Clock, who: int | None, reads: list[int], writes: list[int]
    ) -> None:
        for address, write in [(one, False) for one in reads] + [(one, True) for one in writes]:
            memory = self.find(address)
            if memory is None:
                continue
            self.accesses += 1
            before = later_of(memory.written, memory.read) if write else memory.written
            if any(clock.get(key, 0) < time for key, time in before.items() if key != who):
                self.races.append(what)
            if who is not None:
                (memory.written if write else memory.read)[who] = clock[who]


@dataclass
class Stream:
    streams: Streams
    number: int
    clock: Clock = field(default_factory=dict)

    def wait_event(self, event: Event) -> None:
        with self.streams.lock:
            self.clock = later_of(self.clock, event.clock)


@dataclass
class Event:
    streams: Streams
    clock: Clock = field(default_factory=dict)

    def record(self, stream: Stream) -> None:
        with self.streams.lock:
            self.clock = later_of(stream.clock, self.streams.host)

    def synchronize(self) -> None:
        with self.streams.lock:
            self.streams.host = later_of(self.streams.host, self.clock)


class Seen(TorchDispatchMode):
    """Every torch call of this thread is a kernel on its current stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = func._schema
        is_view = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
        if not is_view:
            reads: list[int] = []
            writes: list[int] = []
            for argument, value in zip(schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        address = tensor.untyped_storage().data_ptr()
                        (writes if written else reads).append(address)
            self.streams.queue(str(func), reads, writes)
        return func(*args, **(kwargs or {}))


def address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address

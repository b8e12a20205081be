"""A device in memory that remembers what was written and flushed, and in which order.

Its history can be cut at any moment: `image_after` builds what a real device may hold
after a power cut there. Everything that a flush covered is on it; of later writes any
sectors may be.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

SECTOR = 512


@dataclass(frozen=True, slots=True)
class Written:
    """`number` counts the writes of the device's whole life."""

    number: int
    address: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Flushed:
    """Writes with a number below `covers`, and those in `also`, are on stable storage."""

    covers: int
    also: frozenset[int] = frozenset()

    def covered(self, write: Written) -> bool:
        return write.number < self.covers or write.number in self.also


@dataclass(frozen=True, slots=True)
class Noted:
    """What the user of the device knew at this moment."""

    what: str
    value: int


Event = Written | Flushed | Noted

# Which bytes of a write that no flush covers reached the device: ranges within it.
Survival = Callable[[Written], Iterator[tuple[int, int]]]


def nothing_survives(_write: Written) -> Iterator[tuple[int, int]]:
    return iter(())


def everything_survives(write: Written) -> Iterator[tuple[int, int]]:
    yield 0, len(write.data)


def random_survival(random: Random, sector: int = SECTOR) -> Survival:
    """Each write is whole, lost, or torn between sectors: cut, with a gap, or in shreds."""

    def survives(write: Written) -> Iterator[tuple[int, int]]:
        sectors = len(write.data) // sector
        first, second = sorted(random.randrange(sectors + 1) for _ in range(2))
        match random.randrange(8):
            case 0 | 1:
                return
            case 2 | 3:
                ranges = [(0, sectors)]
            case 4:
                ranges = [(0, first)]
            case 5:
                ranges = [(first, sectors)]
            case 6:
                ranges = [(0, first), (second, sectors)]
            case _:
                kept = [s for s in range(sectors) if random.random() < 0.5]
                ranges = [(s, s + 1) for s in kept]
        for start, end in ranges:
            yield start * sector, end * sector

    return survives


@dataclass(slots=True)
class Media:
    """What no power cut takes from a device, and the writes that it may."""

    stable: bytearray
    unflushed: list[Written] = field(default_factory=list)

    def undergo(self, event: Event) -> None:
        if isinstance(event, Written):
            self.unflushed.append(event)
        elif isinstance(event, Flushed):
            for write in self.unflushed:
                if event.covered(write):
                    self.stable[write.address : write.address + len(write.data)] = write.data
            self.unflushed = [write for write in self.unflushed if not event.covered(write)]

    def left_by(self, survives: Survival, under_way: Sequence[Written] = ()) -> bytearray:
        """An image after a power cut, when besides these writes were under way."""
        image = bytearray(self.stable)
        for write in (*self.unflushed, *under_way):
            for start, end in survives(write):
                image[write.address + start : write.address + end] = write.data[start:end]
        return image


@dataclass(slots=True)
class MemoryDevice:
    """Implements kvfs.engine.device.Device. `image` is what reads see."""

    image: bytearray
    read_only: bool = False

    @property
    def size(self) -> int:
        return len(self.image)

    def read(self, address: int, buffers: Sequence[memoryview]) -> None:
        view = memoryview(self.image)
        for buffer in buffers:
            part = view[address : address + len(buffer)]
            if len(part) != len(buffer):
                raise OSError(errno.EIO, "the device ends")
            buffer[:] = part
            address += len(buffer)

    def write(self, address: int, buffers: Sequence[memoryview]) -> None:
        self._put(address, b"".join(buffers))

    def _put(self, address: int, data: bytes) -> None:
        assert address % SECTOR == 0 and len(data) % SECTOR == 0
        assert 0 <= address and address + len(data) <= self.size
        self.image[address : address + len(data)] = data

    def flush(self) -> None:
        pass

    def reopen(self, *, anyway: bool) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True)
class RecordingDevice(MemoryDevice):
    """One that remembers. `fail` is called with "read", "write" or "flush", an address and a
    length, and may raise."""

    events: list[Event] = field(default_factory=list)
    bytes_written: int = 0
    flushes: int = 0
    writes: int = 0
    fail: Callable[[str, int, int], None] = lambda kind, address, length: None
    torn_at: Callable[[int], int] | None = None  # how much of a write still happens
    _notes: dict[str, int] = field(default_factory=dict)
    _begun: Media = field(init=False)
    _asked: int | None = None
    _own: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._begun = Media(bytearray(self.image))

    @classmethod
    def of_size(cls, size: int) -> RecordingDevice:
        return cls(bytearray(size))

    def read(self, address: int, buffers: Sequence[memoryview]) -> None:
        self.fail("read", address, sum(map(len, buffers)))
        MemoryDevice.read(self, address, buffers)

    def write(self, address: int, buffers: Sequence[memoryview]) -> None:
        data = b"".join(buffers)
        self.fail("write", address, len(data))
        if self.torn_at is not None:
            data = data[: self.torn_at(len(data) // SECTOR) * SECTOR]
        self._put(address, data)
        self.events.append(Written(self.writes, address, data))
        self._own.add(self.writes)
        self.writes += 1
        self.bytes_written += len(data)

    def flush(self) -> None:
        self.fail("flush", 0, 0)
        self.flushes += 1
        if self._asked is None:
            self.events.append(Flushed(self.writes))
        else:
            self.events.append(Flushed(self._asked, frozenset(self._own)))

    @contextmanager
    def work_asked_for(self, writes: int) -> Iterator[None]:
        """Work that was submitted when `writes` writes had happened: its flushes cover
        those and its own, and nothing that came between."""
        self._asked, self._own = writes, set()
        try:
            yield
        finally:
            self._asked = None

    # -- history

    def lose_unflushed(self, survives: Survival) -> None:
        """As in a power cut that it comes back from: its history begins anew."""
        image = self.image_after(len(self.events), survives)
        self.forget(len(self.events))
        self._begun = Media(bytearray(image))
        self.image[:] = image

    def note(self, what: str, value: int) -> None:
        self.events.append(Noted(what, value))

    def noted(self, what: str, moment: int, default: int) -> int:
        """The last value noted before `moment` (a number of events)."""
        for event in reversed(self.events[:moment]):
            if isinstance(event, Noted) and event.what == what:
                return event.value
        return self._notes.get(what, default)

    def at_begin(self) -> Media:
        """What was there when the history began."""
        return Media(bytearray(self._begun.stable), list(self._begun.unflushed))

    def image_after(self, moment: int, survives: Survival) -> bytearray:
        """What may be on the device after a power cut when `moment` events had happened."""
        media = self.at_begin()
        for event in self.events[:moment]:
            media.undergo(event)
        return media.left_by(survives)

    def forget(self, moment: int) -> None:
        """Drop the first `moment` events: the history begins there."""
        for event in self.events[:moment]:
            self._begun.undergo(event)
            if isinstance(event, Noted):
                self._notes[event.what] = event.value
        del self.events[:moment]

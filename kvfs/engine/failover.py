"""A device that fails and comes back: with a shadow, what is answered waits for it in memory.

Without a shadow the first write or flush that fails is the end of all writing, until the next
mount. With one, a write that fails is no error of who appends: it waits until the device is
back and is done again, at its own place with the same bytes. So nothing has to be undone; batches,
cleaning and checkpoints stand still and go on where they were. Only who wants to know whether
something is durable is told EIO at once.

That the buffer has all that the device lacks, also a device that lost its cache in a reset, has
a price: with a shadow operations leave the buffer when they are flushed, not when they are written,
and each frame is kept until then.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from kvfs.engine.device import Device, DeviceError, read_bytes
from kvfs.engine.format import (
    BLOCK,
    SUPERBLOCK_ADDRESSES,
    FormatError,
    FrameHeader,
    Superblock,
)
from kvfs.engine.io import Completion, Executor, Step, Urgency, wait, wait_all
from kvfs.engine.nodes import error
from kvfs.engine.ring import PlacedFrame
from kvfs.engine.space import Purpose

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETAINED_MAX = 64 * 1024 * 1024
_WRITES_AT_ONCE = 8
_PROBE_SECONDS, _PROBE_SECONDS_MAX = 1.0, 30.0
_TOLD_SECONDS = 60.0
_REMOVING_SHARE = 16  # one part in so many more is left to those who remove


class ForeignDevice(Exception):
    """What is there is not the ring as we left it; the message says why."""


@dataclass(slots=True)
class FailoverCounters:
    """Since the store was opened."""

    failures: int = 0
    returns: int = 0
    rewritten_frames: int = 0


@dataclass(slots=True, eq=False)
class _Written:
    """A frame that no flush has covered yet, and who waits for it to be written."""

    header: FrameHeader
    write: Callable[[], None]
    completion: Completion[None] = field(default_factory=Completion)


@dataclass(eq=False)
class Failover:
    """`limit` is the shadow's size in bytes, 0 for none: so much may be answered while the device
    is away. One that does not answer within `deadline_seconds` has failed. `superblock` is what
    the device has, and `following` what is being written over the older one. `on_returned` is
    told that all up to the sequence that `committed` gave is durable. Belongs to the loop's
    thread."""

    device: Device
    executor: Executor
    limit: int
    deadline_seconds: float
    superblock: Callable[[], Superblock]
    committed: Callable[[], int]
    on_returned: Callable[[int], None]

    def __post_init__(self) -> None:
        self.counters = FailoverCounters()
        self.failure: OSError | None = None
        self.gave_up = False
        self.used = 0
        self.following: Superblock | None = None
        self._last_answered = -1
        self._retained: deque[_Written] = deque()
        self._retained_bytes = 0
        self._last_flushed: FrameHeader | None = None
        self._under_way: dict[Completion[Any], float] = {}
        self._gates: dict[Completion[None], None] = {}
        self._back: Completion[None] = Completion()
        self._is_probing = self._is_closed = False
        self._probe_time = self._told_time = 0.0
        self._pause_seconds = _PROBE_SECONDS

    @property
    def is_on(self) -> bool:
        return self.limit > 0

    @property
    def is_silent(self) -> bool:
        """It has failed, and does not even say so: nothing more should be asked of it."""
        return self.failure is not None and self._is_late(time.monotonic())

    @property
    def wants_flush(self) -> bool:
        """Whether so much is kept for the next flush that it should not wait."""
        return self._retained_bytes >= _RETAINED_MAX

    def check(self) -> None:
        """Raises EIO while the device is away: nothing is known to be durable."""
        if self.failure is not None:
            raise error(errno.EIO, f"the device failed: {self.failure}")

    # -- the shadow

    def has_room(self, size: int, purpose: Purpose) -> bool:
        more = self.limit // _REMOVING_SHARE + BLOCK if purpose is Purpose.REMOVE else 0
        return self.used + size <= self.limit + more

    def answered(self, operation: int, size: int) -> None:
        if self.failure is not None:
            self.used += size
            self._last_answered = operation

    def released(self, operation: int) -> None:
        """All up to it is durable."""
        if self.used and operation >= self._last_answered:
            log.warning("what was answered while it was away is on it: %d bytes", self.used)
            self.used = 0

    # -- what is asked of the device

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        completion = self.executor.submit(work, Urgency.WRITE_BACK)
        self._under_way[completion] = time.monotonic()
        completion.when_done(partial(self._under_way.__delitem__, completion))
        return completion

    def write(self, frame: PlacedFrame, write: Callable[[], None]) -> Completion[None]:
        """Frames are written in any order; with a shadow none of them fails."""
        if not self.is_on:
            return self.submit(write)
        written = _Written(frame.header, write)
        self._retained.append(written)
        self._retained_bytes += frame.header.frame_length
        if self.failure is None:
            self._begin(written)
        return written.completion

    def _begin(self, written: _Written) -> None:
        work = self.submit(written.write)
        work.when_done(partial(self._ended, written, work))

    def _ended(self, written: _Written, work: Completion[None]) -> None:
        if work.error is not None:
            if not self.fail(work.error):
                written.completion.finish(error=work.error)
        elif self.failure is None:
            written.completion.finish()

    def flushed(self, sequence: int) -> None:
        """Frames up to it are durable."""
        while self._retained and self._retained[0].header.sequence <= sequence:
            self._last_flushed = self._retained.popleft().header
            self._retained_bytes -= self._last_flushed.frame_length

    def gate(self, completion: Completion[Any]) -> Completion[Any]:
        """For who waits for something from outside: done when that is, or the device fails."""
        if not self.is_on or completion.done:
            return completion
        gate: Completion[None] = Completion()

        def opened() -> None:
            if gate in self._gates:
                del self._gates[gate]
                gate.finish()

        self._gates[gate] = None
        completion.when_done(opened)
        return gate

    def lasting(self, make: Callable[[], Step[None]]) -> Step[None]:
        """What must have been done before anything else is, and may be done twice: again, until
        it succeeds and nothing failed beside it."""
        while True:
            yield from self._until_back()
            before = self.counters.failures
            try:
                yield from make()
            except OSError as failure:
                if not self.fail(failure):
                    raise
            else:
                if self.counters.failures == before:
                    return

    def read(self, make: Callable[[], Step[T]], *, is_needed: bool = False) -> Step[T]:
        """A step that reads; again, if the device failed meanwhile. What `is_needed` to write
        anything at all counts as such a failure, once. Raises OSError."""
        is_suspected = False
        while True:
            yield from self._until_back()
            before = self.counters.failures
            try:
                return (yield from make())
            except OSError as failure:
                if self.counters.failures == before:
                    if not is_needed or is_suspected or not self.fail(failure):
                        raise
                    is_suspected = True

    def _until_back(self) -> Step[None]:
        while self.failure is not None:
            yield self._back

    # -- away and back

    def fail(self, failure: BaseException) -> bool:
        """Whether it is one of the device, that is waited out."""
        if not self.is_on or not isinstance(failure, OSError):
            return False
        if self.failure is None:
            self.failure = failure
            self.counters.failures += 1
            self._pause_seconds = _PROBE_SECONDS
            self._probe_time = time.monotonic() + _PROBE_SECONDS
            self._tell()
            gates, self._gates = self._gates, {}
            for gate in gates:
                gate.finish()
        return True

    def look(self) -> None:
        """Call about once a second: has it failed, is it back?"""
        now = time.monotonic()
        if self.failure is None:
            if self._is_late(now):
                silence = f"no answer within {self.deadline_seconds:g} s"
                self.fail(TimeoutError(errno.ETIMEDOUT, silence))
            return
        if now - self._told_time >= _TOLD_SECONDS:
            self._tell()
        # What it was asked for before may still happen: not beside what is asked for next.
        is_busy = self._is_probing or self._under_way
        if not (is_busy or self.gave_up or self._is_closed) and now >= self._probe_time:
            self._is_probing = True
            self.executor.spawn(self._probe())

    def close(self) -> None:
        """Nothing more is asked of a device that is away."""
        self._is_closed = True

    def _is_late(self, now: float) -> bool:
        # They are in the order of their beginning.
        oldest = next(iter(self._under_way.values()), now)
        return now - oldest > self.deadline_seconds

    def _tell(self) -> None:
        self._told_time = time.monotonic()
        log.error(
            "the device failed: %s; fsync fails until it is back, %d of the %d bytes that may be "
            "answered meanwhile are used",
            self.failure, self.used, self.limit,
        )  # fmt: skip

    def _probe(self) -> Step[None]:
        try:
            yield from self._write_home()
        except ForeignDevice as fault:
            self.gave_up = True
            log.error(
                "the device is not what it was: %s; nothing is written to it any more; unmount, "
                "and mount the ring where it is: what was answered is kept in memory till then",
                fault,
            )
        except (OSError, DeviceError) as failure:
            log.debug("the device is not back: %s", failure)
            self._pause_seconds = min(2 * self._pause_seconds, _PROBE_SECONDS_MAX)
            self._probe_time = time.monotonic() + self._pause_seconds
        finally:
            self._is_probing = False

    def _write_home(self) -> Step[None]:
        """All frames since the last flush anew, the same bytes at the same places: what of them
        is there already stays what it is, at every moment. Raises OSError, DeviceError,
        ForeignDevice."""
        here = (self.superblock(), self.following, self._last_flushed)
        yield from wait(self.submit(partial(_recognize, self.device, *here)))
        covered, retained = self.committed(), list(self._retained)
        for group in _groups(retained):
            yield from wait_all([self.submit(written.write) for written in group])
        yield from wait(self.submit(self.device.flush))
        if not self._is_closed:
            self._returned(covered, retained)

    def _returned(self, covered: int, retained: list[_Written]) -> None:
        log.warning("the device is back: %d frames were written again", len(retained))
        self.failure = None
        self.counters.returns += 1
        self.counters.rewritten_frames += len(retained)
        later = list(islice(self._retained, len(retained), None))
        for written in retained:
            if not written.completion.done:
                written.completion.finish()
        for written in later:
            self._begin(written)
        self.on_returned(covered)
        back, self._back = self._back, Completion()
        back.finish()


def _groups(retained: list[_Written]) -> Iterator[list[_Written]]:
    for start in range(0, len(retained), _WRITES_AT_ONCE):
        yield retained[start : start + _WRITES_AT_ONCE]


def _recognize(
    device: Device, ours: Superblock, following: Superblock | None, flushed: FrameHeader | None
) -> None:
    """Runs in a thread. The ring is there, and nobody has written to it but we: our newest
    superblock, none that is newer but the one that we were about to write, and the last frame
    that a flush had covered. Raises OSError, DeviceError, ForeignDevice."""
    try:
        device.reopen(anyway=False)
        blocks = [bytes(read_bytes(device, at, BLOCK)) for at in SUPERBLOCK_ADDRESSES]
    except OSError:
        device.reopen(anyway=True)
        blocks = [bytes(read_bytes(device, at, BLOCK)) for at in SUPERBLOCK_ADDRESSES]
    if ours.pack() not in blocks:
        raise ForeignDevice("its superblock is another")
    for block in blocks:
        try:
            found = Superblock.unpack(block)
        except FormatError:
            continue  # the one that was being written
        if found.generation > ours.generation and found != following:
            raise ForeignDevice("somebody else has mounted it")
    if flushed is not None:
        head = bytes(read_bytes(device, flushed.address, BLOCK))
        if head[: FrameHeader.SIZE] != flushed.pack():
            raise ForeignDevice(f"frame {flushed.sequence} had been flushed and is not there")

"""Frames on their way to the ring: written in any order, durable when a flush has covered them.

What is to be in the ring for good is asked of the device here, and nowhere else: frames,
flushes, superblocks. What fails is told to the failover, or is the end of all writing.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvfs.engine import metadata
from kvfs.engine.codec import AutoCodec
from kvfs.engine.device import Device
from kvfs.engine.failover import Failover
from kvfs.engine.format import Item, Pointer, RecordHeader, Superblock
from kvfs.engine.io import Completion, Executor, Step, Urgency, wait
from kvfs.engine.latency import Latencies
from kvfs.engine.metadata import EncodedRecord
from kvfs.engine.nodes import error
from kvfs.engine.ring import PlacedFrame, Ring
from kvfs.engine.superblocks import write_superblock
from kvfs.engine.writeback import Payload, place_unit

T = TypeVar("T")

_METADATA_WRITES_MAX = 8
_BANDWIDTH_SAMPLE_MIN = 1024 * 1024
# A frame is 4 KiB or many MiB: what is slow can be told for both by one bound.
_LATENCY_UNIT = 1024 * 1024


@dataclass(slots=True)
class Counters:
    """What was done since the store was opened. Sizes in bytes."""

    operations: int = 0
    payload_written: int = 0
    device_written: int = 0
    frames: int = 0
    flushes: int = 0
    checkpoints: int = 0
    cleaned_segments: int = 0
    carried: int = 0
    reclaimed_units: int = 0
    reclaimed: int = 0
    recovered_operations: int = 0
    replayed_frames: int = 0


@dataclass(slots=True)
class _FrameWrite:
    """Runs in a thread. `seconds` is what the device took, once it did it."""

    device: Device
    frame: PlacedFrame
    seconds: float | None = None

    def __call__(self) -> None:
        started = time.perf_counter()
        self.device.write(self.frame.header.address, self.frame.buffers)
        self.seconds = time.perf_counter() - started


@dataclass(eq=False)
class Appender:
    """`superblock` is the newest on the device, `operation` the last that has its place in the
    ring. `on_durable` is told of the sequence up to which all frames are durable, `on_failure`
    when the device failed for good. Belongs to the loop's thread."""

    device: Device
    executor: Executor
    ring: Ring
    superblock: Superblock
    operation: int
    shadow_size: int
    deadline_seconds: float
    on_durable: Callable[[int], None] = field(default=lambda sequence: None)
    on_failure: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        self.failover = Failover(
            self.device, self.executor, self.shadow_size, self.deadline_seconds,
            lambda: self.superblock, lambda: self.committed_sequence, self._is_durable,
        )  # fmt: skip
        self.auto = AutoCodec()
        self.counters = Counters()
        self.latencies = Latencies()  # of frames; of each MiB of those that are longer
        self.failure: BaseException | None = None
        self.committed_sequence = self.ring.position.sequence - 1
        self.bytes_since_checkpoint = 0
        self.flush_time = time.monotonic()
        self._flushing: Completion[None] | None = None
        self._metadata_writes: deque[Completion[None]] = deque()

    def check(self) -> None:
        """Raises EIO once the device has failed for good."""
        if self.failure is not None:
            raise error(errno.EIO, f"the device failed: {self.failure}")

    def fail(self, failure: BaseException) -> None:
        """The device cannot be written any longer."""
        self.failure = self.failure or failure
        self.on_failure()

    def until(self, completion: Completion[T]) -> Step[T]:
        """For who waits from outside. Raises EIO when the device fails meanwhile."""
        gate = self.failover.gate(completion)
        if not gate.done:
            yield gate
        self.failover.check()
        return completion.result()

    # -- frames

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        return self.executor.submit(work, Urgency.WRITE_BACK)

    def write(self, frames: list[PlacedFrame]) -> list[Completion[None]]:
        for frame in frames:
            self.counters.frames += 1
            self.counters.device_written += frame.header.frame_length
            self.bytes_since_checkpoint += frame.header.frame_length
        return [self._write_frame(frame) for frame in frames]

    def _write_frame(self, frame: PlacedFrame) -> Completion[None]:
        write = _FrameWrite(self.device, frame)
        written = self.failover.write(frame, write)
        written.when_done(partial(self._saw_write, frame.header.frame_length, write))
        return written

    def _saw_write(self, size: int, write: _FrameWrite) -> None:
        if write.seconds is None:
            return  # it failed
        self.latencies.saw(write.seconds / max(1, size / _LATENCY_UNIT))
        if size >= _BANDWIDTH_SAMPLE_MIN:
            self.auto.saw_write(size, write.seconds)

    def append(self, payloads: list[Payload], items: list[Item]) -> Appended:
        """A unit of what is in the ring already, or describes it, as frames that are being
        written."""
        frames = place_unit(self.ring, payloads, items, self.operation)
        return Appended(frames, self.write([frame for frame, _ in frames]))

    def append_metadata(self, records: list[EncodedRecord]) -> Step[list[Pointer]]:
        """Append records; they are on their way to the device, not there yet."""
        payloads = [Payload(encoded.record, [encoded.stored]) for encoded in records]
        if not payloads:
            return []
        appended = self.append(payloads, [])
        self._metadata_writes += appended.writes
        yield from self.written_metadata(_METADATA_WRITES_MAX)
        return [
            metadata.pointer_to(frame.header, record)
            for frame, group in appended.frames
            for record in group
        ]

    def written_metadata(self, left: int = 0) -> Step[None]:
        """At most `left` of the writes are still under way."""
        while len(self._metadata_writes) > left:
            yield from wait(self._metadata_writes.popleft())

    # -- flushes

    def sync(self) -> Step[None]:
        """All frames that are committed so far are durable on return. Raises OSError EIO."""
        target = self.committed_sequence
        while self.ring.flushed < target:
            if self._flushing is not None and not self._flushing.done:
                yield self.failover.gate(self._flushing)
            else:
                yield from self.flush()
            self.check()
            self.failover.check()

    def flush(self) -> Step[None]:
        """What is in the ring is durable on return. Raises OSError."""
        return self._flush_by(self.device.flush)

    def keep_little(self) -> Step[None]:
        """Of frames that a device which fails may lose."""
        if self.failover.wants_flush:
            yield from self.failover.lasting(self.flush)

    def write_superblock(self, superblock: Superblock) -> Step[None]:
        write = partial(write_superblock, self.device, superblock)
        self.failover.following = superblock
        yield from self.failover.lasting(lambda: self._flush_by(write))
        self.superblock, self.failover.following = superblock, None

    def _flush_by(self, work: Callable[[], None]) -> Step[None]:
        """Flushes, and what ends with one, go one after the other: what one that fails has lost
        must not be confirmed by another. Raises OSError."""
        while self._flushing is not None and not self._flushing.done:
            yield self.failover.gate(self._flushing)
            self.failover.check()
        self.failover.check()
        covered, failures = self.committed_sequence, self.failover.counters.failures
        flushing = self._flushing = self.failover.submit(work)
        # Also when nobody waits for it any longer, its outcome counts.
        flushing.when_done(partial(self._flushed, flushing, covered, failures))
        yield from self.until(flushing)

    def _flushed(self, flush: Completion[None], covered: int, failures: int) -> None:
        if flush.error is not None:
            if not self.failover.fail(flush.error):
                self.fail(flush.error)
        elif failures == self.failover.counters.failures:
            # Else what it was for may have been lost between: it says nothing.
            self._is_durable(covered)

    def _is_durable(self, covered: int) -> None:
        self.ring.flushed = max(self.ring.flushed, covered)
        self.flush_time = time.monotonic()
        self.counters.flushes += 1
        self.failover.flushed(covered)
        self.on_durable(covered)


@dataclass(frozen=True, slots=True)
class Appended:
    """Frames with their records, and what is done when they are written."""

    frames: list[tuple[PlacedFrame, list[RecordHeader]]]
    writes: list[Completion[None]]

"""Admission: an operation waits for room, has it made, or is refused, before it begins."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvfs.engine.buffer import Buffer
from kvfs.engine.io import Completion, Step
from kvfs.engine.nodes import error
from kvfs.engine.reclaim import Reclaimer
from kvfs.engine.space import Purpose, Space
from kvfs.engine.writer import Writer

log = logging.getLogger(__name__)

_DIRTY_SECONDS = 5.0
_DIRTY_MIN = 64 * 1024 * 1024
_ROUNDS_MAX = 200  # of making room, which others may take first
# Who cleans beside us takes room before it makes some.
_IN_VAIN_MAX = 3
_TOLD_SECONDS = 60  # the log is told of a full tmpfs once in so long
_RECLAIM_SHARE = 64  # one part of the ring in so many is made free at once


@dataclass(slots=True)
class Admission:
    """`drop_free` frees what was removed and is still to be dropped."""

    writer: Writer
    space: Space
    buffer: Buffer
    reclaimer: Reclaimer
    drop_free: Callable[[], Step[None]]
    _told: float = float("-inf")
    _cleaning: Completion[None] | None = None
    _looked_at: int | None = None

    def admit(self, charge: int, changed: int, length: int, purpose: Purpose) -> Step[None]:
        """Wait until there is room for an operation that may take `charge` bytes of the ring in
        its frame, changes so many items of the index and brings `length` bytes of data. Raises
        ENOSPC; EIO when the device fails."""
        if not self.writer.is_cut_off:
            try:
                yield from self._admit(charge, changed, length, purpose)
                return
            except OSError:
                if not self.writer.is_cut_off:
                    raise
        self._admit_to_shadow(charge, changed, length, purpose)

    def _admit_to_shadow(self, charge: int, changed: int, length: int, purpose: Purpose) -> None:
        """While the device is away no room can be made. Raises ENOSPC."""
        shadow = self.writer.appender.failover
        is_room = shadow.has_room(length, purpose) and self.buffer.has_room(charge)
        if not is_room or not self.has_space(charge, changed, purpose):
            raise error(errno.ENOSPC, "the device is away, and its shadow is full")

    def _admit(self, charge: int, changed: int, length: int, purpose: Purpose) -> Step[None]:
        writer = self.writer
        while writer.unsaved + length > self._unsaved_max() or not self.buffer.has_room(charge):
            if writer.is_idle:
                self._tell_of_full_tmpfs()
                raise error(errno.ENOSPC, "the operation log has no room (is the tmpfs full?)")
            yield from writer.relieve()
        self._clean_ahead()
        if not self.has_space(charge, changed, purpose):
            yield from self._make_space(charge + writer.index.grows_by(changed), purpose)

    def has_space(self, charge: int, changed: int, purpose: Purpose) -> bool:
        """Whether the ring has it now."""
        wanted = charge + self.writer.index.grows_by(changed)
        return self.space.has_room(wanted, self.writer.promised, purpose)

    def _tell_of_full_tmpfs(self) -> None:
        now = time.monotonic()
        if now - self._told >= _TOLD_SECONDS:
            self._told = now
            log.error("the operation log has no room, writes fail with ENOSPC: is the tmpfs full?")

    def _unsaved_max(self) -> int:
        """Dirty bytes are bounded by what the device takes in 5 s."""
        return max(_DIRTY_MIN, int(self.writer.appender.auto.device * _DIRTY_SECONDS))

    def _clean_ahead(self) -> None:
        """Beside those who write, while there is still room to carry much: the two checkpoints
        after which segments are free then free several. Looked at once in each segment."""
        segment = self.writer.appender.ring.position.segment
        if segment != self._looked_at and not self._cleans_ahead and self.space.is_short:
            self._looked_at = segment
            self._cleaning = self.writer.appender.executor.spawn(self._cleaned_ahead())

    @property
    def _cleans_ahead(self) -> bool:
        return self._cleaning is not None and not self._cleaning.done

    def _cleaned_ahead(self) -> Step[None]:
        writer, space = self.writer, self.space
        while space.is_short and space.is_worth_cleaning:
            before = writer.appender.counters.cleaned_segments
            yield from writer.clean()
            yield from writer.checkpoint()
            yield from writer.checkpoint()
            if writer.appender.counters.cleaned_segments == before:
                return

    def _make_space(self, charge: int, purpose: Purpose) -> Step[None]:
        """Until there is room: write checkpoints (what is dead becomes free once both
        superblock slots have moved on) and clean. Raises ENOSPC when that does not help."""
        writer, space = self.writer, self.space
        if purpose == Purpose.STORE:
            yield from self.drop_free()
        in_vain = 0
        for _ in range(_ROUNDS_MAX):
            # What others are promised may replace as much, which is dead once it is written.
            yield from writer.written()
            if space.reclaimable or writer.index.changes:
                yield from self._free_what_is_dead(charge, purpose)
            if space.has_room(charge, writer.promised, purpose):
                return
            if space.is_enough(charge, writer.promised, purpose):
                found = yield from self._clean(charge, purpose)
                in_vain = 0 if found or writer.promised or self._cleans_ahead else in_vain + 1
                if in_vain == _IN_VAIN_MAX:
                    break
            elif not writer.promised:
                yield from self._reclaim(charge)
        if not space.has_room(charge, writer.promised, purpose):
            raise error(errno.ENOSPC)

    def _clean(self, charge: int, purpose: Purpose) -> Step[bool]:
        """Whether there was a segment to be cleaned, or something is still to become free."""
        before = self.writer.appender.counters.cleaned_segments
        yield from self.writer.clean()
        yield from self._free_what_is_dead(charge, purpose)
        cleaned = self.writer.appender.counters.cleaned_segments > before
        return cleaned or self.space.reclaimable > 0

    def _reclaim(self, charge: int) -> Step[None]:
        """Remove the oldest units, a little more than is needed. Raises ENOSPC when nothing
        may be removed."""
        writer, space = self.writer, self.space
        wanted = charge + space.total // _RECLAIM_SHARE
        removed = yield from self.reclaimer.make_space(
            wanted - space.left_after_cleaning(writer.promised)
        )
        if not removed:
            raise error(errno.ENOSPC)
        yield from writer.written()

    def _free_what_is_dead(self, charge: int, purpose: Purpose) -> Step[None]:
        """Both superblock slots move on, or one where that is enough."""
        for _ in range(2):
            yield from self.writer.checkpoint()
            if self.space.has_room(charge, self.writer.promised, purpose):
                return

"""Sessions that are in warm memory as a whole, and how they come there and leave."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfs.engine.io import Step, Urgency
from kvfs.tiers.migrate import Migration


@dataclass(slots=True)
class WarmSessions:
    """Implements kvfs.tiers.planner.Tier. What is known to be whole is what was brought in:
    to find out of another one means to look at all of it, which bringing it in does."""

    migration: Migration
    _whole: set[int] = field(default_factory=set)
    _coming: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.migration.warm.on_evicted = self._evicted

    @property
    def is_strained(self) -> bool:
        return self.migration.is_strained

    def is_whole(self, session: int) -> bool:
        return session in self._whole

    def promote(self, session: int) -> Step[int]:
        warm, counters = self.migration.warm, self.migration.warm.counters
        stored = (yield from self.migration.store.units.unit(session)).stored
        if stored > warm.limit // 2:
            return 0  # it would drive out all others, and then its own beginning
        before = counters.promoted
        self._coming.add(session)
        try:
            complete = yield from self.migration.promote(session, Urgency.BACKGROUND)
            if complete and session in self._coming:
                self._whole.add(session)
        finally:
            self._coming.discard(session)
        return counters.promoted - before

    def demote(self, sessions: list[int]) -> Step[None]:
        yield from self.migration.demote_group(sessions)

    def _evicted(self, session: int) -> None:
        self._whole.discard(session)
        self._coming.discard(session)

"""When the ring is scrubbed, and how fast: at a bounded rate, behind what others want to read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvfs.engine.format import ROOT_INODE
from kvfs.engine.io import Step
from kvfs.engine.scrub import Rot, Scrub
from kvfs.engine.store import Store

log = logging.getLogger(__name__)

SLICE_SECONDS = 0.1
# When the last pass ended, in seconds since 1970: kept so that the next mount knows.
SCRUBBED = b"user.kvfs.scrubbed"
_SHARE_LEFT = 10  # beside readers who want all that it may have: one part in so many
_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True)
class ScrubOptions:
    """Bytes a second at most; seconds from the end of a pass to the begin of the next, 0: only on
    demand."""

    rate: int = 64 * 1024 * 1024
    every_seconds: float = 7 * 24 * 3600.0


@dataclass(slots=True)
class Scrubbing:
    """`demand_waits` says whether a reader waits for a thread. Call `slice` every SLICE_SECONDS."""

    store: Store
    options: ScrubOptions
    demand_waits: Callable[[], bool]
    clock: Callable[[], float] = time.time
    _ended: float | None = None
    _tokens: float = 0.0
    _demanded: int = field(init=False)

    def __post_init__(self) -> None:
        self._demanded = self.store.reader.asked_for

    @property
    def scrub(self) -> Scrub:
        return self.store.scrub

    def slice(self) -> Step[None]:
        """What may be read now, if it is time for it."""
        if not self.scrub.is_running:
            if self.options.every_seconds and self.clock() >= (yield from self._due()):
                self.begin()
            return
        self._earn()
        if self._tokens <= 0 or self.demand_waits():
            return
        self._tokens -= yield from self.scrub.advance(int(self._tokens) + 1)
        if not self.scrub.is_running:
            yield from self._note_end()

    def begin(self) -> None:
        """Now, unless a pass is under way."""
        if not self.scrub.is_running:
            self._tokens = 0.0
            self.scrub.begin()
            log.info("scrub: %d bytes are to be read", self.scrub.total)

    def _earn(self) -> None:
        """What readers have taken of the device meanwhile is not there for this."""
        demanded = self.store.reader.asked_for - self._demanded
        self._demanded += demanded
        most = self.options.rate * SLICE_SECONDS
        self._tokens = min(self._tokens + max(most - demanded, most / _SHARE_LEFT), most)

    def _due(self) -> Step[float]:
        if self._ended is None:
            value = yield from self.store.xattr(ROOT_INODE, SCRUBBED)
            made = self.store.superblock.created_ns / 1e9
            self._ended = float(value) if value and value.isdigit() else made
        return self._ended + self.options.every_seconds

    def _note_end(self) -> Step[None]:
        scrub = self.scrub
        self._ended = scrub.finished_ns / 1e9
        log.log(
            logging.WARNING if scrub.errors else logging.INFO,
            "scrub: %d bytes read, %d errors, %d healed since the mount",
            scrub.done, scrub.errors, scrub.healed,
        )  # fmt: skip
        if not self.store.read_only:
            yield from self.store.set_xattr(ROOT_INODE, SCRUBBED, b"%d" % self._ended)


def status(scrub: Scrub) -> dict[str, Any]:
    """As `stats.json` shows it. Sizes in bytes, times in seconds since 1970, null for never."""
    return {
        "running": scrub.is_running,
        "phase": scrub.phase.value,
        "position": scrub.position,
        "done": scrub.done,
        "total": scrub.total,
        "share": round(scrub.share, 4),
        "started": scrub.started_ns / 1e9 or None,
        "finished": scrub.finished_ns / 1e9 or None,
        "passes": scrub.passes,
        "errors": scrub.errors,
        "found": scrub.found,
        "healed": scrub.healed,
        "rotten": [_shown(rot) for rot in scrub.rotten[:_SHOWN_MAX]],
    }


def _shown(rot: Rot) -> dict[str, Any]:
    return {
        "what": rot.what,
        "address": rot.address,
        "healed": rot.is_healed,
        "files": [
            {
                "path": None if hurt.path is None else hurt.path.decode(errors="surrogateescape"),
                "inode": hurt.ino,
                "offset": hurt.offset,
                "length": hurt.length,
            }
            for hurt in (rot.files or [])[:_SHOWN_MAX]
        ],
    }

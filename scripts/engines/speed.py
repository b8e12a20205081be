"""What an engine takes to store and to load on KVFS and on a directory of the same disk, round
by round one after the other."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.disk import drop_caches
from scripts.engines.engine import Engine, Outcome, running
from scripts.engines.promises import place_of
from scripts.trials.ring import Broken, Ring, new_ring

GOAL = 0.7
_RING_SIZE = "6G"


@dataclass(frozen=True, slots=True)
class Comparison:
    """In seconds, one value a round."""

    engine: Engine
    bytes: int
    store_plain: list[float]
    store_kvfs: list[float]
    load_plain: list[float]
    load_kvfs: list[float]

    @property
    def store_ratio(self) -> float:
        """Speed on KVFS in parts of the speed on the other: the median of the rounds'."""
        return _ratio(self.store_plain, self.store_kvfs)

    @property
    def load_ratio(self) -> float:
        return _ratio(self.load_plain, self.load_kvfs)

    @property
    def goal(self) -> float:
        """Of the loads, and of the stores."""
        return 1.0 if self.engine.many_small or self.engine.rival else GOAL

    @property
    def is_met(self) -> bool:
        return min(self.store_ratio, self.load_ratio) >= self.goal


@dataclass(frozen=True, slots=True)
class _Round:
    stored: Outcome
    loaded: Outcome


def compare(
    engine: Engine, directory: Path | None, rounds: int, beside: Path | None
) -> Iterator[Comparison]:
    """After each round, all so far; the ring is in `directory`, the other place in `beside`. Raises
    Broken if what is loaded is not what was stored."""
    plain, kvfs = list[_Round](), list[_Round]()
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-engine-", dir=beside) as other,
        new_ring("engine", directory, "--size", _RING_SIZE) as ring,
    ):
        ring.mount()
        for number in range(rounds):
            both = [(plain, _on_plain), (kvfs, _on_kvfs)]
            for found, measure in both if number % 2 == 0 else reversed(both):
                found.append(measure(engine, Path(other), ring))
            yield Comparison(
                engine,
                kvfs[0].stored.bytes,
                [one.stored.seconds for one in plain],
                [one.stored.seconds for one in kvfs],
                [one.loaded.seconds for one in plain],
                [one.loaded.seconds for one in kvfs],
            )


def _on_plain(engine: Engine, other: Path, ring: Ring) -> _Round:
    if engine.rival:
        return _on_kvfs(engine.rival, other, ring)
    place = other / "engine"
    place.mkdir()
    return _round(engine, place, lambda: None)


def _on_kvfs(engine: Engine, other: Path, ring: Ring) -> _Round:
    def mount_again() -> None:
        ring.umount()
        ring.mount()

    return _round(engine, place_of(engine, ring), mount_again)


def _round(engine: Engine, place: Path, send_down: Callable[[], None]) -> _Round:
    """`send_down` and the caches' drop are between store and load, and so is the end of the
    process, unless it would find nothing then, or takes long."""
    drop_caches()
    ends_between = engine.finds_again and not (engine.keeps_open or engine.is_slow_to_start)
    with running(engine, place) as process:
        stored = process.store()
        if not ends_between:
            if not engine.keeps_open:
                send_down()
            drop_caches()
            loaded = process.load()
    if ends_between:
        send_down()
        drop_caches()
        with running(engine, place) as process:
            loaded = process.load()
    if loaded.digest != stored.digest or not loaded.hits:
        raise Broken(f"{engine.name} on {place} loads something else than it stored")
    shutil.rmtree(place)
    return _Round(stored, loaded)


def _ratio(plain: list[float], kvfs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(plain, kvfs, strict=True))

"""What an engine is promised of a directory on a mount. Each raises Broken."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from scripts.engines.engine import Engine, Outcome, Running, running
from scripts.trials.ring import MIB, Broken, FastClock, Ring, new_ring

_RING_SIZE = "4G"
_SMALL_RING_SIZE = "1G"
_CLOCK_FACTOR = 60  # what was used a second ago may be reclaimed
_FILLER_SIZE = 16 * MIB
_FILLERS = 16  # of them are to have gone
_FILL_SECONDS = 900
_REFUSED_SECONDS = 0.2
_SETTLED_SECONDS = 2 * 60 / _CLOCK_FACTOR


def restart(engine: Engine, directory: Path | None) -> None:
    """The engine's process and KVFS end and begin again: what was stored is found, and right."""
    _through(engine, directory, Ring.umount)


def kill(engine: Engine, directory: Path | None) -> None:
    """The same, but the daemon is killed."""
    _through(engine, directory, Ring.kill)


def _through(engine: Engine, directory: Path | None, end: Callable[[Ring], None]) -> None:
    """An engine that finds nothing again goes on meanwhile."""
    with new_ring("engine", directory, "--size", _RING_SIZE) as ring:
        ring.mount()
        with running(engine, place_of(engine, ring)) as process:
            stored = process.store()
            if engine.finds_again:
                process.kill()
            end(ring)
            ring.mount()
            if not engine.finds_again:
                loaded = process.load()
        if engine.finds_again:
            with running(engine, place_of(engine, ring)) as process:
                loaded = process.load()
        _same(engine, loaded, stored)
        if not loaded.hits:
            raise Broken(f"{engine.name} finds nothing of what it stored")
        if ring.errors():
            raise Broken("\n".join(ring.errors()))


def reclaim(engine: Engine, directory: Path | None) -> None:
    """Other data takes the place of what the engine stored, while it runs: it misses, makes anew,
    and stores again, if it ever does; so does a process that begins then."""
    with new_ring("engine", directory, "--size", _SMALL_RING_SIZE) as ring:
        profile = ring.directory / "oldest-first.toml"
        profile.write_text('name = "oldest-first"\npolicy = "lru"\n')
        clock = FastClock.from_now(_CLOCK_FACTOR)
        ring.mount("--profile", str(profile), clock=clock)
        with running(engine, place_of(engine, ring)) as process:
            stored = process.store()
            _displace(ring)
            _same(engine, process.load(), stored)
            if engine.stores_again:
                _store_again(engine, process, stored)
                _displace(ring)
        with running(engine, place_of(engine, ring)) as process:
            _same(engine, process.load(), stored)
            _store_again(engine, process, stored)


def _store_again(engine: Engine, process: Running, stored: Outcome) -> None:
    process.store()
    again = process.load()
    _same(engine, again, stored)
    if not again.hits:
        raise Broken(f"{engine.name} finds nothing of what it stored after reclaim")


def keep(engine: Engine, directory: Path | None) -> None:
    """What its process has open stays, whatever else is written: as much as the ring holds."""
    with new_ring("engine", directory, "--size", _SMALL_RING_SIZE) as ring:
        ring.mount(clock=FastClock.from_now(_CLOCK_FACTOR))
        with running(engine, place_of(engine, ring)) as process:
            stored = process.store()
            reclaimed = ring.stats()["counters"]["reclaimed_units"]
            deadline = time.monotonic() + _FILL_SECONDS
            while ring.stats()["counters"]["reclaimed_units"] < reclaimed + _FILLERS:
                if time.monotonic() > deadline:
                    raise Broken(f"nothing was reclaimed in {_FILL_SECONDS} s of other data")
                _write_other(ring)
            _same(engine, process.load(), stored)


def place_of(engine: Engine, ring: Ring) -> Path:
    """Its directory on the mount."""
    place = ring.mountpoint / "engine"
    place.mkdir(exist_ok=True)
    if engine.is_pool:
        os.setxattr(place, "user.kvfs.unit", b"pool")
    return place


def _same(engine: Engine, loaded: Outcome, stored: Outcome) -> None:
    if loaded.digest != stored.digest:
        raise Broken(f"{engine.name} got {loaded.digest} of what was {stored.digest}")


def _displace(ring: Ring) -> None:
    """Write other data until none of the engine's files is left."""
    deadline = time.monotonic() + _FILL_SECONDS
    while _files(ring.mountpoint / "engine"):
        if time.monotonic() > deadline:
            raise Broken(f"after {_FILL_SECONDS} s of other data the engine's is still there")
        _write_other(ring)
    # What came last has its time too, or the engine's next store would be refused.
    time.sleep(_SETTLED_SECONDS)


def _write_other(ring: Ring) -> None:
    """A file, or nothing: it is refused while all that is there was used in the last second."""
    other = ring.mountpoint / "other"
    other.mkdir(exist_ok=True)
    try:
        (other / str(time.time_ns())).write_bytes(os.urandom(_FILLER_SIZE))
    except OSError as full:
        if full.errno != errno.ENOSPC:
            raise
        time.sleep(_REFUSED_SECONDS)


def _files(place: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(place))


def promises(engine: Engine) -> dict[str, Callable[[Engine, Path | None], None]]:
    """By name."""
    if engine.keeps_open:
        return {"keep": keep}
    return {"restart": restart, "kill": kill, "reclaim": reclaim}

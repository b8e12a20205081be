"""Many sessions in one process under one budget of accelerator memory."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from transformers import PreTrainedModel

from kvfs.tiers import profiles
from kvfs.tiers.alarm import Alarm
from kvfs.tiers.heat import HeatMap
from kvfs.tiers.profiles import Profile
from kvfs.torch.cache import KVFSCache
from kvfs.torch.errors import NotKVFSError, SessionBusyError
from kvfs.torch.fingerprint import Fingerprint
from kvfs.torch.hot import HotPool
from kvfs.torch.memory import MemoryGauge, gauge_of
from kvfs.torch.metrics import Found, Hot, RouterMetrics, Tier
from kvfs.torch.mounts import require_kvfs

_FREE_SHARE = 0.10  # of the budget: room is made until this much is free
_RESERVED_SHARE, _FREE_SLABS_SHARE = 0.90, 0.05  # of the device, of the budget: too full
# Of the device: where it was fuller for so long, KV goes down until it is less full again.
_DEVICE_FULL_PCT, _DEVICE_FULL_SECONDS, _DEVICE_GOAL_PCT = 92, 30.0, 90
_LOOK_SECONDS = 1.0
_OPEN_SESSIONS = 100  # each costs descriptors, and a hook that sees every forward
_PATIENCE_SECONDS = 0.1  # for a session that another thread moves
_TIER = "user.kvfs.tier"
_UNKNOWN_TO_DAEMON = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOTSUP)

_log = logging.getLogger("kvfs.torch")


@dataclass(eq=False)
class _Seat:
    """A session's place in the router.

    `lock` is held by whoever uses or moves the session, and guards `cache` and `device`, the
    st_dev of the mount that the cache was opened on. The router's own lock guards the rest.
    """

    name: str
    number: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    cache: KVFSCache | None = None
    device: int = 0
    in_use: bool = False
    has_room: bool = False
    user: int = 0
    wants_bytes: int = 0
    hot: bool = False
    last_used: float = 0.0  # monotonic clock


class KVRouter:
    """The sessions of a process's agents, held against one budget of hot bytes.

        with KVRouter("/mnt/kv", model, hot_bytes=8 << 30) as router:
            with router.session("agent-7") as cache:
                model.generate(ids, cache=cache)
                cache.end_round()
            router.pause("agent-7")     # a tool runs
            router.resume("agent-7")    # its result is there

    Over the budget the oldest round of the coldest session goes down first, until a tenth
    of the budget is free; a session that was not used for the profile's idle time (20 s)
    goes down as a whole. When the device is more than 92 % full for 30 s, whoever fills it,
    rounds go down in the same order until it is 90 % full. What is in use stays. Safe to use
    from several threads; a session is used by one at a time.

    When the daemon is gone, whatever needs it raises OSError. Once the ring is mounted
    again, the next use of a session takes it up there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: PreTrainedModel,
        hot_bytes: int | None = None,
        *,
        pool: HotPool | None = None,
        profile: Profile | str = Profile(),  # noqa: B008 - it is frozen
        window: int | None = None,
        rank: int = 0,
        world: int = 1,
        memory: MemoryGauge | None = None,
    ) -> None:
        """Route the sessions below `directory`, which lies on a KVFS mount.

        Hot memory of all of them comes from `pool`, whose `on_pressure` is the router's then,
        or from one of `hot_bytes`. `profile`, by itself, name or file, says when idle sessions
        go down; its window is not used unless it is given, since the model would see less.
        `window`, `rank` and `world` are as in `KVFSCache.open`. `memory` tells how full the memory
        is that `pool` is a part of; by itself it asks a CUDA device, and does not look at the
        host's.

        Raises:
            NotKVFSError: `directory` is not on a KVFS mount.
            ProfileError: the profile cannot be used.
            ValueError: there are both a pool and a number of bytes.
        """
        if pool is not None and hot_bytes is not None:
            raise ValueError("give a pool or hot_bytes, not both: the pool has a budget")
        require_kvfs(directory)
        self._directory = Path(directory)
        self._model = model
        self._window, self._rank, self._world = window, rank, world
        self._profile = profiles.load(profile) if isinstance(profile, str) else profile
        fingerprint = Fingerprint.of(model)
        self._token_bytes = fingerprint.row_layout().row_bytes * fingerprint.layers
        self._pool = HotPool(hot_bytes, device=model.device) if pool is None else pool
        self._pool.on_pressure = self._make_room
        self._memory = gauge_of(self._pool.device) if memory is None else memory
        self._metrics = RouterMetrics(self._hot, self._memory)
        self._seats: dict[str, _Seat] = {}
        self._heat = HeatMap()
        self._changed = threading.Condition()
        self._closed = False
        # A thread, not a look at each call: when all agents wait for their tools nobody
        # calls, and that is when others could have the memory.
        self._keeper = threading.Thread(target=self._keep, name="kvfs-router", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="kvfs-memory", daemon=True)
        for thread in (self._keeper, self._watcher):
            thread.start()

    @contextmanager
    def session(self, name: str) -> Iterator[KVFSCache]:
        """Use one session: resumed, or begun if there is none of that name.

        Waits while sessions that other threads use leave no room for it in the budget.

        Raises:
            SessionBusyError: it is in use already, here or in another process.
            OSError: the mount is gone or does not do what is asked.
            ValueError: the router is closed, or as `KVFSCache.open` says.
        """
        seat = self._take(name)
        try:
            with self._counting_faults():
                self._await_room(seat)
            with seat.lock, self._counting_faults():
                cache = self._opened(seat)
                found, before = self._found(cache), replace(cache.counters)
                yield cache
                self._metrics.turn(found, before, cache.counters)
        finally:
            self._leave(seat)
        self._relieve_device()
        self._close_surplus()

    def pause(self, name: str, expected_seconds: float | None = None) -> None:
        """A tool runs for this session, for `expected_seconds` if that is known.

        A session that is expected back later than it would stay hot goes down now; one that
        is away for minutes leaves the daemon's RAM too.

        Raises:
            FileNotFoundError: there is no session of that name.
            OSError: the mount is gone or does not do what is asked.
        """
        self._tell(name, "hint", "tool_started")
        self._tell_what_is_hot(self._seat(name))
        if expected_seconds is None:
            return
        self._tell(name, "hint", f"turn_expected={expected_seconds:g}")
        if expected_seconds >= self._profile.hot_idle_seconds:
            self._put_down(self._seat(name))
        if expected_seconds >= self._profile.warm_idle_seconds:
            self._tell(name, "demote", "1")

    def resume(self, name: str) -> None:
        """The tool has ended: begin to bring the session back, before its turn asks for it.

        Returns while it is on its way. Raises as `pause` does.
        """
        self._tell(name, "hint", "tool_done")
        self._tell(name, "prefetch", "1")
        seat = self._seat(name)
        with self._changed:
            self._heat.access(np.array([seat.number]))
            seat.hot, seat.last_used = True, time.monotonic()
            self._changed.notify_all()
        with self._if_free(seat) as free, self._counting_faults():
            if free:
                self._opened(seat).prefetch_all()

    def metrics(self) -> str:
        """All counters in Prometheus' text format."""
        return self._metrics.text()

    def close(self) -> None:
        """Write what is not written and let all sessions go. Closing twice is harmless.

        All are let go even if an error is raised. SessionBusyError if one is in use.
        """
        with self._changed:
            busy = [seat.name for seat in self._seats.values() if seat.in_use]
            if busy:
                raise SessionBusyError(f"session {busy[0]} is in use: leave its `with` block first")
            self._closed = True
            self._changed.notify_all()
        self._keeper.join()
        self._watcher.join()
        with ExitStack() as all_of_them:
            for seat in self._seats.values():
                all_of_them.callback(self._let_go, seat)

    def __enter__(self) -> KVRouter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What is already on its way out says more than a close that fails after it.
        with suppress(OSError) if error is not None else nullcontext():
            self.close()

    # Seats

    def _seat(self, name: str) -> _Seat:
        with self._changed:
            if self._closed:
                raise ValueError(f"the router of {self._directory} is closed")
            if name not in self._seats:
                self._seats[name] = _Seat(name, number=len(self._seats))
                self._heat.add(np.array([self._seats[name].number]))
            return self._seats[name]

    def _take(self, name: str) -> _Seat:
        seat = self._seat(name)
        with self._changed:
            if seat.in_use:
                raise SessionBusyError(f"session {name} is in use: leave its `with` block first")
            seat.in_use = seat.hot = True
            self._heat.access(np.array([seat.number]))
        return seat

    def _await_room(self, seat: _Seat) -> None:
        """Wait until what other threads use leaves room for the whole session.

        What is in use cannot be demoted: without this, more threads than the budget has room
        for would find no memory at all. A thread that has a session does not wait.
        """
        with seat.lock:
            seat.wants_bytes = self._most_of(self._opened(seat))
        with self._changed:
            seat.user = threading.get_ident()
            while (others := self._wanted_by_others(seat)) and (
                others + seat.wants_bytes > self._pool.budget_bytes
            ):
                self._changed.wait()
            seat.has_room = True

    def _most_of(self, cache: KVFSCache) -> int:
        """What a turn may take: a quarter more than there is and a block a layer, in slabs and
        put together once more for attention. A new session's prompt is not known."""
        whole = cache.get_seq_length() * self._token_bytes
        if whole == 0:
            return self._pool.budget_bytes
        return 2 * (whole + whole // 4 + len(cache.layers) * self._pool.slab_bytes)

    def _wanted_by_others(self, seat: _Seat) -> int:
        inside = [one for one in self._seats.values() if one.has_room]
        if any(one.user == seat.user for one in inside):
            return 0
        return sum(one.wants_bytes for one in inside)

    def _leave(self, seat: _Seat) -> None:
        with self._changed:
            seat.in_use = seat.has_room = False
            seat.last_used = time.monotonic()
            self._changed.notify_all()

    @contextmanager
    def _if_free(self, seat: _Seat, patience_seconds: float = 0.0) -> Iterator[bool]:
        """Hold the seat's lock; False if another thread has it for longer than that."""
        free = seat.lock.acquire(timeout=patience_seconds)
        try:
            yield free
        finally:
            if free:
                seat.lock.release()

    def _opened(self, seat: _Seat) -> KVFSCache:
        """The seat's cache, on the mount that is there now; the seat's lock is held."""
        # A cache that is open holds on to its mount, so that no later one has its number;
        # one whose reopening failed does not.
        device = os.stat(self._directory).st_dev
        if seat.cache is None or device != seat.device:
            seat.device = 0
            try:
                seat.cache = self._open(seat)
            except NotKVFSError:
                # It was one when the router was made: for its users this is an outage.
                raise OSError(
                    errno.ENOTCONN, "no KVFS is mounted there any more", str(self._directory)
                ) from None
            seat.device = device
        return seat.cache

    def _open(self, seat: _Seat) -> KVFSCache:
        if seat.cache is not None:
            seat.cache.reopen()
            self._metrics.reopened()
            return seat.cache
        return KVFSCache.open(
            self._directory,
            seat.name,
            self._model,
            pool=self._pool,
            window=self._window,
            rank=self._rank,
            world=self._world,
        )

    def _let_go(self, seat: _Seat) -> None:
        with seat.lock:
            if seat.cache is None:
                return
            # On a mount that came back what is not written yet can still be.
            with suppress(OSError):
                self._opened(seat)
            cache, seat.cache, seat.hot = seat.cache, None, False
            cache.close()

    # Down

    def _keep(self) -> None:
        """Put sessions down when they have been idle for long enough; runs in a thread."""
        while (seat := self._idle_seat()) is not None:
            # Whatever is wrong with it is said to who uses it next.
            with suppress(OSError, ValueError, SessionBusyError):
                self._put_down(seat)
            with self._changed:
                # Of one that could not be put down: try again, but not at once.
                seat.last_used = time.monotonic()

    def _idle_seat(self) -> _Seat | None:
        """Wait for a session that has been idle for long enough; None when the router closes."""
        with self._changed:
            while not self._closed:
                idle = [seat for seat in self._seats.values() if seat.hot and not seat.in_use]
                if not idle:
                    self._changed.wait()
                    continue
                oldest = min(idle, key=lambda seat: seat.last_used)
                left = oldest.last_used + self._profile.hot_idle_seconds - time.monotonic()
                if left <= 0:
                    return oldest
                self._changed.wait(left)
        return None

    def _put_down(self, seat: _Seat) -> None:
        """All of a session leaves hot memory, unless it is in use."""
        with self._if_free(seat) as free, self._counting_faults():
            if free and seat.cache is not None:
                with self._timed_eviction():
                    self._opened(seat).release()
                seat.hot = False
                self._tell_what_is_hot(seat)

    def _make_room(self, nbytes: int) -> None:
        """Rounds go down, the oldest of the coldest session first, until `nbytes` more are free
        and a tenth of the budget is."""
        self._demote_until(
            max(self._free_bytes() + nbytes, int(self._pool.budget_bytes * _FREE_SHARE))
        )

    def _demote_until(self, goal: int) -> None:
        for patience_seconds in (0.0, _PATIENCE_SECONDS):
            for seat in self._coldest_first():
                if self._free_bytes() >= goal:
                    return
                self._demote(seat, goal, patience_seconds)

    def _demote(self, seat: _Seat, goal: int, patience_seconds: float) -> None:
        """Rounds of one session go down, the oldest first, until `goal` bytes are free."""
        with (
            self._if_free(seat, patience_seconds) as free,
            suppress(OSError),
            self._counting_faults(),
        ):
            if free and seat.cache is not None and seat.cache.resident_bytes:
                with self._timed_eviction():
                    while self._free_bytes() < goal and seat.cache.demote_oldest_round():
                        pass

    def _relieve_device(self) -> None:
        """Make room when the device itself is nearly full, whatever the budget says."""
        device = self._model.device
        if device.type != "cuda":
            return
        reserved = torch.cuda.memory_reserved(device)
        if reserved > _RESERVED_SHARE * torch.cuda.get_device_properties(device).total_memory and (
            self._free_bytes() < _FREE_SLABS_SHARE * self._pool.budget_bytes
        ):
            self._make_room(0)

    def _watch(self) -> None:
        """Spill while the device is too full; runs in a thread, until the router closes."""
        full = Alarm(_DEVICE_FULL_PCT, _DEVICE_FULL_SECONDS)
        while self._memory is not None and not self._closes_within(_LOOK_SECONDS):
            memory = self._memory()
            if full.saw(memory.used_pct, time.monotonic()):
                self._tell_of_memory(is_full=full.is_on)
            if full.is_on:
                self._spill(memory.used - memory.total * _DEVICE_GOAL_PCT // 100)

    def _closes_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)

    def _spill(self, nbytes: int) -> None:
        """Give up so many bytes of the device: those without KV, then rounds go down, the oldest of
        the coldest session first."""
        left = nbytes - self._pool.shrink(nbytes)
        if left > 0:
            self._demote_until(self._free_bytes() + left)
            self._pool.shrink(left)

    def _tell_of_memory(self, *, is_full: bool) -> None:
        if is_full:
            _log.warning(
                "%s was more than %d %% full for %d s: KV leaves it, the coldest first, until it "
                "is %d %% full",
                self._pool.device, _DEVICE_FULL_PCT, _DEVICE_FULL_SECONDS, _DEVICE_GOAL_PCT,
            )  # fmt: skip
        else:
            _log.info("%s is not more than %d %% full again", self._pool.device, _DEVICE_FULL_PCT)

    def _close_surplus(self) -> None:
        """Close the coldest of the open sessions that are idle, beyond what is kept open."""
        open_ones = [seat for seat in self._coldest_first() if seat.cache is not None]
        for seat in open_ones[: max(0, len(open_ones) - _OPEN_SESSIONS)]:
            with self._if_free(seat) as free, suppress(OSError), self._counting_faults():
                if free and seat.cache is not None:
                    self._opened(seat).close()
                    seat.cache, seat.hot = None, False

    def _coldest_first(self) -> list[_Seat]:
        with self._changed:
            resting = [seat for seat in self._seats.values() if not seat.has_room]
            heats = self._heat.heat(np.array([seat.number for seat in resting], np.int64))
        return [resting[at] for at in np.argsort(heats, kind="stable")]

    def _free_bytes(self) -> int:
        return self._pool.free_slabs * self._pool.slab_bytes

    # What the daemon is told, and what is counted

    def _tell(self, name: str, what: str, value: str) -> None:
        """Set `user.kvfs.<what>` of a session, where the daemon knows it."""
        try:
            os.setxattr(self._directory / name, f"user.kvfs.{what}", value.encode())
        except OSError as error:
            if error.errno not in _UNKNOWN_TO_DAEMON:
                raise

    def _tell_what_is_hot(self, seat: _Seat) -> None:
        """So that the daemon leaves what is here, and knows how often that was enough."""
        cache = seat.cache
        if cache is not None:
            counted = cache.counters
            stats = {
                "bytes": cache.resident_bytes,
                "hits": counted.hot_hits,
                "misses": counted.fetched_blocks,
            }
            self._tell(seat.name, "hint", f"hot_stats={json.dumps(stats)}")

    def _found(self, cache: KVFSCache) -> Found:
        """Where the session's KV is, before a turn moves it."""
        total = cache.get_seq_length() * self._token_bytes
        hot_bytes = min(total, cache.resident_bytes)
        below = total - hot_bytes
        return Found(hot_bytes, below, _tier_below(cache.path) if below else "warm")

    def _hot(self) -> Hot:
        with self._changed:
            open_ones = [seat for seat in self._seats.values() if seat.cache is not None]
            hot = sum(seat.hot for seat in open_ones)
        return Hot(self._pool.used_bytes, self._pool.budget_bytes, hot, len(open_ones) - hot)

    @contextmanager
    def _timed_eviction(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._metrics.evicted(time.perf_counter() - started)

    @contextmanager
    def _counting_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._metrics.fault()
            raise


def _tier_below(session: Path) -> Tier:
    """Where a session's KV is when it is not hot; cold unless all of it is warm."""
    try:
        told = os.getxattr(session, _TIER)
        if told == b"mixed":
            # Its small files count there too; what a turn reads is the layers.
            layers = [name for name in os.listdir(session) if name.startswith("layer.")]
            if all(os.getxattr(session / name, _TIER) == b"warm" for name in layers):
                told = b"warm"
    except OSError:
        return "cold"
    return "warm" if told == b"warm" else "cold"

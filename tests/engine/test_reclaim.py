"""Reclaim: what is a unit, which may go, which goes first, and what is told of it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from kvfs.engine import appender as appender_module
from kvfs.engine import checkpoints as checkpoints_module
from kvfs.engine import reclaim as reclaim_module
from kvfs.engine import store as store_module
from kvfs.engine import subtree
from kvfs.engine import units as units_module
from kvfs.engine import writer as writer_module
from kvfs.engine.format import TABLE_UNITS
from kvfs.engine.io import Step, run
from kvfs.engine.names import Names
from kvfs.engine.units import Units
from kvfs.tiers.policy import S3FIFO
from tests.crash.machine import Clock
from tests.engine.audit import audit, committed
from tests.engine.deferred import DeferredExecutor
from tests.engine.kit import DIRECTORY, MIB, Bench, failure_of, new_device, noise

DAY = 24 * 3600


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    modules = (reclaim_module, store_module, appender_module, checkpoints_module, writer_module)
    patches = [patch.object(module, "time", clock) for module in modules]
    for each in patches:
        each.start()
    yield clock
    for each in patches:
        each.stop()


@pytest.fixture
def ring(tmpfs: Path, clock: Clock) -> Bench:
    return Bench(tmpfs, new_device(segments=32))


def session(bench: Bench, name: bytes, size: int = MIB, parent: int = 1) -> int:
    ino = bench.make(name, parent=parent, mode=DIRECTORY)
    bench.make(b"session.json", parent=ino)
    bench.write(bench.make(b"layer.000", parent=ino), noise(size, len(name)))
    return ino


def units(bench: Bench) -> Units:
    return bench.store.units


def use(bench: Bench, ino: int) -> None:
    bench.store.opened(ino)
    bench.store.closed(ino)


def pass_time(bench: Bench, clock: Clock, seconds: float) -> None:
    run(bench.store.tick())
    clock.now += seconds


def fill(bench: Bench, clock: Clock, count: int) -> None:
    """Sessions of 1 MiB each, a minute apart."""
    for number in range(count):
        session(bench, b"session-%03d" % number)
        pass_time(bench, clock, 60)


def entries(bench: Bench) -> list[tuple[str, str]]:
    return [(entry["path"], entry["why"]) for entry in run(bench.store.reclaimer.entries())]


# -- what is a unit ----------------------------------------------------------------------


def test_a_directory_with_a_session_file_is_a_session_with_all_below_it(ring: Bench) -> None:
    ino = session(ring, b"session")
    below = ring.make(b"below", parent=ino, mode=DIRECTORY)
    file = ring.make(b"file", parent=below)
    for member in (ino, below, file, ring.find(b"layer.000", ino)):
        assert run(units(ring).unit_of(member)) == ino


def test_a_flat_directory_is_a_session_and_one_with_subdirectories_a_pool(ring: Bench) -> None:
    pool = ring.make(b"pool", mode=DIRECTORY)
    flat = ring.make(b"flat", parent=pool, mode=DIRECTORY)
    file, loose = ring.make(b"file", parent=flat), ring.make(b"loose", parent=pool)
    assert run(units(ring).unit_of(file)) == flat
    assert run(units(ring).unit_of(loose)) == loose


def test_a_pool_stays_one(ring: Bench) -> None:
    pool = ring.make(b"pool", mode=DIRECTORY)
    below = ring.make(b"below", parent=pool, mode=DIRECTORY)
    file = ring.make(b"file", parent=pool)
    assert run(units(ring).unit_of(file)) == file
    run(ring.store.rmdir(pool, b"below"))
    assert run(units(ring).unit_of(file)) == file
    run(ring.store.close())
    ring.open()
    assert run(units(ring).unit_of(file)) == file
    assert below != pool


def test_the_root_is_a_pool(ring: Bench) -> None:
    file = ring.make(b"file")
    assert run(units(ring).unit_of(file)) == file


def test_a_large_flat_directory_is_a_pool(ring: Bench) -> None:
    large = ring.make(b"large", mode=DIRECTORY)
    file = ring.make(b"file", parent=large)
    ring.write(file, noise(3 * MIB))
    assert run(units(ring).unit_of(file)) == file


@pytest.mark.parametrize("said", [b"session", b"pool"])
def test_what_the_xattr_says_holds_below_too(ring: Bench, said: bytes) -> None:
    top = ring.make(b"top", mode=DIRECTORY)
    run(ring.store.set_xattr(top, b"user.kvfs.unit", said))
    middle = ring.make(b"middle", parent=top, mode=DIRECTORY)
    file = ring.make(b"file", parent=middle)
    assert run(units(ring).unit_of(file)) == (top if said == b"session" else file)


# -- which goes first --------------------------------------------------------------------


def test_the_oldest_session_goes_when_the_ring_is_full(ring: Bench, clock: Clock) -> None:
    fill(ring, clock, 16)
    run(ring.store.sync())
    first = ring.find(b"layer.000", ring.find(b"session-000"))
    use(ring, first)
    pass_time(ring, clock, 120)
    for number in range(16, 24):
        session(ring, b"session-%03d" % number)
        pass_time(ring, clock, 60)
    gone = [path for path, _ in entries(ring)]
    assert gone
    assert gone == [f"session-{number:03}" for number in range(1, 1 + len(gone))]
    assert b"session-000" in ring.names(), "it was used"
    for name in ring.names():
        ino = ring.find(name)
        assert ring.read(ring.find(b"layer.000", ino)) == noise(MIB, len(name))
    run(ring.store.sync())
    audit(ring.store)


def test_a_policy_says_which_session_goes(tmpfs: Path, clock: Clock) -> None:
    """One that keeps what was used several times. Of what it did not see, the oldest go first."""
    policy = S3FIFO()
    options = store_module.StoreOptions(uid=0, gid=0, policy=policy)
    bench = Bench(tmpfs, new_device(segments=32), options=options)
    fill(bench, clock, 4)
    policy.forget(policy.victims(4, 0))
    for number in range(4, 16):
        ino = session(bench, b"session-%03d" % number)
        for _ in range(3 if number < 8 else 0):
            pass_time(bench, clock, 60)
            use(bench, ino)
        pass_time(bench, clock, 60)
    for number in range(16, 28):
        session(bench, b"session-%03d" % number)
        pass_time(bench, clock, 60)
    gone = [path for path, _ in entries(bench)]
    expected = [*range(4), *range(8, 28)]
    assert len(gone) > 5
    assert gone == [f"session-{number:03}" for number in expected[: len(gone)]]
    alive = {bench.find(name) for name in bench.names()}
    assert set(policy.victims(100, 0).tolist()) == alive


def test_files_of_a_pool_go_one_by_one(ring: Bench, clock: Clock) -> None:
    for number in range(40):
        ring.write(ring.make(b"file-%03d" % number), noise(MIB, number))
        pass_time(ring, clock, 30)
    gone = [path for path, _ in entries(ring)]
    assert gone == [f"file-{number:03}" for number in range(len(gone))]
    names = ring.names()
    assert len(names) + len(gone) == 40
    for name in names:
        assert ring.read(ring.find(name)) == noise(MIB, int(name[5:]))


@pytest.mark.plain
def test_nothing_that_is_pinned_open_or_just_used_goes(ring: Bench, clock: Clock) -> None:
    fill(ring, clock, 20)
    for name in ring.names():
        run(ring.store.set_xattr(ring.find(name), b"user.kvfs.pin", b"1"))
    opened = ring.names()[5]
    run(ring.store.remove_xattr(ring.find(opened), b"user.kvfs.pin"))
    ring.store.opened(ring.find(b"layer.000", ring.find(opened)))
    pass_time(ring, clock, 600)
    assert failure_of(fill_until_full(ring)) == errno.ENOSPC
    assert entries(ring) == []
    ring.store.closed(ring.find(b"layer.000", ring.find(opened)))
    pass_time(ring, clock, 600)
    ring.write(ring.make(b"another", parent=1), noise(MIB // 2))
    assert entries(ring)[0][0] == opened.decode()


def fill_until_full(bench: Bench) -> Step[None]:
    ino = bench.make(b"more")
    for number in range(64):
        yield from bench.store.write(ino, number * MIB, noise(MIB, number))


def test_a_full_ring_names_who_holds_it(
    ring: Bench, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    large, small = session(ring, b"large", 3 * MIB), session(ring, b"small", MIB)
    for ino in (large, small):
        run(ring.store.set_xattr(ino, b"user.kvfs.pin", b"1"))
    pass_time(ring, clock, 600)
    assert failure_of(fill_until_full(ring)) == errno.ENOSPC
    (line,) = [record.message for record in caplog.records if "held by" in record.message]
    assert line.index("large (") < line.index("small (")


def test_without_reclaim_a_full_ring_is_full(tmpfs: Path, clock: Clock) -> None:
    options = store_module.StoreOptions(reclaim=False, uid=0, gid=0)
    bench = Bench(tmpfs, new_device(segments=24), options=options)
    fill(bench, clock, 12)
    pass_time(bench, clock, 30 * DAY)
    assert failure_of(fill_until_full(bench)) == errno.ENOSPC
    assert len(bench.names()) == 13


def test_many_that_are_pinned_do_not_hide_those_that_may_go(ring: Bench, clock: Clock) -> None:
    with patch.object(units_module, "_VICTIMS", 10):
        for number in range(25):
            ino = session(ring, b"pinned-%03d" % number, 1000)
            run(ring.store.set_xattr(ino, b"user.kvfs.pin", b"1"))
            pass_time(ring, clock, 1)
        fill(ring, clock, 40)
    gone = [path for path, _ in entries(ring)]
    assert gone == [f"session-{number:03}" for number in range(len(gone))] != []
    assert len(ring.names()) == 25 + 40 - len(gone)


@pytest.mark.parametrize("is_written", [False, True])
def test_what_was_used_before_a_crash_may_go(ring: Bench, clock: Clock, is_written: bool) -> None:
    for number in range(20):
        session(ring, b"session-%03d" % number)
        clock.now += 60
    if is_written:
        run(ring.store.sync())
    ring.open()
    clock.now += 600
    for number in range(8):
        session(ring, b"other-%03d" % number)
    gone = [path for path, _ in entries(ring)]
    assert gone == [f"session-{number:03}" for number in range(len(gone))] != []
    assert "" not in [one.path for one in run(units(ring).sessions())], "the root is no session"


def test_many_uses_are_noted_in_several_ticks(ring: Bench, clock: Clock) -> None:
    for number in range(25):
        ring.make(b"%d" % number)
    noted = []
    with patch.multiple(store_module, _BOOKED_A_TICK=10, _BOOKED_SECONDS=-1):
        for _ in range(3):
            run(ring.store.tick())
            noted.append(len(run(units(ring)._records(0, 100))))
    assert noted == [10, 20, 25]


def test_a_fork_was_used_when_it_was_made(ring: Bench, clock: Clock) -> None:
    ino = session(ring, b"session")
    pass_time(ring, clock, 600)
    run(ring.store.fork(ino, b"fork"))
    run(ring.store.tick())
    assert [one.path for one in run(units(ring).sessions())] == ["fork", "session"]


def test_sessions_are_listed_in_parts_with_their_paths_and_pins(ring: Bench) -> None:
    """A pin is inherited from the nearest directory above that has one, 0 too."""
    team = ring.make(b"team", mode=DIRECTORY)
    deep = ring.make(b"deep", parent=team, mode=DIRECTORY)
    pins = {ring.find(b"team"): b"1", deep: b"0"}
    for parent in (1, team, deep):
        for name in (b"plain", b"pinned"):
            ino = session(ring, name, 1000, parent)
            if name == b"pinned":
                pins[ino] = b"1"
    for ino, pin in pins.items():
        run(ring.store.set_xattr(ino, b"user.kvfs.pin", pin))
    run(ring.store.book_uses())
    whole = {one.path: one.pinned for one in run(units(ring).sessions())}
    assert whole == {
        "plain": False, "pinned": True, "team/plain": True, "team/pinned": True,
        "team/deep/plain": False, "team/deep/pinned": True,
    }  # fmt: skip
    parts, cursor, count = {}, 0, 0
    while cursor is not None:
        found, cursor = run(units(ring).some_sessions(cursor, 2))
        count += 1
        for ino, one in found.items():
            assert one.path.encode() == run(units(ring).path(ino))
            assert one.pinned == run(units(ring).is_pinned(ino))
            parts[one.path] = one.pinned
    assert parts == whole
    assert count > 3


def test_one_that_is_too_large_to_go_at_once_does_not_keep_others(
    ring: Bench, clock: Clock
) -> None:
    with patch.object(subtree, "INODES_MAX", 8):
        large, other = session(ring, b"large", 1000), session(ring, b"other", 1000)
        for number in range(10):
            ring.make(b"%d" % number, parent=large)
        for ino in (large, other):
            run(ring.store.set_xattr(ino, b"user.kvfs.ttl", b"50"))
        pass_time(ring, clock, 100)
        run(ring.store.tick())
        assert ring.names() == [b"large"]
        fill(ring, clock, 24)
    assert b"large" in ring.names()
    assert len(entries(ring)) > 1


def test_the_directory_of_a_pool_is_no_unit(ring: Bench, clock: Clock) -> None:
    before = ring.make(b"before", mode=DIRECTORY)
    ring.make(b"file", parent=before)
    pass_time(ring, clock, 10)
    for name in (b"before", b"pool"):
        ino = before if name == b"before" else ring.make(name, mode=DIRECTORY)
        run(ring.store.set_xattr(ino, b"user.kvfs.unit", b"pool"))
    for number in range(40):
        parent = (before, ino)[number % 2]
        ring.write(ring.make(b"file-%03d" % number, parent=parent), noise(MIB, number))
        pass_time(ring, clock, 30)
    gone = [path for path, _ in entries(ring)]
    assert len(gone) > 5
    assert {"before", "pool"}.isdisjoint(gone)
    assert len(ring.names(before) + ring.names(ino)) == 41 - len(gone)


@pytest.mark.parametrize("how", ["grows", "is said to be one"])
@pytest.mark.parametrize("below", [False, True])
def test_files_of_a_session_that_became_a_pool_go_one_by_one(
    ring: Bench, clock: Clock, how: str, below: bool
) -> None:
    """Those too that were not used since, and though all else there is may not go."""
    top = ring.make(b"top", mode=DIRECTORY)
    cache = ring.make(b"cache", parent=top, mode=DIRECTORY) if below else top
    ring.write(ring.make(b"file-000", parent=cache), noise(MIB, 0))
    run(ring.store.set_xattr(top, b"user.kvfs.unit", b"session"))
    pass_time(ring, clock, 1)
    for number in range(1, 16):
        ring.write(ring.make(b"file-%03d" % number, parent=cache), noise(MIB, number))
        pass_time(ring, clock, 1)
    if how == "grows":
        run(ring.store.remove_xattr(top, b"user.kvfs.unit"))
    else:
        run(ring.store.set_xattr(top, b"user.kvfs.unit", b"pool"))
    run(ring.store.set_xattr(session(ring, b"held", 1000), b"user.kvfs.pin", b"1"))
    pass_time(ring, clock, 600)
    for number in range(8):
        ring.write(ring.make(b"more-%03d" % number), noise(MIB, number))
    gone = {path for path, _ in entries(ring)}
    prefix = "top/cache" if below else "top"
    assert 0 < len(gone) < 16
    assert gone < {f"{prefix}/file-{number:03}" for number in range(16)}
    run(ring.store.sync())
    audit(ring.store)


def test_nothing_is_left_of_units_that_were_removed(ring: Bench, clock: Clock) -> None:
    for number in range(50):
        ring.write(ring.make(b"%d" % number), b"x")
    session(ring, b"session")
    pass_time(ring, clock, 100)
    run(ring.store.checkpoint())
    for number in range(50):
        run(ring.store.unlink(1, b"%d" % number))
    run(ring.store.tick())
    run(ring.store.checkpoint())
    kept = [key for key, _ in committed(ring.store) if key[0] == TABLE_UNITS]
    assert len(kept) == 1


@pytest.mark.parametrize("seed", range(8))
def test_what_is_opened_meanwhile_stays(tmpfs: Path, clock: Clock, seed: int) -> None:
    """However far its removal has come: it goes whole before, or stays whole."""
    device = new_device(segments=32)
    executor = DeferredExecutor(device, Random(seed))
    ring = Bench(tmpfs, device)
    inos = [session(ring, b"session-%d" % number, 300_000) for number in range(6)]
    for ino in inos:
        run(ring.store.set_xattr(ino, b"user.kvfs.ttl", b"50"))
    run(ring.store.close())
    ring.make_executor = lambda: executor
    store = ring.open()
    clock.now += 100
    task = executor.begin(store.tick())
    layers = [executor.begin(store.lookup(ino, b"layer.000")) for ino in inos]
    opened = []
    while not task.done:
        executor.happen()
        for layer in layers:
            if layer.done and layer not in opened and layer.completion.error is None:
                opened.append(layer)
                store.opened(layer.completion.result().inode.ino)
    executor.settle()
    for layer in opened:
        ino = layer.completion.result().inode.ino
        assert len(executor.run(store.read(ino, 0, MIB))) == 300_000


# -- expiry ------------------------------------------------------------------------------


def test_a_time_to_live_is_kept(ring: Bench, clock: Clock) -> None:
    short, long = session(ring, b"short"), session(ring, b"long")
    run(ring.store.set_xattr(short, b"user.kvfs.ttl", b"100"))
    pass_time(ring, clock, 90)
    run(ring.store.tick())
    assert ring.names() == [b"long", b"short"]
    use(ring, ring.find(b"layer.000", short))
    pass_time(ring, clock, 90)
    run(ring.store.tick())
    assert ring.names() == [b"long", b"short"], "the time counts from its last use"
    pass_time(ring, clock, 20)
    run(ring.store.tick())
    assert ring.names() == [b"long"]
    assert entries(ring) == [("short", "its ttl is over")]
    assert ring.read(ring.find(b"layer.000", long)) == noise(MIB, 4)


def test_a_week_without_use_ends_a_session_only_while_the_ring_is_filling(
    ring: Bench, clock: Clock
) -> None:
    session(ring, b"old")
    pass_time(ring, clock, 8 * DAY)
    run(ring.store.tick())
    assert b"old" in ring.names()
    for number in range(17):
        session(ring, b"session-%03d" % number)
    run(ring.store.tick())
    assert b"old" not in ring.names()
    assert ("old", "unused for 7 days") in entries(ring)


def test_when_a_session_was_used_survives_a_clean_end(ring: Bench, clock: Clock) -> None:
    ino = session(ring, b"session")
    run(ring.store.set_xattr(ino, b"user.kvfs.ttl", b"1000"))
    pass_time(ring, clock, 500)
    run(ring.store.close())
    ring.open()
    pass_time(ring, clock, 400)
    run(ring.store.tick())
    assert ring.names() == [b"session"]
    pass_time(ring, clock, 200)
    run(ring.store.tick())
    assert ring.names() == []


# -- what is told ------------------------------------------------------------------------


def test_who_watches_is_told_children_first(ring: Bench, clock: Clock) -> None:
    told: list[tuple[int, bytes]] = []
    ring.store.reclaimer.on_removed = told.extend
    ino = session(ring, b"session")
    below = ring.make(b"below", parent=ino, mode=DIRECTORY)
    ring.make(b"file", parent=below)
    run(ring.store.set_xattr(ino, b"user.kvfs.ttl", b"100"))
    pass_time(ring, clock, 200)
    run(ring.store.tick())
    assert told[-1] == (1, b"session")
    assert told.index((below, b"file")) < told.index((ino, b"below"))


def test_the_log_survives_a_crash(ring: Bench, clock: Clock) -> None:
    ino = session(ring, b"session")
    run(ring.store.set_xattr(ino, b"user.kvfs.ttl", b"100"))
    pass_time(ring, clock, 200)
    run(ring.store.tick())
    ring.open()
    (entry,) = run(ring.store.reclaimer.entries())
    assert (entry["path"], entry["uid"], entry["why"]) == ("session", 0, "its ttl is over")
    assert entry["stored"] >= MIB


def test_a_file_that_is_linked_elsewhere_lives_on(ring: Bench, clock: Clock) -> None:
    ino = session(ring, b"session")
    keep = ring.make(b"keep", mode=DIRECTORY)
    run(ring.store.set_xattr(keep, b"user.kvfs.pin", b"1"))
    run(ring.store.link(ring.find(b"layer.000", ino), keep, b"mine"))
    run(ring.store.set_xattr(ino, b"user.kvfs.ttl", b"100"))
    pass_time(ring, clock, 200)
    run(ring.store.tick())
    assert ring.names() == [b"keep"]
    mine = ring.find(b"mine", keep)
    assert run(ring.store.node(mine)).inode.nlink == 1
    assert ring.read(mine) == noise(MIB, 7)
    run(ring.store.sync())
    audit(ring.store)


@pytest.mark.parametrize("stage", ["buffered", "reopened", "killed"])
def test_a_session_whose_files_share_bytes_goes_with_them(
    ring: Bench, clock: Clock, stage: str
) -> None:
    ino = session(ring, b"session")
    first = ring.make(b"first", parent=ino, mode=DIRECTORY)
    ring.write(ring.make(b"layer", parent=first), noise(200_000))
    run(ring.store.fork(first, b"second"))
    run(ring.store.set_xattr(ino, b"user.kvfs.ttl", b"100"))
    pass_time(ring, clock, 10)
    run(ring.store.checkpoint())
    ring.stage = stage
    ring.settle()
    pass_time(ring, clock, 200)
    run(ring.store.tick())
    assert ring.names() == []
    run(ring.store.sync())
    audit(ring.store)


def test_what_reclaim_may_remove_counts_as_available(ring: Bench, clock: Clock) -> None:
    """Also when nothing had to go for long, and what went is not counted twice."""
    fill(ring, clock, 12)
    pass_time(ring, clock, 600)
    run(ring.store.tick())
    usage = ring.store.usage()
    assert usage.free + 11 * MIB <= usage.available < usage.free + 13 * MIB
    assert run(ring.store.reclaimer.make_space(6 * MIB))
    run(ring.store.sync())
    usage = ring.store.usage()
    assert usage.free + 5 * MIB <= usage.available < usage.free + 7 * MIB
    pass_time(ring, clock, 10)
    run(ring.store.tick())
    usage = ring.store.usage()
    assert usage.free + 5 * MIB <= usage.available < usage.free + 7 * MIB


def test_what_reclaim_may_remove_is_counted_in_parts(
    ring: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim_module, "_SCANNED_A_SECOND", 5)
    fill(ring, clock, 12)
    pass_time(ring, clock, 600)
    for _ in range(6):
        run(ring.store.tick())
    usage = ring.store.usage()
    assert usage.free + 11 * MIB <= usage.available < usage.free + 13 * MIB


def test_what_is_in_a_deep_tree_is_booked_without_looking_up_again_for_each(
    ring: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait for the tick that books: for 1500 levels it took hours."""
    depth = sys.getrecursionlimit()
    deep = session(ring, b"deep", 100)
    for parent in (1, deep):
        for _ in range(depth):
            parent = ring.make(b"d", parent=parent, mode=DIRECTORY)
        ring.write(ring.make(b"file", parent=parent), b"data")
    asked: list[int] = []
    xattr = Names.xattr
    monkeypatch.setattr(
        Names, "xattr", lambda names, ino, name: asked.append(ino) or xattr(names, ino, name)
    )
    run(units(ring).book())
    assert depth < len(asked) < 8 * depth

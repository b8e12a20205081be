"""Operations, cuts and reopenings in any order, compared with the model.

The crash rule (docs: the state after a crash is the state after some prefix of the
operations, which contains all that was confirmed as durable) is checked at arbitrary
moments of the recorded history of the device, with what no flush covered lost, torn or
reordered. After SIGKILL, when the buffer is kept, nothing at all may be missing.
"""

from __future__ import annotations

import errno
import gc
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvfs.engine import appender as appender_module
from kvfs.engine import checkpoints as checkpoints_module
from kvfs.engine import failover as failover_module
from kvfs.engine import reclaim as reclaim_module
from kvfs.engine import store as store_module
from kvfs.engine import superblocks as superblocks_module
from kvfs.engine import writeback as writeback_module
from kvfs.engine import writer as writer_module
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    SUPERBLOCK_ADDRESSES,
    FormatError,
    Superblock,
)
from kvfs.engine.io import InlineExecutor, Step, run
from kvfs.engine.store import Store, StoreOptions
from kvfs.engine.superblocks import Encryption, format_device
from kvfs.engine.units import Victim
from kvfs.tiers import oplog
from kvfs.tiers.oplog import OperationLog
from kvfs.tiers.warm import WarmTier
from tests.crash.model import ROOT, Tree, View, difference, view_of
from tests.engine.audit import audit
from tests.engine.deferred import DeferredExecutor
from tests.support.devices import Flushed, MemoryDevice, RecordingDevice, random_survival
from tests.support.encrypted import KEY

T = TypeVar("T")
MIB = 1024 * 1024
# Little stays in memory, so that much is loaded again.
OPTIONS = StoreOptions(
    cache_size=4 * MIB, index_cache_size=256 * 1024, nodes_max=16, reclaim=False, uid=0, gid=0
)
_HISTORY_BYTES = 24 * MIB
_INODES_MAX = 60
_LOG_CHUNK = 2 * MIB
_LOG_LIMIT = 8 * MIB
_DIRECTORY_MODE = stat.S_IFDIR | 0o755
_FILE_MODE = stat.S_IFREG | 0o644
_LINK_MODE = stat.S_IFLNK | 0o777

NAMES = st.sampled_from([b"a", b"b", b"c", b"layer.000", b"\xff\x01 x", b"n" * 255])
SEEDS = st.integers(0, 2**32 - 1)
PICKS = st.integers(0, 1000)
SIZES = st.one_of(
    st.integers(1, 5000),
    st.integers(1, 16).map(lambda blocks: blocks * 4096),
    st.integers(1, 400_000),
)
OFFSETS = st.one_of(st.integers(0, 10_000), st.integers(0, 100).map(lambda b: b * 4096))
KINDS = st.sampled_from(["file", "file", "directory", "symlink", "link"])
RENAMES = st.sampled_from(["replace", "replace", "noreplace", "exchange"])
ENDS = st.sampled_from(["closed", "killed", "killed", "power cut"])
CHANGES = st.one_of(
    st.tuples(st.none(), st.sampled_from([0o600, 0o755])),
    st.tuples(st.sampled_from([b"user.kvfs.codec", b"user.x", b"user.large"]), st.none()),
    st.tuples(st.just(b"user.kvfs.codec"), st.sampled_from([b"auto", b"none", b"zstd", b"planes"])),
    st.tuples(st.just(b"user.kvfs.dtype"), st.sampled_from([b"bfloat16", b"float32", b"odd"])),
    st.tuples(st.just(b"user.kvfs.shape"), st.sampled_from([b"2,3,64", b"1000", b"odd"])),
    st.tuples(st.sampled_from([b"user.x", b"user." + b"y" * 250]), st.binary(max_size=20)),
    st.tuples(st.just(b"user.large"), st.integers(0, 65536).map(lambda size: b"v" * size)),
)


@dataclass
class Clock:
    """Stands in for the module `time`, so that an example is the same each time."""

    now: float = 1.7e9

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def time_ns(self) -> int:
        self.now += 1e-3
        return int(self.now * 1e9)


def content(seed: int, size: int) -> bytes:
    """Bytes that compress, or do not, or look like bfloat16."""
    random = Random(seed)
    match seed % 4:
        case 0:
            return bytes([seed & 0xFF]) * size
        case 1:
            return (random.randbytes(97) * (size // 97 + 1))[:size]
        case 2:
            low = random.randbytes(size // 2 + 1)
            return bytes(b for pair in zip(low, b"\x3f" * len(low), strict=True) for b in pair)[
                :size
            ]
        case _:
            return random.randbytes(size)


class CrashMachine(RuleBasedStateMachine):
    """Work is done in place: what is asked for has happened when the call returns."""

    encryption: Encryption | None = None
    options = OPTIONS

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.clock = Clock()
        self.directory = Path(tempfile.mkdtemp(prefix="kvfs-crash-", dir="/dev/shm"))
        self.states: list[Tree] = [Tree()]
        self.used: list[int] = []
        self.pinned: list[int] = []
        self.boots = 0

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.check_everything(0)
        finally:
            self.patches.close()
            shutil.rmtree(self.directory)
            # A machine outlives its example by far; what it holds must not.
            for name in ("store", "device", "executor", "states"):
                self.__dict__.pop(name, None)
            gc.collect()

    @property
    def tree(self) -> Tree:
        return self.states[-1]

    # -- opening and driving

    @initialize(segments=st.integers(12, 16), batch=st.sampled_from([MIB // 4, MIB, 8 * MIB]))
    def begins(self, segments: int, batch: int) -> None:
        modules = (
            store_module, appender_module, checkpoints_module, writer_module, writeback_module,
            superblocks_module, reclaim_module, failover_module,
        )  # fmt: skip
        for module in modules:
            self.patches.enter_context(patch.object(module, "time", self.clock))
        self.patches.enter_context(patch.object(writer_module, "BATCH_SIZE", batch))
        self.patches.enter_context(patch.object(oplog, "CHUNK_SIZE", _LOG_CHUNK))
        formatted = RecordingDevice.of_size(DATA_START + segments * MIB)
        format_device(formatted, MIB, encryption=self.encryption)
        self.device = RecordingDevice(formatted.image)
        self.open()
        directory = self.make(ROOT, b"session", _DIRECTORY_MODE)
        for parent in (ROOT, directory or ROOT):
            self.make(parent, b"layer.000", _FILE_MODE)

    def open(self) -> None:
        self.pinned = []
        self.executor = self.make_executor()
        warm = WarmTier(self.directory / "warm", _LOG_LIMIT, self.executor, f"boot {self.boots}")
        self.store = Store.open(self.device, "ring", self.executor, warm, self.options, KEY)
        assert self.store.damage is None

    def make_executor(self) -> Any:
        return InlineExecutor()

    def run(self, step: Step[T], seed: int = 0) -> T:
        return run(step)

    def confirming(self, step: Step[None]) -> Step[None]:
        """What was answered when it begins is durable when it ends."""
        answered = len(self.states) - 1
        yield from step
        before = self.device.noted("confirmed", len(self.device.events), 0)
        self.device.note("confirmed", max(answered, before))

    def do(self, step: Step[T], change: Callable[[Tree, T], Tree], seed: int = 0) -> T | None:
        """An operation on the store and the model: both do it, or fail alike."""
        try:
            change(self.tree, 0)  # type: ignore[arg-type]
            expected = None
        except OSError as failure:
            expected = failure.errno
        self.device.note("started", len(self.states))
        try:
            result = self.run(step, seed)
        except OSError as failure:
            if failure.errno == errno.ENOSPC:
                assert self.store.usage().free < 2 * MIB, "much is free"
            else:
                assert failure.errno == expected, failure
            return None
        assert expected is None, f"expected {errno.errorcode[expected or 0]}"
        self.states.append(change(self.tree, result))
        return result

    # -- what to work on

    def a_directory(self, pick: int) -> int:
        directories = self.tree.directories()
        return directories[pick % len(directories)]

    def a_file(self, pick: int) -> int | None:
        """One with a name, or one that is only held. None when a new one has no space."""
        files = [*self.tree.files(), *self.pinned]
        return files[pick % len(files)] if files else self.make(ROOT, b"another", _FILE_MODE)

    def a_name(self, pick: int) -> tuple[int, bytes] | None:
        names = self.tree.names()
        return names[pick % len(names)] if names else None

    # -- operations

    @rule(pick=PICKS, name=NAMES, kind=KINDS, points_to=st.binary(min_size=1, max_size=300))
    def create(self, pick: int, name: bytes, kind: str, points_to: bytes) -> None:
        parent = self.a_directory(pick)
        match kind:
            case "file":
                self.make(parent, name, _FILE_MODE)
            case "directory":
                self.make(parent, name, _DIRECTORY_MODE)
            case "symlink":
                self.make(parent, name, _LINK_MODE, points_to)
            case "link":
                ino = self.a_file(pick)
                if ino is not None:
                    step = self.store.link(ino, parent, name)
                    self.do(step, lambda tree, _: tree.link(ino, parent, name))

    def make(self, parent: int, name: bytes, mode: int, target: bytes = b"") -> int | None:
        def made(tree: Tree, node: Any) -> Tree:
            ino = node.inode.ino if node else 0
            return tree.create(ino, parent, name, mode, target)

        node = self.do(self.store.create(parent, name, mode, 0, 0, target=target), made)
        if node is None:
            return None
        assert node.inode.ino not in self.used, "an inode number was given twice"
        ino: int = node.inode.ino
        self.used.append(ino)
        self.device.note("used", len(self.used))
        return ino

    @rule(pick=PICKS, name=NAMES, seed=SEEDS)
    def fork(self, pick: int, name: bytes, seed: int) -> None:
        source = self.a_directory(pick)
        if len(self.tree.reachable()) > _INODES_MAX:
            return

        def forked(tree: Tree, node: Any) -> Tree:
            copies = {ino: -ino for ino in tree.below(source)}
            if node:
                copies = self.copies(tree, source, node.inode.ino)
                self.used += copies.values()
                self.device.note("used", len(self.used))
            return tree.fork(source, name, copies)

        self.do(self.store.fork(source, name), forked, seed)

    def copies(self, tree: Tree, source: int, root: int) -> dict[int, int]:
        copies = {source: root}
        for ino in tree.below(source):
            for name, child in tree.nodes[ino].entries.items():
                copies[child] = self.run(self.store.lookup(copies[ino], name)).inode.ino
        assert not set(copies.values()) & set(self.used), "an inode number was given twice"
        return copies

    @rule(pick=PICKS, offset=OFFSETS, size=SIZES, seed=SEEDS)
    def write(self, pick: int, offset: int, size: int, seed: int) -> None:
        ino = self.a_file(pick)
        if ino is not None:
            self.write_to(ino, offset, content(seed, size), seed)

    @rule(picks=st.lists(PICKS, min_size=1, max_size=6), size=SIZES, seed=SEEDS)
    def append(self, picks: list[int], size: int, seed: int) -> None:
        """To several files in turn, as a stream of tokens to the layers."""
        for pick in picks:
            ino = self.a_file(pick)
            if ino is not None:
                end = self.tree.nodes[ino].content.size
                self.write_to(ino, end, content(seed + pick, size), seed)

    @rule(pick=PICKS, times=st.integers(1, 12), seed=SEEDS)
    def fill(self, pick: int, times: int, seed: int) -> None:
        """Large writes, until the ring is full perhaps."""
        ino = self.a_file(pick)
        for number in range(times if ino is not None else 0):
            data = Random(seed + number).randbytes(MIB)
            if not self.write_to(ino or 0, number * MIB, data, seed):
                return

    def write_to(self, ino: int, offset: int, data: bytes, seed: int) -> bool:
        step = self.store.write(ino, offset, data)
        return self.do(step, lambda tree, _: tree.write(ino, offset, data), seed) is not None

    @rule(pick=PICKS, size=st.one_of(SIZES, st.just(0)), seed=SEEDS)
    def truncate(self, pick: int, size: int, seed: int) -> None:
        ino = self.a_file(pick)
        if ino is not None:
            step = self.store.set_attributes(ino, size=size)
            self.do(step, lambda tree, _: tree.truncate(ino, size), seed)

    @rule(pick=PICKS, to=PICKS, new=NAMES, how=RENAMES, seed=SEEDS)
    def rename(self, pick: int, to: int, new: bytes, how: str, seed: int) -> None:
        old, parent = self.a_name(pick), self.a_directory(to)
        if old is not None:
            replace, exchange = how == "replace", how == "exchange"
            step = self.store.rename(*old, parent, new, replace=replace, exchange=exchange)
            self.do(step, lambda tree, _: tree.rename(*old, parent, new, how), seed)

    @rule(pick=PICKS, seed=SEEDS)
    def remove(self, pick: int, seed: int) -> None:
        name = self.a_name(pick)
        if name is None:
            return
        if self.tree.nodes[self.tree.nodes[name[0]].entries[name[1]]].is_directory:
            self.do(self.store.rmdir(*name), lambda tree, _: tree.rmdir(*name), seed)
        else:
            self.do(self.store.unlink(*name), lambda tree, _: tree.unlink(*name), seed)

    @rule(pick=PICKS, change=CHANGES)
    def change_attributes(self, pick: int, change: tuple[bytes | None, Any]) -> None:
        """The mode, or an xattr: set it, or remove it."""
        inos = self.tree.reachable()
        ino, (name, value) = inos[pick % len(inos)], change
        if name is None:
            step = self.store.set_attributes(ino, mode=value)
            self.do(step, lambda tree, _: tree.chmod(ino, value))
        elif value is None:
            self.do(self.store.remove_xattr(ino, name), lambda t, _: t.remove_xattr(ino, name))
        else:
            self.do(
                self.store.set_xattr(ino, name, value), lambda t, _: t.set_xattr(ino, name, value)
            )

    @rule(pick=PICKS, seed=SEEDS)
    def hold_or_let_go(self, pick: int, seed: int) -> None:
        """As an open file does: it lives on without a name."""
        if len(self.pinned) > seed % 4:
            ino = self.pinned.pop(pick % len(self.pinned))
            self.store.closed(ino)
            self.run(self.store.unpin(ino), seed)
            if seed % 2:
                self.run(self.store.drop_free(), seed)
        else:
            ino = self.a_file(pick)
            if ino is not None:
                self.store.opened(ino)
                self.store.pin(ino)
                self.pinned.append(ino)

    @rule(pick=PICKS, seed=SEEDS)
    def reclaim(self, pick: int, seed: int) -> None:
        """A unit, unless something in it is open."""
        named = self.a_name(pick)
        if named is None or len(self.tree.reachable()) > _INODES_MAX:
            return
        self.time_passes(400, seed)
        ino = self.tree.nodes[named[0]].entries[named[1]]
        inode = self.run(self.store.node(ino), seed).inode
        if (inode.parent, inode.name) != named:
            return  # a hard link: it is reclaimed by its newest name
        units = self.store.units
        is_pool = self.tree.nodes[ino].is_directory and not self.run(units.is_session(ino), seed)
        if is_pool or self.run(units.unit_of(ino), seed) != ino:
            return
        held = set(self.tree.below(ino)) & set(self.pinned)
        victim = Victim(ino, self.run(units.unit(ino), seed))
        step = self.store.reclaimer.remove(victim, "a test", self.clock.time_ns())

        def reclaimed(tree: Tree, went: Any) -> Tree:
            return tree.reclaim(*named) if went else tree

        went = self.do(step, reclaimed, seed)
        assert went in (None, not held)

    @rule(pick=PICKS, offset=OFFSETS, size=SIZES, seed=SEEDS)
    def read(self, pick: int, offset: int, size: int, seed: int) -> None:
        ino = self.a_file(pick)
        if ino is not None:
            expected = bytes(self.tree.nodes[ino].content)[offset : offset + size]
            assert bytes(self.run(self.store.read(ino, offset, size), seed)) == expected

    # -- durability

    @rule(which=st.sampled_from(["sync", "sync", "checkpoint"]), seed=SEEDS)
    def make_durable(self, which: str, seed: int) -> None:
        step = self.store.sync() if which == "sync" else self.store.checkpoint()
        self.run(self.confirming(step), seed)

    @rule(seed=SEEDS)
    def clean(self, seed: int) -> None:
        self.run(self.store.clean(), seed)

    @rule(seconds=st.sampled_from([5, 30, 400]), seed=SEEDS)
    def time_passes(self, seconds: int, seed: int) -> None:
        """Sealed after 5 s, flushed after 30 s, a checkpoint after 300 s."""
        self.clock.now += seconds
        self.run(self.store.tick(), seed)

    @rule(how=ENDS, back=st.integers(0, 10), seed=SEEDS)
    def end(self, how: str, back: int, seed: int) -> None:
        match how:
            case "closed":
                self.close_and_open(seed)
            case "killed":
                self.killed(seed)
            case "power cut":
                self.power_cut(back, seed)

    def close_and_open(self, seed: int) -> None:
        expected, attributes = self.tree.view(), self.attributes()
        self.run(self.confirming(self.store.close()), seed)
        self.open()
        assert self.store.counters.recovered_operations == 0
        assert self.store.counters.replayed_frames == 0
        self.expect(expected, "after a clean end")
        assert self.attributes() == attributes

    def killed(self, seed: int) -> None:
        """SIGKILL: the machine lives on, and with it the tmpfs."""
        expected, attributes = self.tree.view(), self.attributes()
        self.stop(seed)
        self.open()
        self.expect(expected, "after SIGKILL")
        assert self.attributes() == attributes

    def power_cut(self, back: int, seed: int) -> None:
        """It takes the tmpfs with it, and what no flush covered, or some of that."""
        self.stop(seed)
        moment = self.a_moment(back, seed)
        image = self.device.image_after(moment, random_survival(Random(seed)))
        candidates = self.candidates(moment)
        self.used = self.used_until(moment)
        shutil.rmtree(self.directory / "warm")
        self.boots += 1
        self.device = RecordingDevice(image)
        self.open()
        view = view_of(self.store, self.run)
        self.matching(view, candidates)
        # Of states that look alike it is the one with the same inode numbers.
        alike = [tree for tree in candidates if tree.view() == view and self.is_numbered(tree)]
        self.states = alike[-1:]
        self.device.note("used", len(self.used))

    def is_numbered(self, tree: Tree) -> bool:
        """Whether the names in the store are of the inodes that the tree has."""
        try:
            found = {
                ino: {
                    entry.name: entry.ino
                    for _, entry in self.run(self.store.list_directory(ino, 0, 1000))
                }
                for ino in tree.directories()
            }
        except FileNotFoundError:
            return False
        return all(found[ino] == tree.nodes[ino].entries for ino in found)

    def stop(self, seed: int) -> None:
        """The process ends without a word."""

    # -- checks

    @rule(backs=st.lists(st.integers(0, 60), min_size=1, max_size=4), seed=SEEDS)
    def crash_is_a_prefix(self, backs: list[int], seed: int) -> None:
        """What would be there if the power had failed at a moment that has passed."""
        for number, back in enumerate(backs):
            moment = self.a_moment(back, seed + number)
            image = self.device.image_after(moment, random_survival(Random(seed + number)))
            if seed % 3 == 0:
                lose_newest_superblock(image)
            newest_given = max(self.used_until(moment), default=0)
            self.check_image(image, self.candidates(moment), newest_given)

    def a_moment(self, back: int, seed: int) -> int:
        """Any, or one before a flush: that is when most is at stake."""
        events = self.device.events
        flushes = [at for at, event in enumerate(events) if isinstance(event, Flushed)]
        moments = flushes if flushes and seed % 2 else range(len(events) + 1)
        return moments[-1 - back % len(moments)]

    def check_image(self, image: bytearray, candidates: list[Tree], newest_given: int) -> None:
        """It is a state that may be, and work goes on from it."""
        device = MemoryDevice(image)
        with tempfile.TemporaryDirectory(dir=self.directory) as directory:
            log = Path(directory, "log")
            store = open_inline(device, log)
            view = view_of(store, run)
            self.matching(view, candidates)
            self.check_work_goes_on(store, newest_given)
            run(store.close())
            assert not log.exists()
            store = open_inline(device, log)
            expect_view(view, view_of(store, run), "after more work and a clean end")
            run(store.close())

    def check_work_goes_on(self, store: Store, newest_given: int) -> None:
        """A new file can be written, and its ids are new; or there is no space."""
        newest = audit_after_sync(store).newest_id
        name = b"made after the crash"
        try:
            ino = run(store.create(ROOT, name, _FILE_MODE, 0, 0)).inode.ino
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
            return
        assert ino > max(newest, newest_given), "an id was given twice"
        try:
            run(store.write(ino, 0, b"w" * 100_000))
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
        audit_after_sync(store)
        run(store.unlink(ROOT, name))

    def candidates(self, moment: int) -> list[Tree]:
        """The states that may be found after a power cut at this moment."""
        low = self.device.noted("confirmed", moment, 0)
        high = self.device.noted("started", moment, 0)
        return self.states[low : high + 1]

    def matching(self, view: View, candidates: list[Tree]) -> Tree:
        for tree in reversed(candidates):
            if tree.view() == view:
                return tree
        newest, oldest = candidates[-1].view(), candidates[0].view()
        raise AssertionError(
            f"no prefix of the operations; compared with the newest of {len(candidates)}: "
            f"{difference(newest, view)}; with the oldest: {difference(oldest, view)}"
        )

    def expect(self, expected: View, when: str) -> None:
        expect_view(expected, view_of(self.store, self.run), when)

    def used_until(self, moment: int) -> list[int]:
        """The inode numbers that had been given by then."""
        return self.used[: self.device.noted("used", moment, 0)]

    def attributes(self) -> dict[int, Any]:
        """All that stat tells of what has a name, but what it takes on the device."""
        found = {}
        for ino in self.tree.reachable():
            inode = run(self.store.node(ino)).inode
            names = [name for name in inode.__slots__ if name != "stored"]
            found[ino] = [getattr(inode, name) for name in names]
        return found

    @invariant()
    def lives(self) -> None:
        if hasattr(self, "store"):
            assert self.store.failure is None
            self.forget_old_history()

    def forget_old_history(self) -> None:
        size = sum(len(getattr(event, "data", b"")) for event in self.device.events)
        if size > _HISTORY_BYTES:
            self.device.forget(len(self.device.events) // 2)

    @rule(seed=SEEDS)
    def check_everything(self, seed: int) -> None:
        self.expect(self.tree.view(), "while it is open")
        for ino in self.pinned:
            size = self.tree.nodes[ino].content.size
            data = bytes(self.run(self.store.read(ino, 0, size), seed))
            assert data == bytes(self.tree.nodes[ino].content)
        self.idle(seed)
        self.run(self.confirming(self.store.sync()), seed)
        self.idle(seed)
        audit(self.store)

    def idle(self, seed: int) -> None:
        """Nothing is under way any longer."""


class DeferredCrashMachine(CrashMachine):
    """Several writes are in flight; they, and what waits for them, end in any order."""

    executor: DeferredExecutor

    def make_executor(self) -> DeferredExecutor:
        return DeferredExecutor(self.device)

    def run(self, step: Step[T], seed: int = 0) -> T:
        self.executor.random.seed(seed)
        return self.executor.run(step)

    @rule(seed=SEEDS, steps=st.integers(1, 30))
    def things_happen(self, seed: int, steps: int) -> None:
        self.executor.random.seed(seed)
        for _ in range(steps):
            self.executor.happen()
        for directory in self.tree.directories():
            entries = run(self.store.list_directory(directory, 0, 1000))
            found = {entry.name: entry.ino for _, entry in entries}
            assert found == self.tree.nodes[directory].entries

    @rule(seed=SEEDS, which=st.sampled_from(["sync", "checkpoint", "clean"]))
    def begin_in_the_background(self, seed: int, which: str) -> None:
        if which == "clean":
            self.executor.begin(self.store.clean())
        else:
            step = self.store.sync() if which == "sync" else self.store.checkpoint()
            self.executor.begin(self.confirming(step))

    def stop(self, seed: int) -> None:
        self.executor.random.seed(seed)
        self.executor.stops()

    def idle(self, seed: int) -> None:
        self.executor.random.seed(seed)
        self.executor.settle()


def open_inline(device: MemoryDevice, log: Path) -> Store:
    buffer = OperationLog(log, _LOG_LIMIT, "boot after a power cut")
    store = Store.open(device, "ring", InlineExecutor(), buffer, OPTIONS, KEY)
    assert store.damage is None, store.damage
    return store


def audit_after_sync(store: Store) -> Any:
    run(store.sync())
    return audit(store)


def expect_view(expected: View, found: View, when: str) -> None:
    assert found == expected, f"{when}: {difference(expected, found)}"


def lose_newest_superblock(image: bytearray) -> None:
    """Where both slots are good, the older one alone must do."""
    found = list(superblocks(image))
    if len(found) == len(SUPERBLOCK_ADDRESSES):
        address = max(found, key=lambda superblock: superblock.generation).address
        image[address : address + BLOCK] = bytes(BLOCK)


def superblocks(image: bytearray) -> Iterator[Superblock]:
    for address in SUPERBLOCK_ADDRESSES:
        try:
            yield Superblock.unpack(bytes(image[address : address + BLOCK]))
        except FormatError:
            continue

"""Sessions at work on a small ring, and all that its device saw of it.

What happens follows from a seed alone: sessions begin, grow by rounds, are overwritten,
forked, renamed, reclaimed and removed; the ring is cleaned, checkpointed and wrapped around;
the mount ends well, is killed with its tmpfs left, or loses both to a power cut, and begins
anew. Work is in flight and ends in any order.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

from kvfs.engine import ciphers, vault
from kvfs.engine import store as store_module
from kvfs.engine import superblocks as superblocks_module
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store
from kvfs.tiers.warm import WarmTier
from tests.crash.machine import (
    _DIRECTORY_MODE,
    _FILE_MODE,
    _LINK_MODE,
    _LOG_LIMIT,
    MIB,
    OPTIONS,
    DeferredCrashMachine,
    audit_after_sync,
    content,
    expect_view,
    open_inline,
)
from tests.crash.model import ROOT, Tree, view_of
from tests.support.devices import MemoryDevice, RecordingDevice
from tests.support.encrypted import ENCRYPTION, KEY

_LAYERS_MAX = 6
_BYTES_MAX = 5 * MIB  # of files: about what fits, so that the ring is full at times
_INODES_MAX = 100
_COPIED_EVERY = 8  # writes to the device


@dataclass(frozen=True, slots=True)
class Left:
    """What was in the tmpfs when a write to the device began, and how many operations had been
    answered by then."""

    warm: Path
    answered: int


@dataclass(frozen=True, slots=True)
class Life:
    """The life of a device up to a power cut. `states` are the trees after each operation;
    `left` is there for some of the writes, by their number."""

    device: RecordingDevice
    states: list[Tree]
    used: list[int]
    left: dict[int, Left] = field(default_factory=dict)


def is_encrypted(seed: int) -> bool:
    """Every other history is one of an encrypted ring."""
    return seed % 2 == 0


class Secrets:
    """Stands in for the modules `secrets` and `os`, so that a seed gives the same bytes each
    time."""

    def __init__(self, random: Random) -> None:
        self.token_bytes = self.urandom = random.randbytes


class History(DeferredCrashMachine):
    """Device after device. Use `work`, and `teardown` in the end. Before the write with the
    number `copied_from` nothing of the tmpfs is kept."""

    def __init__(self, seed: int, copied_from: int = 0) -> None:
        super().__init__()
        self.copied_from = copied_from
        self.encryption = ENCRYPTION if is_encrypted(seed) else None
        self.random = Random(seed)
        self.lives_of_devices: list[Life] = []
        self.happened: Counter[str] = Counter()

    def work(self, writes: int) -> None:
        """Until the devices were written to so many times, with frames and superblocks."""
        secrets = Secrets(Random(self.random.random()))
        for module in (store_module, superblocks_module):
            self.patches.enter_context(patch.object(module, "secrets", secrets))
        for module in (ciphers, vault):
            self.patches.enter_context(patch.object(module, "os", secrets))
        self.begins(self.random.randint(12, 14), self.random.choice([MIB // 4, MIB // 2, MIB]))
        self.is_born()
        while self.writes < writes:
            self.something_happens()
            self.lives()

    # -- what is kept of it

    @property
    def writes(self) -> int:
        return sum(life.device.writes for life in self.lives_of_devices)

    @property
    def turns(self) -> float:
        """How many times the ring was written over."""
        written = sum(life.device.bytes_written for life in self.lives_of_devices)
        return written / self.device.size

    @property
    def life(self) -> Life:
        return self.lives_of_devices[-1]

    def is_born(self) -> None:
        self.lives_of_devices.append(Life(self.device, self.states, self.used))

    def open(self) -> None:
        self.device.fail = self.before_io
        super().open()

    def before_io(self, kind: str, _address: int, _length: int) -> None:
        """The tmpfs is copied before some of the writes: who is killed then leaves it so."""
        is_copied = kind == "write" and self.writes % _COPIED_EVERY == _COPIED_EVERY - 1
        if is_copied and self.writes >= self.copied_from and self.life.device is self.device:
            copy = self.directory / f"left-{self.writes}"
            shutil.copytree(self.directory / "warm", copy)
            self.life.left[self.device.writes] = Left(copy, len(self.states) - 1)

    def check_left(self, image: bytearray, left: Left, candidates: list[Tree]) -> None:
        """Of what had been answered when the daemon was killed nothing is missing."""
        device = MemoryDevice(image)
        # It lies elsewhere than the ring says: as of another boot that is not looked for.
        buffer = WarmTier(left.warm, _LOG_LIMIT, InlineExecutor(), "the boot of a copy")
        store = Store.open(device, "ring", InlineExecutor(), buffer, OPTIONS, KEY)
        assert store.damage is None, store.damage
        view = view_of(store, run)
        self.matching(view, candidates)
        audit_after_sync(store)
        run(store.close())
        assert not left.warm.exists()
        store = open_inline(device, left.warm)
        expect_view(view, view_of(store, run), "after a clean end")
        run(store.close())

    def forget_old_history(self) -> None:
        """All of it is wanted."""

    # -- what happens

    def something_happens(self) -> None:
        kinds = list(_WEIGHTS)
        (what,) = self.random.choices(kinds, [_WEIGHTS[kind] for kind in kinds])
        if self.is_much and what in _GROWING:
            what = History.remove_session
        self.happened[what.__name__] += 1
        what(self)

    @property
    def is_much(self) -> bool:
        inos = {*self.tree.reachable(), *self.pinned}
        size = sum(self.tree.nodes[ino].content.size for ino in inos)
        return size > _BYTES_MAX or len(inos) > _INODES_MAX

    def seed(self) -> int:
        return self.random.getrandbits(32)

    def pick(self) -> int:
        return self.random.randrange(1000)

    def name(self, *kinds: bytes) -> bytes:
        return self.random.choice(kinds) + b"%03d" % self.random.randrange(12)

    def sessions(self) -> list[tuple[bytes, int]]:
        """Of the directories in the root, those that have files."""
        nodes = self.tree.nodes
        return [
            (name, ino)
            for name, ino in nodes[ROOT].entries.items()
            if nodes[ino].is_directory and nodes[ino].entries
        ]

    def a_session(self) -> tuple[bytes, int] | None:
        sessions = self.sessions()
        return self.random.choice(sessions) if sessions else None

    def files_of(self, session: int) -> list[int]:
        nodes = self.tree.nodes
        return [ino for ino in nodes[session].entries.values() if not nodes[ino].is_directory]

    def begin_session(self) -> None:
        session = self.make(ROOT, self.name(b"agent-"), _DIRECTORY_MODE)
        if session is None:
            return
        for number in range(self.random.randint(1, _LAYERS_MAX)):
            self.make(session, b"layer.%03d" % number, _FILE_MODE)
        self.replace_document(session)

    def append_round(self) -> None:
        """A stream of tokens to all layers of a session; long ones at times."""
        session = self.a_session()
        if session is None:
            return
        size = self.random.choice([512, 4096, 12_288, 40_000, 40_000, 300_000])
        for ino in self.files_of(session[1]):
            self.append_to(ino, size)

    def append_to(self, ino: int, size: int) -> None:
        if not self.tree.nodes[ino].target:
            self.write_to(ino, self.tree.nodes[ino].content.size, self.content(size), self.seed())

    def content(self, size: int) -> bytes:
        return content(self.seed(), size)

    def replace_document(self, session: int | None = None) -> None:
        """Written beside, and renamed over the old one, as programs do; mostly without fsync."""
        chosen = self.a_session()
        session = session or (chosen and chosen[1])
        if session is None:
            return
        ino = self.make(session, b"session.json.new", _FILE_MODE)
        if ino is None:
            return
        self.write_to(ino, 0, self.content(self.random.randint(1, 9000)), self.seed())
        step = self.store.rename(session, b"session.json.new", session, b"session.json")
        self.do(
            step,
            lambda tree, _: tree.rename(session, b"session.json.new", session, b"session.json"),
            self.seed(),
        )

    def overwrite(self) -> None:
        size = self.random.choice([100, 4096, 20_000, 130_000])
        self.write(self.pick(), self.random.randrange(200_000), size, self.seed())

    def truncate_one(self) -> None:
        self.truncate(self.pick(), self.random.choice([0, 5000, 65_536]), self.seed())

    def fork_session(self) -> None:
        session = self.a_session()
        if session is not None:
            directories = self.tree.directories()
            self.fork(directories.index(session[1]), self.name(b"agent-", b"fork-"), self.seed())

    def rename_something(self) -> None:
        how = self.random.choice(["replace", "replace", "noreplace", "exchange"])
        self.rename(self.pick(), self.pick(), self.name(b"agent-", b"moved-"), how, self.seed())

    def rename_session(self) -> None:
        session = self.a_session()
        if session is not None:
            new = self.name(b"agent-", b"fork-")
            step = self.store.rename(ROOT, session[0], ROOT, new)
            self.do(step, lambda tree, _: tree.rename(ROOT, session[0], ROOT, new), self.seed())

    def change_xattr(self) -> None:
        changes = [
            (None, 0o600), (None, 0o755), (b"user.x", None), (b"user.large", None),
            (b"user.x", self.content(20)), (b"user.large", b"v" * self.random.randrange(20_000)),
            (b"user.kvfs.codec", b"zstd"), (b"user.kvfs.codec", b"planes"),
            (b"user.kvfs.dtype", b"bfloat16"), (b"user.kvfs.shape", b"2,3,64"),
        ]  # fmt: skip
        tree = self.tree
        symlinks = {ino for ino in tree.reachable() if tree.nodes[ino].target}
        pick = self.pick()
        if tree.reachable()[pick % len(tree.reachable())] not in symlinks:
            self.change_attributes(pick, self.random.choice(changes))

    def make_link(self) -> None:
        kind = self.random.choice(["symlink", "link"])
        if kind == "symlink":
            self.make(ROOT, self.name(b"link-"), _LINK_MODE, b"../" + self.name(b"agent-"))
        else:
            self.create(self.pick(), self.name(b"link-"), kind, b"-")

    def remove_something(self) -> None:
        self.remove(self.pick(), self.seed())

    def remove_session(self) -> None:
        session = self.a_session()
        if session is not None:
            self.remove_all(ROOT, *session)

    def remove_all(self, parent: int, name: bytes, directory: int) -> None:
        """As rm -r does."""
        nodes = self.tree.nodes
        for below, ino in nodes[directory].entries.items():
            if nodes[ino].is_directory:
                self.remove_all(directory, below, ino)
            else:
                self.unlink(directory, below)
        step = self.store.rmdir(parent, name)
        self.do(step, lambda tree, _: tree.rmdir(parent, name), self.seed())

    def unlink(self, directory: int, name: bytes) -> None:
        step = self.store.unlink(directory, name)
        self.do(step, lambda tree, _: tree.unlink(directory, name), self.seed())

    def reclaim_something(self) -> None:
        self.reclaim(self.pick(), self.seed())

    def open_or_close_a_file(self) -> None:
        self.hold_or_let_go(self.pick(), self.seed())

    def read_something(self) -> None:
        self.read(self.pick(), self.random.randrange(100_000), 50_000, self.seed())

    def sync(self) -> None:
        self.make_durable("sync", self.seed())

    def checkpoint(self) -> None:
        self.make_durable("checkpoint", self.seed())

    def clean_ring(self) -> None:
        self.clean(self.seed())

    def seconds_pass(self) -> None:
        self.time_passes(self.random.choice([5, 5, 30]), self.seed())

    def work_goes_on(self) -> None:
        self.things_happen(self.seed(), self.random.randint(1, 30))

    def work_begins(self) -> None:
        self.begin_in_the_background(self.seed(), self.random.choice(["sync", "checkpoint"]))

    def unmount_and_mount(self) -> None:
        self.close_and_open(self.seed())

    def kill_and_mount(self) -> None:
        self.killed(self.seed())

    def cut_and_mount(self) -> None:
        self.power_cut(self.random.randrange(10), self.seed())
        self.is_born()


_WEIGHTS: dict[Callable[[History], None], float] = {
    History.append_round: 25,
    History.begin_session: 6,
    History.replace_document: 8,
    History.overwrite: 10,
    History.truncate_one: 2,
    History.fork_session: 4,
    History.rename_something: 4,
    History.rename_session: 3,
    History.change_xattr: 6,
    History.make_link: 2,
    History.remove_something: 3,
    History.remove_session: 3,
    History.reclaim_something: 3,
    History.open_or_close_a_file: 3,
    History.read_something: 3,
    History.sync: 8,
    History.checkpoint: 1.5,
    History.clean_ring: 1.5,
    History.seconds_pass: 8,
    History.work_goes_on: 10,
    History.work_begins: 3,
    History.unmount_and_mount: 0.5,
    History.kill_and_mount: 1,
    History.cut_and_mount: 0.5,
}
_GROWING = (History.append_round, History.begin_session, History.overwrite, History.fork_session)

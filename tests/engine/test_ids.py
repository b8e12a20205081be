"""An id names one thing for ever: an inode one file, an extent the same bytes, also after kills
and power cuts, and for what was lost with them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.engine.format import ROOT_INODE
from kvfs.engine.io import run
from tests.engine.audit import audit
from tests.engine.kit import MIB, Bench, new_device, noise
from tests.support.devices import RecordingDevice, random_survival

KINDS = ["make", "make", "write", "write", "fork", "remove", "sync", "checkpoint", "kill", "cut"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1 << 16)), max_size=25)


@dataclass
class Ids:
    """All that were ever given: inodes, and the checksums of extents by their ids."""

    bench: Bench
    made: int = 0
    inodes: set[int] = field(default_factory=set)
    extents: dict[int, int] = field(default_factory=dict)

    def step(self, kind: str, seed: int) -> None:
        bench = self.bench
        sessions = bench.names()
        session = sessions[seed % len(sessions)] if sessions else b""
        if kind == "make" or not session:
            self.make()
        elif kind == "write":
            bench.write(bench.find(b"f", bench.find(session)), noise(seed % 5000 + 1, seed))
        elif kind == "fork":
            self.made += 1
            self.gave(run(bench.store.fork(bench.find(session), b"%d" % self.made)).inode.ino)
            self.gave(bench.find(b"f", bench.find(b"%d" % self.made)))
        elif kind == "remove":
            run(bench.store.unlink(bench.find(session), b"f"))
            run(bench.store.rmdir(ROOT_INODE, session))
        elif kind == "sync":
            run(bench.store.sync())
        elif kind == "checkpoint":
            run(bench.store.checkpoint())
        elif kind == "kill":
            bench.open()
        else:
            self.cut(seed)

    def make(self) -> None:
        self.made += 1
        session = self.bench.make(b"%d" % self.made, mode=0o40755)
        self.gave(session)
        file = self.bench.make(b"f", session)
        self.gave(file)
        self.bench.write(file, noise(3000, self.made))

    def gave(self, ino: int) -> None:
        assert ino not in self.inodes, "an inode number was given twice"
        self.inodes.add(ino)

    def cut(self, seed: int) -> None:
        """The power is cut: what was not flushed survives in part, and the tmpfs does not."""
        device = self.bench.device
        image = device.image_after(len(device.events), random_survival(Random(seed)))
        number = f"boot-{self.made}-{seed}"
        self.bench = Bench(self.bench.directory, RecordingDevice(bytearray(image)), boot=number)

    def look(self) -> None:
        """At every extent that is in the ring, after each step."""
        store = self.bench.store
        for session in self.bench.names():
            ino = self.bench.find(b"f", self.bench.find(session))
            for extent in run(store.extents(ino, 0, MIB)):
                known = self.extents.setdefault(extent.extent_id, extent.checksum)
                assert known == extent.checksum, "an extent's id was given twice"


@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_no_id_is_given_twice_whatever_happens(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvfs-engine-", dir="/dev/shm") as directory:
        ids = Ids(Bench(Path(directory), new_device(24)))
        for kind, seed in steps:
            ids.step(kind, seed)
            ids.look()
        run(ids.bench.store.sync())
        ids.look()
        audit(ids.bench.store)

"""Rings of every kind of past, with a tree of every kind of thing in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

from kvfs.engine import appender, btree, checkpoints, reclaim, store, superblocks, writeback, writer
from kvfs.engine.io import run
from kvfs.engine.superblocks import Encryption
from tests.crash.machine import Clock
from tests.engine.kit import MIB, Bench, new_device
from tests.rot.paint import Artist, Entry, Kind
from tests.support.devices import RecordingDevice
from tests.support.encrypted import ENCRYPTION

_SEGMENTS = 24
_STAGES_MAX = 4
_KINDS = (Kind.RAW, Kind.ZSTD, Kind.PLANES)


@dataclass(frozen=True, eq=False)
class Ring:
    """`stages` are images of before: what a lost write leaves. `twin` is a copy of the ring that
    went on by itself, `stranger` a ring of another uuid."""

    name: str
    image: bytes
    tree: dict[str, Entry]
    versions: dict[str, list[bytes]]
    stages: tuple[bytes, ...]
    twin: bytes
    stranger: bytes

    @property
    def is_turned(self) -> bool:
        """Whether frames that tell of what there is were overwritten."""
        return self.name not in ("closed", "killed")


@dataclass
class _Maker:
    artist: Artist
    directory: Path
    stages: list[bytes]

    @property
    def bench(self) -> Bench:
        return self.artist.bench

    def stage(self) -> None:
        run(self.bench.store.checkpoint())
        self.stages = [*self.stages[-_STAGES_MAX + 1 :], bytes(self.bench.device.image)]

    def reopen(self) -> None:
        run(self.bench.store.close())
        self.bench.open()

    def populate(self) -> None:
        artist = self.artist
        artist.directory("/pool")
        for number in range(160):
            artist.file(f"/pool/{number:03}", 300 + 40 * number)
        deep = ""
        for name in "abcdefgh":
            deep += f"/{name}"
            artist.directory(deep)
        artist.file(f"{deep}/deep", 20_000)
        for number, kind in enumerate(_KINDS * 2):
            self._session(f"/session-{number}", kind)
        self.stage()

    def _session(self, path: str, kind: Kind) -> None:
        artist = self.artist
        artist.directory(path, kind)
        artist.file(f"{path}/session.json", 700, Kind.ZSTD)
        artist.file(f"{path}/tokens", 9_000)
        for layer in range(4):
            artist.file(f"{path}/layer.{layer:03}", 0)
            artist.xattr(f"{path}/layer.{layer:03}", b"user.kvfs.dtype", b"bfloat16")
            artist.write(f"{path}/layer.{layer:03}", 0, 150_000 + 5_000 * layer)
        artist.xattr(f"{path}/layer.000", b"user.large", b"v" * 3_000)
        artist.xattr(f"{path}/tokens", b"user.note", path.encode())
        artist.link(f"{path}/tokens", f"{path}/tokens again")
        artist.symlink(f"{path}/newest", b"layer.003")
        artist.file(f"{path}/empty", 0)
        artist.directory(f"{path}/nothing here")

    def live(self) -> None:
        """As sessions do: they grow, fork, are changed and removed."""
        artist = self.artist
        for number in range(6):
            artist.write(f"/session-{number}/tokens", 9_000, 12_000)
            artist.write(f"/session-{number}/layer.001", 100_000, 140_000)
        self.stage()
        artist.fork("/session-0", "/branch-0")
        artist.fork("/session-2", "/branch-2")
        artist.write("/branch-0/layer.000", 40_000, 60_000)
        artist.truncate("/branch-2/layer.002", 90_000)
        artist.truncate("/session-4/layer.003", 200_000)
        artist.rename("/pool/007", "/pool/renamed")
        artist.rename("/pool/008", "/pool/009")
        artist.rename("/session-1/empty", "/a/b/c/moved")
        artist.remove("/session-3")
        for number in range(20, 90, 4):
            artist.remove(f"/pool/{number:03}")
        self.stage()

    def turn(self) -> None:
        """Until segments were used again, and some were cleaned."""
        artist = self.artist
        for number in range(7):
            path = f"/rubbish-{number}"
            artist.directory(path)
            for layer in range(4):
                artist.file(f"{path}/layer.{layer:03}", 700_000)
                run(self.bench.store.sync())
                artist.write(f"/pool/{100 + number:03}", 0, 900 + layer)
            self.stage()
            artist.remove(path)
            run(self.bench.store.clean())
            self.stage()
        counters = self.bench.store.counters
        assert counters.cleaned_segments > 3 and counters.device_written > _SEGMENTS * MIB

    def tail(self) -> None:
        """A log behind the checkpoint, flushed frame by frame."""
        for number in range(6):
            self.artist.file(f"/a/tail-{number}", 8_000)
            self.artist.write(f"/session-{number % 3}/tokens", 12_000 + number, 12_100 + number)
            run(self.bench.store.sync())

    def finish(self) -> None:
        run(self.bench.store.close())


def _closed(maker: _Maker) -> None:
    maker.live()
    maker.finish()


def _killed(maker: _Maker) -> None:
    maker.live()
    maker.tail()


def _turned(maker: _Maker) -> None:
    """Both slots lead to checkpoints of their own."""
    maker.live()
    maker.turn()
    maker.finish()


def _turned_and_killed(maker: _Maker) -> None:
    """Both lead to the same one."""
    _turned(maker)
    maker.bench.open()
    maker.tail()


_PASTS: dict[str, Callable[[_Maker], None]] = {
    "closed": _closed,
    "killed": _killed,
    "turned": _turned,
    "turned and killed": _turned_and_killed,
    "encrypted": _turned_and_killed,
}
NAMES = tuple(_PASTS)


@cache
def ring(name: str) -> Ring:
    """Made once, the same each time."""
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(dir="/dev/shm", prefix="kvfs-rot-"))
        # So that trees of few items have nodes of three levels.
        stack.enter_context(patch.multiple(btree, NODE_SIZE=512, _NODE_MIN=128))
        stack.enter_context(patch("secrets.token_bytes", Random(name).randbytes))
        clock = Clock()
        for module in (superblocks, store, appender, checkpoints, writer, writeback, reclaim):
            stack.enter_context(patch.object(module, "time", clock))
        maker = _maker(Path(directory) / "ring", ENCRYPTION if name == "encrypted" else None)
        maker.populate()
        twin = _twin(maker, Path(directory) / "twin")
        _PASTS[name](maker)
        image = bytes(maker.bench.device.image)
        artist = maker.artist
        stranger = _maker(Path(directory) / "stranger")
        stranger.populate()
        return Ring(
            name, image, artist.tree, dict(artist.versions), tuple(maker.stages), twin,
            bytes(stranger.bench.device.image),
        )  # fmt: skip


def _maker(directory: Path, encryption: Encryption | None = None) -> _Maker:
    device = new_device(_SEGMENTS, encryption=encryption)
    bench = Bench(directory, device, boot=directory.name)
    return _Maker(Artist(bench), directory, [])


def _twin(maker: _Maker, directory: Path) -> bytes:
    device = RecordingDevice(bytearray(maker.bench.device.image))
    artist = maker.artist.copy(Bench(directory, device, boot="twin"))
    twin = replace(maker, artist=artist, stages=[])
    for number in range(12):
        artist.file(f"/a/twin-{number}", 100_000 * (number % 3) + 5_000)
        run(artist.bench.store.sync())
    twin.finish()
    return bytes(device.image)

"""A store on a recording device, and what tests do with it."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from kvfs.engine.format import BLOCK, DATA_START, ROOT_INODE, FormatError, FrameHeader
from kvfs.engine.io import InlineExecutor, Step, run
from kvfs.engine.store import Store, StoreOptions
from kvfs.engine.superblocks import Encryption, format_device
from kvfs.tiers.warm import WarmTier
from tests.support import encrypted
from tests.support.devices import RecordingDevice, Written
from tests.support.encrypted import KEY

T = TypeVar("T")
MIB = 1024 * 1024
FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755
SYMLINK = stat.S_IFLNK | 0o777
OPTIONS = StoreOptions(cache_size=4 * MIB, uid=0, gid=0)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that no codec shrinks."""
    return Random(seed).randbytes(size)


def new_device(
    segments: int = 16, segment_size: int = MIB, encryption: Encryption | None = None
) -> RecordingDevice:
    """A formatted ring with an empty history."""
    device = RecordingDevice.of_size(DATA_START + segments * segment_size)
    format_device(device, segment_size, encryption=encryption or encrypted.by_option)
    return RecordingDevice(device.image)


@dataclass
class Bench:
    """A store, its device, and the directory of its warm tier.

    `stage` says where what was done lies before it is looked at: see `settle`.
    """

    directory: Path
    device: RecordingDevice = field(default_factory=new_device)
    stage: str = "buffered"
    log_limit: int = 64 * MIB
    boot: str = "first"
    make_executor: Callable[[], Any] = InlineExecutor
    options: StoreOptions = OPTIONS

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> Store:
        executor = self.make_executor()
        self.warm = WarmTier(self.directory / "warm", self.log_limit, executor, self.boot)
        self.store = Store.open(self.device, "ring", executor, self.warm, self.options, KEY)
        return self.store

    def open_image(self, image: bytes | bytearray) -> Store:
        """A store on a copy of what a device holds, after the machine started anew."""
        device = RecordingDevice(bytearray(image))
        number = f"{Random().getrandbits(64):x}"
        other = Bench(self.directory / f"other-{number}", device, boot=number)
        self.directory.mkdir(exist_ok=True)
        return other.store

    def settle(self) -> None:
        """As the stage says: leave it, write it to the ring, or start anew from there."""
        match self.stage:
            case "synced":
                run(self.store.sync())
            case "checkpointed":
                run(self.store.checkpoint())
            case "reopened":
                run(self.store.close())
                self.open()
            case "killed":
                self.open()

    # -- short forms

    def make(self, name: bytes, parent: int = ROOT_INODE, mode: int = FILE, **more: Any) -> int:
        return run(self.store.create(parent, name, mode, 0, 0, **more)).inode.ino

    def write(self, ino: int, data: bytes, offset: int = 0) -> None:
        assert run(self.store.write(ino, offset, data)) == len(data)

    def read(self, ino: int, offset: int = 0, length: int | None = None) -> bytes:
        if length is None:
            length = run(self.store.node(ino)).inode.size
        return bytes(run(self.store.read(ino, offset, length)))

    def names(self, directory: int = ROOT_INODE) -> list[bytes]:
        return sorted(entry.name for _, entry in run(self.store.list_directory(directory, 0, 9999)))

    def find(self, name: bytes, parent: int = ROOT_INODE) -> int:
        return run(self.store.lookup(parent, name)).inode.ino

    def write_out(self) -> None:
        """What was answered becomes a commit unit in the ring, without a flush."""
        run(self.store._writer.written())


def frames_written(device: RecordingDevice) -> list[FrameHeader]:
    """The headers of all frames in the device's history, in the order of the log."""
    found = []
    for event in device.events:
        if isinstance(event, Written):
            try:
                found.append(FrameHeader.unpack(event.data[: FrameHeader.SIZE]))
            except FormatError:
                continue
    return sorted(found, key=lambda header: header.sequence)


def wipe(image: bytearray, address: int, length: int = BLOCK) -> None:
    image[address : address + length] = bytes(length)


def flip(image: bytearray, address: int, bit: int = 0) -> None:
    image[address] ^= 1 << bit


def failure_of(step: Step[Any]) -> int | None:
    """The errno that a step ends with, or None."""
    try:
        run(step)
    except OSError as failure:
        return failure.errno
    return None

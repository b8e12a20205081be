"""Make the images that every later release has to open: tests/fixtures/ring-vN*.

    python scripts/make_fixture.py [--directory tests/fixtures]

Run it once for each version of the format, with the first release that writes it, and commit
what it makes: two images, one that was unmounted and one that was cut off (a checkpoint, then
a log that leads further, an inode without a name, and no operation log), each with a manifest of
what it has to show. The ring is the smallest that there is, and was written over several times. And
the same of an encrypted ring, with little in it: it does not shrink.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import zstandard

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvfs.engine.device import FileDevice, create_image
from kvfs.engine.format import (
    DATA_START,
    FORMAT_VERSION,
    ROOT_INODE,
    SEGMENT_COUNT_MIN,
    SEGMENT_SIZE_MIN,
    Cipher,
)
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store, StoreOptions
from kvfs.engine.superblocks import Encryption, format_device
from kvfs.engine.units import Victim
from kvfs.tiers.warm import WarmTier
from tests.support import manifest

MIB = 1024 * 1024
IMAGE_SIZE = DATA_START + SEGMENT_COUNT_MIN * SEGMENT_SIZE_MIN
WARM_SIZE = 64 * MIB
TURNS = 6
FILE, DIRECTORY, SYMLINK = stat.S_IFREG | 0o640, stat.S_IFDIR | 0o750, stat.S_IFLNK | 0o777
_BLOCK = 16 * 1024


def text(tag: str, size: int) -> bytes:
    """Bytes that say whose they are and from where, and shrink well."""
    blocks = (
        (f"{tag} {start}\n".encode() + b"-" * 52 + b"\n") * (_BLOCK // 64)
        for start in range(0, size, _BLOCK)
    )
    return b"".join(block[:_BLOCK].ljust(_BLOCK, b".") for block in blocks)[:size]


def numbers(size: int) -> bytes:
    """What byte planes are for: the high bytes of 16-bit numbers hardly change."""
    return (np.arange(size // 2, dtype=np.uint16) // 7).tobytes()


@dataclass
class Maker:
    """A store on an image, and the short forms of what is done to it."""

    image: Path
    warm: Path
    encryption: Encryption | None = None
    store: Store = field(init=False)
    device: FileDevice = field(init=False)

    def __post_init__(self) -> None:
        create_image(self.image, IMAGE_SIZE)
        self.device = FileDevice(self.image)
        format_device(self.device, SEGMENT_SIZE_MIN, encryption=self.encryption)
        executor = InlineExecutor()
        buffer = WarmTier(self.warm, WARM_SIZE, executor)
        options = StoreOptions(uid=0, gid=0, cache_size=4 * MIB)
        key = None if self.encryption is None else self.encryption.key
        self.store = Store.open(self.device, str(self.image), executor, buffer, options, key)

    def make(
        self, name: bytes, parent: int = ROOT_INODE, mode: int = FILE, owner: int = 0, **more: Any
    ) -> int:
        return run(self.store.create(parent, name, mode, owner, owner, **more)).inode.ino

    def file(self, name: bytes, parent: int, data: bytes, owner: int = 0, **xattrs: bytes) -> int:
        """`xattrs` are settings of KVFS."""
        ino = self.make(name, parent, owner=owner)
        for setting, value in xattrs.items():
            run(self.store.set_xattr(ino, b"user.kvfs." + setting.encode(), value))
        run(self.store.write(ino, 0, data))
        return ino

    # -- what is made

    def names(self) -> None:
        """Every kind of inode, name and attribute."""
        store, top = self.store, self.make(b"kinds", mode=DIRECTORY, owner=12345)
        self.make(b"empty", top)
        linked = self.file(b"linked", top, text("linked", 5000), 12345)
        run(store.link(linked, top, b"another name"))
        run(store.link(linked, ROOT_INODE, b"a third name"))
        self.make(b"short link", top, SYMLINK, target=b"linked")
        self.make(b"long link", top, SYMLINK, target=b"x/" * 2000)
        self.make(b"pipe", top, stat.S_IFIFO | 0o600)
        self.make(b"socket", top, stat.S_IFSOCK | 0o600)
        self.make(b"device", top, stat.S_IFCHR | 0o600, rdev=os.makedev(1, 3))
        self.make(b"\xff\xfe \n'\"\\", top)
        self.make("Schlüssel".encode(), top)
        self.make(b"n" * 255, top)
        run(store.set_attributes(linked, mode=0o4755, mtime_ns=1_234_567_890_123_456_789))
        run(store.set_xattr(linked, b"user.note", b"of a file"))
        run(store.set_xattr(linked, b"user.large", text("xattr", 6000)))
        run(store.set_xattr(linked, b"trusted.note", b"\0binary\xff"))
        run(store.set_xattr(top, b"user.note", b"of a directory"))
        sparse = self.make(b"sparse", top)
        run(store.write(sparse, 3 * MIB, text("after a hole", 3000)))
        run(store.set_attributes(sparse, size=9 * MIB))
        deep = top
        for level in range(40):
            deep = self.make(b"level %d" % level, deep, DIRECTORY)
        self.file(b"at the bottom", deep, b"deep")
        many = self.make(b"many", mode=DIRECTORY)
        for number in range(300):
            self.make(b"file %d" % number, many, owner=number)

    def sessions(self) -> int:
        """Every codec, a fork that goes on apart, units of both kinds. Returns a session."""
        store = self.store
        session = self.make(b"session", mode=DIRECTORY, owner=12345)
        self.file(b"session.json", session, b'{"rounds": []}', 12345)
        for codec in (b"none", b"zstd", b"auto"):
            data = text(codec.decode(), 400_000)
            self.file(b"layer." + codec, session, data, 12345, codec=codec)
        settings = {"codec": b"planes", "dtype": b"bfloat16", "shape": b"2,2,64"}
        layer = self.file(b"layer.planes", session, numbers(500_000), 12345, **settings)
        run(store.checkpoint())
        run(store.write(layer, 100_001, text("overwritten", 3333)))
        fork = run(store.fork(session, b"fork of session")).inode.ino
        copied = run(store.lookup(fork, b"layer.none")).inode.ino
        run(store.write(copied, 200_000, text("of the fork", 150_000)))
        run(store.set_attributes(run(store.lookup(fork, b"layer.zstd")).inode.ino, size=77_777))
        run(store.set_xattr(session, b"user.kvfs.ttl", b"9000000"))
        run(store.set_xattr(session, b"user.kvfs.pin", b"1"))
        run(store.set_xattr(session, b"user.kvfs.model", b"a model"))
        pool = self.make(b"pool", mode=DIRECTORY)
        run(store.set_xattr(pool, b"user.kvfs.unit", b"pool"))
        for number in range(5):
            self.file(b"chunk %d" % number, pool, text(f"chunk {number}", 20_000))
        run(store.sync())
        return session

    def churn(self) -> None:
        """The ring is written over: segments are cleaned, what lives is carried forward."""
        store = self.store
        waste = self.make(b"waste", mode=DIRECTORY)
        for turn in range(TURNS):
            for number in range(4):
                name = f"turn {turn} {number}"
                self.file(name.encode(), waste, text(name, MIB), codec=b"none")
                run(store.sync())
            for number in range(3):
                run(store.unlink(waste, f"turn {turn} {number}".encode()))
            if turn:
                run(store.unlink(waste, f"turn {turn - 1} 3".encode()))
            run(store.clean())
            run(store.checkpoint())

    def reclaimed(self) -> None:
        """Two sessions that are in the log of what was reclaimed."""
        store = self.store
        for owner in (12345, 54321):
            name = f"reclaimed {owner}".encode()
            session = self.make(name, mode=DIRECTORY, owner=owner)
            self.file(b"session.json", session, b"{}", owner)
            run(store.checkpoint())
            later_ns = time.time_ns() + 3600 * 10**9
            victim = Victim(session, run(store.units.unit(session)))
            assert run(store.reclaimer.remove(victim, "its time is over", later_ns))

    def few(self) -> int:
        """A session in every codec, with all that has a name, and a fork. Returns the session."""
        store = self.store
        session = self.make(b"session", mode=DIRECTORY, owner=12345)
        for codec in (b"none", b"zstd", b"planes"):
            self.file(b"layer." + codec, session, text(codec.decode(), 20_000), codec=codec)
        self.make(b"link", session, SYMLINK, target=b"layer.none")
        run(store.set_xattr(session, b"user.note", b"of a session"))
        linked = run(store.lookup(session, b"layer.none")).inode.ino
        run(store.link(linked, ROOT_INODE, b"a third name"))
        pool = self.make(b"pool", mode=DIRECTORY)
        self.file(b"chunk 0", pool, text("chunk", 5000))
        run(store.checkpoint())
        fork = run(store.fork(session, b"fork of session")).inode.ino
        copied = run(store.lookup(fork, b"layer.none")).inode.ino
        run(store.write(copied, 5000, text("of the fork", 3000)))
        return session

    def tail(self, session: int) -> None:
        """What only the log tells, after the last checkpoint."""
        store = self.store
        layer = run(store.lookup(session, b"layer.none")).inode.ino
        size = run(store.node(layer)).inode.size
        run(store.write(layer, size * 3 // 4, text("tail", size // 2)))
        run(store.rename(ROOT_INODE, b"a third name", session, b"moved"))
        run(store.unlink(run(store.lookup(ROOT_INODE, b"pool")).inode.ino, b"chunk 0"))
        nameless = self.file(b"nameless", session, text("nameless", 7000))
        store.pin(nameless)
        run(store.unlink(session, b"nameless"))
        run(store.sync())
        assert run(store.node(nameless)).inode.nlink == 0


def describe(store: Store) -> dict[str, Any]:
    return {
        "entries": [asdict(entry) for entry in manifest.of_store(store)],
        "sessions": [asdict(session) for session in run(store.units.sessions())],
        "log": run(store.reclaimer.entries()),
    }


def cut_and_closed(maker: Maker, session: int, target: Path) -> None:
    """Keep the ring as it is cut off behind its last checkpoint, and as it is unmounted."""
    run(maker.store.checkpoint())
    maker.tail(session)
    document = describe(maker.store)
    keep(maker.image, document, target.with_name(f"{target.name}-cut"))
    run(maker.store.close())
    keep(maker.image, document, target)


def keep(image: Path, document: dict[str, Any], target: Path) -> None:
    packer = zstandard.ZstdCompressor(level=22)
    target.with_suffix(".img.zst").write_bytes(packer.compress(image.read_bytes()))
    text = json.dumps(document, indent=1).encode() + b"\n"
    target.with_suffix(".json.zst").write_bytes(packer.compress(text))
    size = sum(target.with_suffix(end).stat().st_size for end in (".img.zst", ".json.zst"))
    print(f"{target}: {len(document['entries'])} names, {size} bytes")


def make(
    directory: Annotated[Path, typer.Option(help="Where they are put.")] = (
        Path(__file__).parents[1] / "tests" / "fixtures"
    ),
) -> None:
    """Make the images that every later release has to open."""
    place = Path(tempfile.mkdtemp(prefix="kvfs-fixture-", dir="/dev/shm"))
    try:
        maker = Maker(place / "ring.img", place / "warm")
        maker.names()
        session = maker.sessions()
        maker.churn()
        maker.reclaimed()
        written = maker.store.counters.device_written
        assert written > 2 * IMAGE_SIZE and maker.store.counters.cleaned_segments > 5
        cut_and_closed(maker, session, directory / f"ring-v{FORMAT_VERSION}")
        encryption = Encryption(Cipher.AES_256_GCM, manifest.KEY)
        maker = Maker(place / "encrypted.img", place / "other", encryption)
        session = maker.few()
        maker.reclaimed()
        cut_and_closed(maker, session, directory / f"ring-v{FORMAT_VERSION}-encrypted")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    typer.run(make)

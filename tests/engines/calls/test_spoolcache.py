"""SpoolCache (`SPOOLCACHE_PATH`): a file a key, published by a link after fsync of file and
directory; locks of whole files and of single bytes; a root that it made itself.

Its recipe pins what says that the root is its own: a cache without it would be refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.engines.calls.contract import Contract, Engine, new_home
from tests.support.mounter import Mounter

FRAME = struct.Struct("<8sI32s")
MARKER = b'{"schema":"spoolcache-root/v1"}\n'
LOCKS = ("maintenance.lock", "namespace.lock", "object-reads.lock", "inventory-owner.lock")
# Asks in another process whether a byte is locked.
IS_PINNED = """
import fcntl, struct, sys
with open(sys.argv[1], "r+b") as file:
    query = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, int(sys.argv[2]), 1, 0)
    answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, query)
    print(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
"""


class SpoolCache(Engine):
    is_flat = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        marker = root / ".spoolcache-root"
        has_others = any(path != marker for path in root.iterdir())
        if marker.exists():
            assert marker.read_bytes() == MARKER
        else:
            assert not has_others, "refusing to adopt a non-empty unowned cache root"
            self._write_small(marker, MARKER)
        for name in ("objects", "manifests", "quarantine", "tmp", "state"):
            with suppress(FileExistsError):
                (root / name).mkdir(mode=0o700)
                sync_directory(root)
        for name in LOCKS:
            with suppress(FileExistsError):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                os.close(os.open(root / "state" / name, flags, 0o600))
                sync_directory(root / "state")
        for kept in (marker, root / "state"):
            os.setxattr(kept, "user.kvfs.pin", b"1")
        with self.exclusive():
            for path in (root / "tmp").iterdir():
                path.unlink()

    def _write_small(self, target: Path, data: bytes) -> None:
        temporary = target.parent / f".{target.name}.{secrets.token_hex(16)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)
        os.replace(temporary, target)
        sync_directory(target.parent)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        state = self.root / "state"
        maintenance = os.open(state / "maintenance.lock", os.O_RDWR | os.O_NOFOLLOW)
        fcntl.flock(maintenance, fcntl.LOCK_SH)
        namespace = open_regular(state / "namespace.lock")
        fcntl.flock(namespace, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(namespace)
            fcntl.flock(maintenance, fcntl.LOCK_UN)
            os.close(maintenance)

    def store(self, key: str, data: bytes) -> None:
        path = self.path(key)
        with self.exclusive():
            if path.exists():
                return
            payload = {"byte_length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            encoded = json.dumps(payload).encode()
            header = FRAME.pack(b"SPCTOK02", len(encoded), hashlib.sha256(encoded).digest())
            temporary = self.root / "tmp" / f"token-{secrets.token_hex(16)}.part"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            fd = os.open(temporary, flags, 0o600)
            whole = len(header) + len(encoded) + len(data)
            assert os.writev(fd, [header, encoded, data]) == whole
            os.fsync(fd)
            with suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
                sync_directory(path.parent.parent)
            os.link(temporary, path)
            sync_directory(path.parent)
            temporary.unlink()
            sync_directory(temporary.parent)
            os.close(fd)

    def load(self, key: str) -> bytes | None:
        with self.exclusive():
            try:
                fd = os.open(self.path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            pin = self.pin(key)
        found = os.fstat(fd).st_size
        _, length, checksum = FRAME.unpack(os.read(fd, FRAME.size))
        encoded = os.read(fd, length)
        assert hashlib.sha256(encoded).digest() == checksum
        payload = json.loads(encoded)
        assert found == FRAME.size + length + payload["byte_length"]
        into = bytearray(payload["byte_length"])
        assert os.readv(fd, [into]) == len(into)
        os.close(fd)
        assert hashlib.sha256(into).hexdigest() == payload["sha256"]
        with suppress(FileNotFoundError):
            os.utime(self.path(key), follow_symlinks=False)
        os.close(pin)
        return bytes(into)

    def pin(self, key: str) -> int:
        """A lock of one byte, which goes with the descriptor."""
        fd = open_regular(self.root / "state" / "object-reads.lock")
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, self.byte(key), 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        return fd

    def remove(self, key: str) -> None:
        with self.exclusive():
            self.path(key).unlink()
            sync_directory(self.path(key).parent)

    def byte(self, key: str) -> int:
        return (int(self.path(key).stem[:16], 16) & ((1 << 62) - 1)) * 2

    def path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.root / "manifests" / name[:2] / f"{name}.kv"


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    os.fsync(fd)
    os.close(fd)


def open_regular(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    actual, named = os.fstat(fd), path.lstat()
    assert (actual.st_dev, actual.st_ino) == (named.st_dev, named.st_ino)
    return fd


class TestSpoolCache(Contract):
    engine = SpoolCache

    def test_reclaim_is_a_miss_and_never_a_part(self, small_ring: Mounter) -> None:
        super().test_reclaim_is_a_miss_and_never_a_part(small_ring)
        SpoolCache(small_ring.mountpoint / "SpoolCache-reclaim")

    @pytest.mark.skipif(not hasattr(fcntl, "F_OFD_GETLK"), reason="Python has no names for these")
    def test_what_is_restored_is_pinned_for_other_processes(self, ring: Mounter) -> None:
        engine = SpoolCache(new_home(ring, "SpoolCache-pins", SpoolCache))

        def is_pinned() -> bool:
            lock = str(engine.root / "state" / "object-reads.lock")
            command = [sys.executable, "-c", IS_PINNED, lock, str(engine.byte("a"))]
            return subprocess.run(command, capture_output=True, check=True).stdout == b"True\n"

        pin = engine.pin("a")
        assert is_pinned()
        os.close(pin)
        assert not is_pinned()

    def test_one_worker_owns_the_inventory(self, ring: Mounter) -> None:
        engine = SpoolCache(new_home(ring, "SpoolCache-owner", SpoolCache))
        path = engine.root / "state" / "inventory-owner.lock"
        owner, other = open_regular(path), open_regular(path)
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(owner)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)

    def test_a_root_that_is_not_its_own_is_refused(self, ring: Mounter) -> None:
        home = new_home(ring, "SpoolCache-foreign", SpoolCache)
        (home / "foreign").touch()
        with pytest.raises(AssertionError, match="refusing to adopt"):
            SpoolCache(home)

"""LMCache's `fs` and `fs_native` (`{"type": "fs", "base_path": DIR}`): X.tmp, renamed to X.data."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from tests.engines.calls.contract import (
    MIB,
    Contract,
    Engine,
    aligned,
    content,
    new_home,
    reading,
    remount,
)
from tests.support.mounter import Mounter


class Fs(Engine):
    """Also the `fs` of its older connector, which lists *.data."""

    is_flat = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        root.mkdir(parents=True, exist_ok=True)
        self.known = {entry.name: entry.stat().st_size for entry in os.scandir(root)}

    def store(self, key: str, data: bytes) -> None:
        if self.path(key).exists():
            return
        temporary = self.path(key).with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(data)
        os.replace(temporary, self.path(key))

    def load(self, key: str) -> bytes | None:
        if not self.path(key).exists():
            return None
        into = mmap.mmap(-1, MIB)
        try:
            with self.path(key).open("rb") as file:
                assert read_into(file, into) == len(into), "an incomplete read"
        except FileNotFoundError:
            return None
        return into[:]

    def remove(self, key: str) -> None:
        self.path(key).stat()
        self.path(key).unlink()

    def path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.root / f"meta-llama-SEP-Llama-3.1-8B@0x01000100@0@{name}.data"


class FsNative(Fs):
    """In C++, with O_DIRECT and a directory for what is not whole yet."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "tmp").mkdir(exist_ok=True)
        self.block = os.statvfs(root).f_bsize

    def store(self, key: str, data: bytes) -> None:
        temporary = self.root / "tmp" / f"{self.path(key).name}.tmp"
        assert len(data) % self.block == 0
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
        fd = os.open(temporary, flags, 0o644)
        memory = memoryview(aligned(data))
        while memory:
            memory = memory[os.write(fd, memory) :]
        os.close(fd)
        os.rename(temporary, self.path(key))

    def load(self, key: str) -> bytes | None:
        into = mmap.mmap(-1, MIB)
        try:
            fd = os.open(self.path(key), os.O_RDONLY | os.O_DIRECT)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb", buffering=0) as file:
            assert read_into(file, into) == len(into), "an incomplete read"
        return into[:]


def read_into(file: object, buffer: mmap.mmap) -> int:
    total = 0
    view = memoryview(buffer)
    while total < len(view) and (count := file.readinto(view[total:])):  # type: ignore[attr-defined]
        total += count
    return total


class TestFs(Contract):
    engine = Fs

    def test_what_is_there_is_known_after_a_restart(self, ring: Mounter) -> None:
        home = new_home(ring, "Fs-known", Fs)
        for key in ("a", "b"):
            Fs(home).store(key, content(key))
        remount(ring)
        known = {Fs(home).path(key).name: MIB for key in ("a", "b")}
        assert Fs(home).known == known
        assert sorted(path.name for path in home.glob("*.data")) == sorted(known)

    def test_the_disk_is_asked_for_its_room_while_it_is_written(self, ring: Mounter) -> None:
        engine = Fs(new_home(ring, "Fs-statvfs", Fs))

        def poll() -> Iterator[None]:
            total = os.statvfs(engine.root).f_blocks
            yield
            for _ in range(50):
                status = os.statvfs(engine.root)
                assert status.f_blocks == total
                assert 0 < status.f_bavail <= status.f_blocks
                assert status.f_bfree <= status.f_blocks

        with reading(2, poll):
            for number in range(20):
                engine.store(f"{number}", content(f"{number}"))
                engine.remove(f"{number}")


class TestFsNative(Contract):
    engine = FsNative

"""llama.cpp's server (`--slot-save-path DIR`): stdio on the final name, small writes between large
ones, no temporary file and no fsync."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from tests.engines.calls.contract import MIB, Contract, Engine, content, new_home
from tests.support.mounter import Mounter

MAGIC, VERSION, TOKENS = 0x67677371, 2, 100
CHUNKS = 4
libc = ctypes.CDLL(None, use_errno=True)
libc.fopen.restype = ctypes.c_void_p
libc.fwrite.restype = libc.fread.restype = ctypes.c_size_t
libc.ftell.restype = ctypes.c_long


class Stdio:
    """A FILE of the C library, whose buffer has `st_blksize` bytes."""

    def __init__(self, path: Path, mode: str) -> None:
        found = libc.fopen(os.fsencode(path), mode.encode())
        if found is None:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        self.file = ctypes.c_void_p(found)

    def write(self, data: bytes) -> None:
        if libc.fwrite(data, 1, ctypes.c_size_t(len(data)), self.file) != len(data):
            raise OSError(ctypes.get_errno(), "write error")

    def write_u32(self, value: int) -> None:
        self.write(value.to_bytes(4, "little"))

    def read(self, size: int) -> bytes:
        into = ctypes.create_string_buffer(size)
        count = libc.fread(into, 1, ctypes.c_size_t(size), self.file)
        assert count == size, "unexpectedly reached the end of the file"
        return into.raw

    def read_u32(self) -> int:
        return int.from_bytes(self.read(4), "little")

    def size(self) -> int:
        libc.fseek(self.file, ctypes.c_long(0), os.SEEK_END)
        size: int = libc.ftell(self.file)
        libc.fseek(self.file, ctypes.c_long(0), os.SEEK_SET)
        return size

    def close(self) -> None:
        if libc.fclose(self.file):
            raise OSError(ctypes.get_errno(), "write error")


class Slots(Engine):
    is_flat = True

    def store(self, key: str, data: bytes) -> None:
        file = Stdio(self.path(key), "wb")
        for value in (MAGIC, VERSION, TOKENS):
            file.write_u32(value)
        file.write(bytes(4 * TOKENS))
        size = len(data) // CHUNKS
        for start in range(0, len(data), size):
            file.write_u32(size)
            file.write(data[start : start + size])
        file.close()

    def load(self, key: str) -> bytes | None:
        try:
            file = Stdio(self.path(key), "rb")
        except FileNotFoundError:
            return None
        assert file.size() == 4 * (3 + TOKENS + CHUNKS) + MIB
        assert [file.read_u32() for _ in range(3)] == [MAGIC, VERSION, TOKENS]
        file.read(4 * TOKENS)
        found = b"".join(file.read(file.read_u32()) for _ in range(CHUNKS))
        file.close()
        return found

    def remove(self, key: str) -> None:
        self.path(key).unlink()

    def path(self, key: str) -> Path:
        return self.root / f"{key}.bin"


class TestSlots(Contract):
    engine = Slots

    def test_a_slot_saved_again_is_the_new_one_also_after_a_crash(self, ring: Mounter) -> None:
        home = new_home(ring, "Slots-again", Slots)
        Slots(home).store("slot", content("old"))
        Slots(home).store("slot", content("new"))
        ring.kill()
        ring.mount()
        assert Slots(home).load("slot") == content("new")

    def test_slots_are_forked_by_their_directory(self, ring: Mounter) -> None:
        home = new_home(ring, "Slots-agent", Slots)
        Slots(home).store("slot", content("common"))
        os.setxattr(home, "user.kvfs.fork", b"Slots-branch")
        branch = ring.mountpoint / "Slots-branch"
        Slots(branch).store("slot", content("branch"))
        assert Slots(home).load("slot") == content("common")
        assert Slots(branch).load("slot") == content("branch")

    def test_its_buffer_is_as_large_as_a_request(self, ring: Mounter) -> None:
        """Some 512 bytes would make a save slow."""
        home = new_home(ring, "Slots-buffer", Slots)
        Slots(home).store("slot", content("a"))
        assert Slots(home).path("slot").stat().st_blksize >= 128 * 1024

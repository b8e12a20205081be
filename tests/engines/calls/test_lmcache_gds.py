"""LMCache's GDS backend without GDS (`gds_path`): files are written through MAP_SHARED and read by
MAP_POPULATE; beside each there is one of metadata.

It remembers which directories it made.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
import urllib.parse
from pathlib import Path

from tests.engines.calls.contract import Contract, Engine

RESERVED = 4096


class Gds(Engine):
    is_flat = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        os.makedirs(root, exist_ok=True)
        self.made: set[Path] = set()
        for first in os.scandir(root):
            for second in os.scandir(first.path):
                for entry in os.scandir(second.path):
                    if entry.name.endswith(".metadata"):
                        self._read_metadata(Path(entry.path))

    def store(self, key: str, data: bytes) -> None:
        path = self.path(key)
        if path.parent not in self.made:
            os.makedirs(path.parent, exist_ok=True)
            self.made.add(path.parent)
        suffix = f".tmp{secrets.token_hex(4)}"
        text = json.dumps({"kvcache": {"data_offsets": [0, len(data)]}}).encode()
        metadata = struct.pack("<Q", len(text)) + text
        temporary = Path(f"{path}{suffix}")
        with temporary.open("wb") as file:
            file.write(metadata)
        fd = os.open(temporary, os.O_RDWR)
        os.ftruncate(fd, RESERVED + len(data))
        mapped = mmap.mmap(fd, RESERVED + len(data), mmap.MAP_SHARED, mmap.PROT_WRITE)
        os.close(fd)
        mapped.seek(RESERVED)
        mapped.write(data)
        mapped.close()
        temporary.rename(path)
        temporary = Path(f"{path}.metadata{suffix}")
        temporary.write_bytes(metadata)
        temporary.rename(f"{path}.metadata")

    def load(self, key: str) -> bytes | None:
        path = self.path(key)
        metadata = Path(f"{path}.metadata")
        try:
            if not metadata.exists():
                return None
            size = self._read_metadata(metadata)
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        found = os.fstat(fd).st_size
        assert found == RESERVED + size
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        mapped = mmap.mmap(fd, found, flags, mmap.PROT_READ)
        os.close(fd)
        with mapped:
            return mapped[RESERVED:]

    def _read_metadata(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
        header = os.read(fd, RESERVED)
        os.close(fd)
        (length,) = struct.unpack_from("<Q", header)
        _, end = json.loads(header[8 : 8 + length])["kvcache"]["data_offsets"]
        return int(end)

    def remove(self, key: str) -> None:
        os.remove(self.path(key))
        os.remove(f"{self.path(key)}.metadata")

    def path(self, key: str) -> Path:
        number = str(abs(hash(key)))
        name = urllib.parse.quote(f"model@1@0@{key}@half", safe="")
        return self.root / number[:2] / number[2:4] / f"{name}.kvcache.safetensors"


class TestGds(Contract):
    engine = Gds

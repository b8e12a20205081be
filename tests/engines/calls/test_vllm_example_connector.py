"""vLLM's ExampleConnector (once SharedStorageConnector): a directory a prompt, a safetensors file
a layer.

The hit test is whether the directory is there; then each layer must be, else an exception leaves
`generate()`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import shutil
from pathlib import Path

from tests.engines.calls.contract import Contract, Engine, content, eventually, new_home
from tests.support.mounter import Mounter

LAYERS = 8


class ExampleConnector(Engine):
    def store(self, key: str, data: bytes) -> None:
        if self.folder(key).exists():
            return
        size = len(data) // LAYERS
        for layer in range(LAYERS):
            os.makedirs(self.folder(key), exist_ok=True)
            save_file(self.layer(key, layer), data[layer * size : (layer + 1) * size])

    def load(self, key: str) -> bytes | None:
        if not self.folder(key).exists():
            return None
        try:
            return b"".join(load_file(self.layer(key, n)) for n in range(LAYERS))
        except FileNotFoundError:
            assert eventually(lambda: not self.folder(key).exists()), "a part of a prompt is there"
            return None

    def remove(self, key: str) -> None:
        shutil.rmtree(self.folder(key))

    def folder(self, key: str) -> Path:
        return self.root / hashlib.md5(key.encode()).hexdigest()

    def layer(self, key: str, number: int) -> Path:
        return self.folder(key) / f"model.layers.{number}.self_attn.attn.safetensors"


def save_file(path: Path, data: bytes) -> None:
    """As safetensors does."""
    tensor = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [0, len(data)]}
    header = json.dumps({"kv_cache": tensor}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    whole = len(header).to_bytes(8, "little") + header + data
    temporary = path.parent / f".tmp{secrets.token_hex(3)}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, len(whole))
    assert os.write(fd, whole) == len(whole)
    temporary.rename(path)
    os.close(fd)


def load_file(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        mapped = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    with mapped:
        start = 8 + int.from_bytes(mapped[:8], "little")
        begin, end = json.loads(mapped[8:start])["kv_cache"]["data_offsets"]
        return mapped[start + begin : start + end]


class TestExampleConnector(Contract):
    engine = ExampleConnector

    def test_reclaim_is_a_miss_and_never_a_part(self, small_ring: Mounter) -> None:
        super().test_reclaim_is_a_miss_and_never_a_part(small_ring)
        for folder in (small_ring.mountpoint / "ExampleConnector-reclaim").iterdir():
            assert len(list(folder.iterdir())) == LAYERS

    def test_a_layer_in_use_outlives_its_prompt(self, ring: Mounter) -> None:
        engine = ExampleConnector(new_home(ring, "ExampleConnector-mapped", ExampleConnector))
        data = content("a")
        engine.store("a", data)
        with engine.layer("a", 0).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
        engine.remove("a")
        assert mapped[-len(data) // LAYERS :] == data[: len(data) // LAYERS]
        mapped.close()

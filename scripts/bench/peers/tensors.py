"""Files of tensors: safetensors, torch.save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from scripts.bench.peers.peer import Layers, Peer


class _Tensors(Peer):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import torch

        self.torch = torch

    def tensors(self, layers: Layers) -> dict[str, Any]:
        """The same memory as tensors."""
        return {
            name: self.torch.frombuffer(data, dtype=self.torch.uint8)
            for name, data in layers.items()
        }


class SafetensorsLayers(_Tensors):
    name = "safetensors per layer"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import safetensors.torch

        self.safetensors = safetensors.torch

    def save(self, session: str, layers: Layers) -> None:
        directory = self.root / session
        directory.mkdir()
        for name, tensor in self.tensors(layers).items():
            self.safetensors.save_file({"kv": tensor}, directory / f"{name}.safetensors")

    def restore(self, session: str, into: Layers) -> None:
        for name, tensor in self.tensors(into).items():
            path = self.root / session / f"{name}.safetensors"
            tensor.copy_(self.safetensors.load_file(path)["kv"])

    def remove(self, session: str) -> None:
        shutil.rmtree(self.root / session)


class SafetensorsSession(SafetensorsLayers):
    name = "safetensors per session"
    stores_layers_apart = False

    def save(self, session: str, layers: Layers) -> None:
        self.safetensors.save_file(self.tensors(layers), self._path(session))

    def restore(self, session: str, into: Layers) -> None:
        with self.safetensors.safe_open(self._path(session), framework="pt") as stored:
            for name, tensor in self.tensors(into).items():
                tensor.copy_(stored.get_tensor(name))

    def remove(self, session: str) -> None:
        self._path(session).unlink()

    def _path(self, session: str) -> Path:
        return self.root / f"{session}.safetensors"


class Torch(_Tensors):
    name = "torch.save per session"
    stores_layers_apart = False
    is_mapped: ClassVar[bool] = False

    def save(self, session: str, layers: Layers) -> None:
        self.torch.save(self.tensors(layers), self._path(session))

    def restore(self, session: str, into: Layers) -> None:
        stored = self.torch.load(self._path(session), mmap=self.is_mapped, weights_only=True)
        for name, tensor in self.tensors(into).items():
            tensor.copy_(stored[name])

    def remove(self, session: str) -> None:
        self._path(session).unlink()

    def _path(self, session: str) -> Path:
        return self.root / f"{session}.pt"


class TorchMapped(Torch):
    name = "torch.save per session, loaded with mmap"
    is_mapped = True

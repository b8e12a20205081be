"""The bytes of sessions: made, read into, compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scripts.bench.disk import MIB, touched
from scripts.bench.peers.peer import Layers

BLOCK = 4096
_POOL_SIZE = 64 * MIB


class Source:
    """Layers of random bytes that do not repeat each other's beginning: each is a run of one
    pool, from a place that its session and its number give."""

    def __init__(self, seed: int = 0) -> None:
        self._pool = touched(_POOL_SIZE)
        np.frombuffer(self._pool, np.uint8)[:] = np.frombuffer(
            np.random.default_rng(seed).bytes(_POOL_SIZE), np.uint8
        )

    def session(self, number: int, sizes: Sequence[int]) -> dict[str, memoryview]:
        """Layers of these sizes, of whole blocks, by name."""
        draw = np.random.default_rng([number, len(sizes)])
        places = [int(draw.integers((_POOL_SIZE - size) // BLOCK + 1)) * BLOCK for size in sizes]
        return {
            layer_name(layer): self._pool[place : place + size]
            for layer, (place, size) in enumerate(zip(places, sizes, strict=True))
        }


class Target:
    """Touched memory to restore sessions into, in at most so many layers of at most that size."""

    def __init__(self, layers: int, size: int) -> None:
        self._slots = [touched(size) for _ in range(layers)]

    def shaped(self, sizes: Sequence[int]) -> dict[str, memoryview]:
        return {
            layer_name(layer): slot[:size]
            for layer, (slot, size) in enumerate(zip(self._slots, sizes, strict=False))
        }

    def clear(self) -> None:
        """So that what was there before cannot pass for what is read next."""
        for slot in self._slots:
            np.frombuffer(slot, np.uint8)[:] = 0


def layer_name(layer: int) -> str:
    return f"layer.{layer:03}"


def verify(found: Layers, expected: Layers) -> None:
    for name, data in expected.items():
        if not np.array_equal(np.frombuffer(found[name], np.uint8), np.frombuffer(data, np.uint8)):
            raise SystemExit(f"{name} came back with other bytes")

"""Bytes that look like a KV cache in bf16, without a model."""

from __future__ import annotations

import mmap

import numpy as np

ROW = (2, 8, 128)  # K and V, heads, channels
DTYPE = "bfloat16"
_ITEM = 2


def aligned(size: int) -> memoryview:
    """Memory that O_DIRECT takes, whose pages are there."""
    memory = memoryview(mmap.mmap(-1, size))
    np.frombuffer(memory, np.uint8)[:] = 0
    return memory


def layers(count: int, size: int) -> list[memoryview]:
    """So many different ones. A channel has a mean and a spread of its own, as in real models, so
    that sign and exponent repeat and mantissas do not: byte planes make it 1.5 times smaller."""
    random = np.random.default_rng(7)
    channels = int(np.prod(ROW))
    found = []
    for _ in range(count):
        spread = np.exp(random.normal(0, 1, channels)).astype(np.float32)
        mean = (2 * random.normal(0, 1, channels) * spread).astype(np.float32)
        rows = -(-size // (_ITEM * channels))
        values = random.standard_normal((rows, channels), np.float32) * spread + mean
        upper_half = (values.view(np.uint32) >> 16).astype(np.uint16)
        layer = aligned(size)
        np.frombuffer(layer, np.uint8)[:] = upper_half.reshape(-1).view(np.uint8)[:size]
        found.append(layer)
    return found


def equal(one: memoryview, other: memoryview) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))

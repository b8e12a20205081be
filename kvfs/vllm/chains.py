"""Tokens as bytes, and the key of each block: a number that stands for all tokens up to its end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import xxhash

TOKEN_BYTES = 4  # int32, as a session's `tokens` has them

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def packed(ids: Iterable[int]) -> bytes:
    """Token ids as int32."""
    return array("i", ids).tobytes()


def common(one: bytes, other: bytes) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, np.int32, length) != np.frombuffer(other, np.int32, length)
    return int(differ.argmax()) if differ.any() else length


class Chain:
    """The keys of a sequence's whole blocks of `block` tokens: xxh3-64 of all tokens up to the
    end of each."""

    def __init__(self, block: int, tokens: bytes = b"") -> None:
        """What is behind the last whole block is left out."""
        self.keys: list[int] = []
        self._width = block * TOKEN_BYTES
        self._state = xxhash.xxh3_64()
        self.add(tokens)

    def add(self, tokens: bytes) -> None:
        """Go on with these, from a block's beginning."""
        for at in range(0, len(tokens) - self._width + 1, self._width):
            self._state.update(tokens[at : at + self._width])
            self.keys.append(self._state.intdigest())


def sum_of(rows: memoryview, key: int, layer: int) -> int:
    """The checksum of a block in one layer. The block's key is in it, and the layer: rows of
    other tokens, of another place or of another layer do not pass."""
    return xxhash.xxh3_64_intdigest(rows, (key + layer) & 0xFFFF_FFFF_FFFF_FFFF)

"""One layer's KV in memory, as attention wants it: head by head."""

from __future__ import annotations

import numpy as np
import torch

from kvfs.torch.layout import RowLayout
from kvfs.torch.staging import POOL

_GROWTH = 1.25

Vectors = np.ndarray[tuple[int, int, int], np.dtype[np.void]]


class Slab:
    """K and V of one layer, `[K,V][kv_head][capacity][head_dim]`.

    Files are token-major and this is head-major: attention over K and V that lie scattered
    as in a file costs a decoding step 30 %, and the copy that turns one into the other in
    pieces runs at ten times the speed of the mount.
    """

    def __init__(self, layout: RowLayout, tokens: int) -> None:
        """Room for at least `tokens` tokens, whose content is undefined."""
        self._layout = layout
        self._buffer = POOL.take(max(1, tokens) * layout.row_bytes)
        self.capacity = len(self._buffer) // layout.row_bytes
        # A tensor made under inference mode could not be written to outside it.
        with torch.inference_mode(False):
            flat = torch.frombuffer(
                self._buffer, dtype=layout.dtype, count=self.capacity * layout.elements
            )
            self._kv = flat.view(2, layout.kv_heads, self.capacity, layout.head_dim)

    def put(self, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store K and V, each `[1, kv_heads, n, head_dim]`, as tokens at..at+n-1."""
        end = at + keys.shape[-2]
        self._kv[0, :, at:end].copy_(keys.detach()[0])
        self._kv[1, :, at:end].copy_(values.detach()[0])

    def keys(self, tokens: int) -> torch.Tensor:
        """K of the first `tokens` tokens: a view `[1, kv_heads, tokens, head_dim]`."""
        return self._kv[0, :, :tokens].unsqueeze(0)

    def values(self, tokens: int) -> torch.Tensor:
        """V of the first `tokens` tokens: a view `[1, kv_heads, tokens, head_dim]`."""
        return self._kv[1, :, :tokens].unsqueeze(0)

    def put_rows(self, at: int, rows: memoryview) -> int:
        """Store whole rows of a file as tokens at, at+1, ...; returns how many they are."""
        count = len(rows) // self._layout.row_bytes
        self._heads()[:, :, at : at + count] = self._by_token(rows).transpose(1, 2, 0)
        return count

    def get_rows(self, first: int, last: int, into: memoryview) -> memoryview:
        """Tokens first..last-1 as rows of a file, written to the start of `into`."""
        rows = into[: (last - first) * self._layout.row_bytes]
        self._by_token(rows)[:] = self._heads()[:, :, first:last].transpose(2, 0, 1)
        return rows

    def grown(self, used: int, tokens: int) -> Slab:
        """A larger slab with the first `used` tokens of this one, which is freed."""
        larger = Slab(self._layout, max(tokens, int(self.capacity * _GROWTH)))
        larger._kv[:, :, :used].copy_(self._kv[:, :, :used])
        self.free()
        return larger

    def free(self) -> None:
        """Hand the memory to the pool; the slab and its views must not be used again."""
        POOL.give(self._buffer)

    def _heads(self) -> Vectors:
        """`[K,V][kv_head][capacity]`, each item the bytes of one head's vector."""
        used = self.capacity * self._layout.row_bytes
        vectors = np.frombuffer(self._buffer, self._vector(), count=used // self._vector().itemsize)
        return vectors.reshape(2, self._layout.kv_heads, self.capacity)

    def _by_token(self, rows: memoryview) -> Vectors:
        """`[token][K,V][kv_head]`, each item the bytes of one head's vector."""
        return np.frombuffer(rows, self._vector()).reshape(-1, 2, self._layout.kv_heads)

    def _vector(self) -> np.dtype[np.void]:
        return np.dtype((np.void, self._layout.head_dim * self._layout.dtype.itemsize))

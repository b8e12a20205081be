"""One layer's KV in host memory, in the very bytes of its file."""

from __future__ import annotations

import torch

from kvfs.torch.layout import RowLayout
from kvfs.torch.staging import POOL

_GROWTH = 1.25


class Slab:
    """Token-major rows `[token][K,V][kv_head][head_dim]` with room for `capacity` tokens.

    K and V are strided views of it, so that a file is read into it and written from it
    without conversion.
    """

    def __init__(self, layout: RowLayout, tokens: int) -> None:
        """Room for at least `tokens` rows, whose content is undefined."""
        self._layout = layout
        self._buffer = POOL.take(max(1, tokens) * layout.row_bytes)
        self.capacity = len(self._buffer) // layout.row_bytes
        # A tensor made under inference mode could not be written to outside it.
        with torch.inference_mode(False):
            flat = torch.frombuffer(
                self._buffer, dtype=layout.dtype, count=self.capacity * layout.elements
            )
            self._rows = flat.view(self.capacity, *layout.shape)

    @property
    def memory(self) -> memoryview:
        """All bytes of the buffer, which starts on a page and ends on one."""
        return memoryview(self._buffer)

    def bytes_of(self, first: int, last: int) -> memoryview:
        """The bytes of rows first..last-1, as they stand in the file."""
        width = self._layout.row_bytes
        return self.memory[first * width : last * width]

    def put(self, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store K and V, each `[1, kv_heads, n, head_dim]`, as rows at..at+n-1."""
        rows = self._rows[at : at + keys.shape[-2]]
        rows[:, 0].copy_(keys.detach()[0].transpose(0, 1))
        rows[:, 1].copy_(values.detach()[0].transpose(0, 1))

    def keys(self, tokens: int) -> torch.Tensor:
        """K of the first `tokens` rows: a view `[1, kv_heads, tokens, head_dim]`."""
        return self._rows[:tokens, 0].transpose(0, 1).unsqueeze(0)

    def values(self, tokens: int) -> torch.Tensor:
        """V of the first `tokens` rows: a view `[1, kv_heads, tokens, head_dim]`."""
        return self._rows[:tokens, 1].transpose(0, 1).unsqueeze(0)

    def grown(self, used: int, tokens: int) -> Slab:
        """A larger slab with the first `used` rows of this one, which is freed."""
        larger = Slab(self._layout, max(tokens, int(self.capacity * _GROWTH)))
        larger._rows[:used].copy_(self._rows[:used])
        self.free()
        return larger

    def free(self) -> None:
        """Hand the memory to the pool; the slab and its views must not be used again."""
        POOL.give(self._buffer)

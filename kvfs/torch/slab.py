"""K and V of some tokens of one layer in memory, head by head as attention wants them."""

from __future__ import annotations

import torch

from kvfs.torch.layout import RowLayout


class Heads:
    """Tokens of one layer as `[K,V][batch][kv_head][capacity][head_dim]`, in memory lent to it.

    Files are token-major and this is head-major: attention over K and V that lie scattered
    as in a file costs a decoding step 5 to 15 %. A slab of the pool is seen so, and so is a
    workspace, in which a whole layer stands.
    """

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """`memory` is uint8, shape [n]; as many tokens as fit, and what is in it stays."""
        self.layout = layout
        self.capacity = memory.numel() // layout.row_bytes
        # A tensor made under inference mode could not be written to outside it.
        with torch.inference_mode(False):
            flat = memory[: self.capacity * layout.row_bytes].view(layout.dtype)
            self.kv = flat.view(2, layout.batch, layout.kv_heads, self.capacity, layout.head_dim)

    def put(self, at: int, kv: torch.Tensor) -> None:
        """Store K and V, `[2, batch, kv_heads, n, head_dim]`, as tokens at..at+n-1."""
        self.kv.narrow(3, at, kv.shape[3]).copy_(kv)

    def part(self, first: int, last: int) -> torch.Tensor:
        """Tokens first..last-1: a view `[2, batch, kv_heads, last-first, head_dim]`."""
        return self.kv.narrow(3, first, last - first)

    def put_rows(self, at: int, rows: memoryview) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""
        count = len(rows) // self.layout.row_bytes
        self.part(at, at + count).copy_(_by_head(rows, self.layout))

    def get_rows(self, first: int, last: int, into: memoryview) -> None:
        """Write tokens first..last-1 as rows of a file to `into`, which they fill."""
        _by_head(into, self.layout).copy_(self.part(first, last))


def rows_of(kv: torch.Tensor) -> memoryview:
    """K and V, `[2, batch, kv_heads, n, head_dim]`, as n rows of a file."""
    by_token = kv.permute(3, 0, 1, 2, 4).contiguous()
    return by_token.view(torch.uint8).numpy().data.cast("B")


def _by_head(rows: memoryview, layout: RowLayout) -> torch.Tensor:
    """File bytes, which must be writable, as `[2, batch, kv_heads, tokens, head_dim]`."""
    with torch.inference_mode(False):
        flat = torch.frombuffer(rows, dtype=layout.dtype)
        by_token = flat.view(-1, 2, layout.batch, layout.kv_heads, layout.head_dim)
        return by_token.permute(1, 2, 3, 0, 4)

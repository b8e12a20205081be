"""The token-major (NHD) row of a layer file."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True)
class RowLayout:
    """One token in one layer: K then V, each `[batch][kv_head][head_dim]`.

    A session is one sequence, so its batch is 1; scratch layers may hold more.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(2, batch * kv_heads, head_dim)`; index 0 of the first axis is K, index 1 is V."""
        return (2, self.heads, self.head_dim)

    @property
    def heads(self) -> int:
        """Heads of K in a row, those of all sequences."""
        return self.batch * self.kv_heads

    @property
    def elements(self) -> int:
        """Numbers in a row."""
        return 2 * self.heads * self.head_dim

    @cached_property
    def row_bytes(self) -> int:
        """Bytes in a row: what one token adds to a layer file."""
        return self.elements * self.dtype.itemsize

    def tokens_in(self, nbytes: int) -> int:
        """How many rows a block of so many bytes holds: whole pages of a file, so that blocks can
        be read and written in place, unless that would leave more than an eighth unused."""
        rows = nbytes // self.row_bytes
        step = math.lcm(self.row_bytes, mmap.PAGESIZE)
        in_pages = nbytes // step * step // self.row_bytes
        return in_pages if in_pages >= rows - rows // 8 else rows

    @property
    def dtype_name(self) -> str:
        """The element type as files and xattrs name it, such as `bfloat16`."""
        return name_of(self.dtype)

    def batched(self, batch: int) -> RowLayout:
        """The row of `batch` sequences side by side."""
        return replace(self, batch=batch)


def name_of(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")

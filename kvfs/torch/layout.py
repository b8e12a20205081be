"""The token-major (NHD) row of a layer file."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowLayout:
    """One token in one layer: K then V, each `[kv_head][head_dim]`."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(2, kv_heads, head_dim)`; index 0 of the first axis is K, index 1 is V."""
        return (2, self.kv_heads, self.head_dim)

    @property
    def elements(self) -> int:
        """Numbers in a row."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes in a row: what one token adds to a layer file."""
        return self.elements * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The element type as files and xattrs name it, such as `bfloat16`."""
        return name_of(self.dtype)


def name_of(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")

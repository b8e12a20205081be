"""K and V of some tokens of one layer in memory, head by head as attention wants them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from kvfs.torch.layout import RowLayout

Vectors = np.ndarray[tuple[int, int, int], np.dtype[np.void]]


class Heads(ABC):
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

    @abstractmethod
    def put_rows(self, at: int, rows: memoryview) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""

    @abstractmethod
    def get_rows(self, first: int, last: int, into: memoryview) -> None:
        """Write tokens first..last-1 as rows of a file to `into`, which they fill."""


class HostHeads(Heads):
    """In host memory. Rows are turned by numpy.

    Between rows and heads it copies vectors at 15 GB/s, torch at 10, and it does not wait
    for threads that a busy machine has put aside.
    """

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """`memory` as for `Heads`."""
        super().__init__(memory, layout)
        used = memory.numpy()[: self.capacity * layout.row_bytes].view(_vector(layout))
        self._vectors: Vectors = used.reshape(2, layout.heads, self.capacity)

    def put_rows(self, at: int, rows: memoryview) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""
        by_token = _by_token(rows, self.layout)
        self._vectors[:, :, at : at + len(by_token)] = by_token.transpose(1, 2, 0)

    def get_rows(self, first: int, last: int, into: memoryview) -> None:
        """Write tokens first..last-1 as rows of a file to `into`, which they fill."""
        _by_token(into, self.layout)[:] = self._vectors[:, :, first:last].transpose(2, 0, 1)


class DeviceHeads(Heads):
    """In memory of a device. Rows cross as they are, and are turned there.

    Both ways are queued on the current stream: the host memory must stay as it is until the
    device has done that, and that memory should be pinned.
    """

    def put_rows(self, at: int, rows: memoryview) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""
        by_token = self._rows(rows).to(self.kv.device, non_blocking=True)
        self.part(at, at + len(by_token)).copy_(by_token.permute(1, 2, 3, 0, 4))

    def get_rows(self, first: int, last: int, into: memoryview) -> None:
        """Write tokens first..last-1 as rows of a file to `into`, which they fill."""
        self._rows(into).copy_(by_token(self.part(first, last)), non_blocking=True)

    def _rows(self, memory: memoryview) -> torch.Tensor:
        """`[token][K,V][batch][kv_head][head_dim]`."""
        layout = self.layout
        flat = torch.frombuffer(memory, dtype=layout.dtype)
        return flat.view(-1, 2, layout.batch, layout.kv_heads, layout.head_dim)


def by_token(kv: torch.Tensor) -> torch.Tensor:
    """K and V, `[2, batch, kv_heads, n, head_dim]`, in the order of a file, in one piece."""
    return kv.permute(3, 0, 1, 2, 4).contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """What a tensor in host memory, in one piece, consists of."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def _by_token(rows: memoryview, layout: RowLayout) -> Vectors:
    """`[token][K,V][head]`, each item the bytes of one head's vector."""
    return np.frombuffer(rows, _vector(layout)).reshape(-1, 2, layout.heads)


def _vector(layout: RowLayout) -> np.dtype[np.void]:
    return np.dtype((np.void, layout.head_dim * layout.dtype.itemsize))

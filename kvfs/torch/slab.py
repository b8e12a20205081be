"""K and V of some tokens of one layer in memory: in rows, as a file has them, or head by head.

Slabs hold rows, so that what moves between them and files is copied as it is, or read and
written in place. Attention over K and V that lie scattered so costs a decoding step 5 to
15 %: it sees a workspace, in which a whole layer stands head by head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from kvfs.torch.layout import RowLayout

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Vectors = np.ndarray[tuple[int, int, int], np.dtype[np.void]]


class TokenKV:
    """`kv` is K and V of tokens, `[2, batch, kv_heads, capacity, head_dim]`, however it lies."""

    def __init__(self, kv: torch.Tensor, layout: RowLayout) -> None:
        """A view of memory that was lent."""
        self.layout = layout
        self.kv = kv

    def put(self, at: int, kv: torch.Tensor) -> None:
        """Store K and V, `[2, batch, kv_heads, n, head_dim]`, as tokens at..at+n-1."""
        self.kv.narrow(3, at, kv.shape[3]).copy_(kv)

    def part(self, first: int, last: int) -> torch.Tensor:
        """Tokens first..last-1: a view `[2, batch, kv_heads, last-first, head_dim]`."""
        return self.kv.narrow(3, first, last - first)


class Rows(TokenKV, ABC):
    """Tokens as `[capacity][K,V][batch][kv_head][head_dim]`: the rows of a file."""

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """`memory` is uint8, shape [n]; as many tokens as fit, and what is in it stays."""
        with torch.inference_mode(False):
            used = _used(memory, layout).view(-1, 2, layout.batch, layout.kv_heads, layout.head_dim)
            super().__init__(used.permute(1, 2, 3, 0, 4), layout)

    @property
    @abstractmethod
    def memory(self) -> memoryview | None:
        """All of it, for who reads and writes files in place; None where a host cannot."""

    @abstractmethod
    def put_rows(self, at: int, rows: Bytes) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""


class Heads(TokenKV, ABC):
    """Tokens as `[K,V][batch][kv_head][capacity][head_dim]`."""

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """As for `Rows`."""
        # A tensor made under inference mode could not be written to outside it.
        with torch.inference_mode(False):
            used = _used(memory, layout).view(2, layout.batch, layout.kv_heads, -1, layout.head_dim)
            super().__init__(used, layout)

    @abstractmethod
    def put_rows(self, at: int, rows: memoryview) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""

    @abstractmethod
    def gather(self, at: int, slab: Rows, first: int, last: int) -> None:
        """Store tokens first..last-1 of a slab as tokens at, at+1, ..."""


class HostRows(Rows):
    """In host memory."""

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """As for `Rows`."""
        super().__init__(memory, layout)
        self._bytes = memory.numpy()

    @property
    def memory(self) -> memoryview:
        """All of it."""
        return self._bytes.data

    def put_rows(self, at: int, rows: Bytes) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""
        start = at * self.layout.row_bytes
        self._bytes[start : start + len(rows)] = rows

    def rows(self, first: int, last: int) -> memoryview:
        """Tokens first..last-1 where they lie."""
        width = self.layout.row_bytes
        return self._bytes[first * width : last * width].data


class HostHeads(Heads):
    """In host memory. Rows are turned by numpy.

    Between rows and heads it copies vectors at 15 GB/s, torch at 10, and it does not wait
    for threads that a busy machine has put aside.
    """

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """As for `Rows`."""
        super().__init__(memory, layout)
        used = _used(memory, layout).view(torch.uint8).numpy().view(_vector(layout))
        self._vectors: Vectors = used.reshape(2, layout.heads, -1)

    def put_rows(self, at: int, rows: memoryview) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""
        by_token = np.frombuffer(rows, _vector(self.layout)).reshape(-1, 2, self.layout.heads)
        self._vectors[:, :, at : at + len(by_token)] = by_token.transpose(1, 2, 0)

    def gather(self, at: int, slab: Rows, first: int, last: int) -> None:
        """Store tokens first..last-1 of a slab as tokens at, at+1, ..."""
        assert isinstance(slab, HostRows)
        self.put_rows(at, slab.rows(first, last))


class DeviceRows(Rows):
    """In memory of a device.

    Both ways are queued on the current stream: the host memory must stay as it is until the
    device has done that, and that memory should be pinned.
    """

    memory = None

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """As for `Rows`."""
        super().__init__(memory, layout)
        self._bytes = memory

    def put_rows(self, at: int, rows: Bytes) -> None:
        """Store whole rows of a file as tokens at, at+1, ..."""
        count = len(rows) // self.layout.row_bytes
        self._range(at, at + count).copy_(torch.from_numpy(rows), non_blocking=True)

    def get_rows(self, first: int, last: int, into: memoryview) -> None:
        """Write tokens first..last-1 as rows of a file to `into`, which they fill."""
        host = torch.frombuffer(into, dtype=torch.uint8)
        host.copy_(self._range(first, last), non_blocking=True)

    def _range(self, first: int, last: int) -> torch.Tensor:
        width = self.layout.row_bytes
        return self._bytes[first * width : last * width]


class DeviceHeads(Heads):
    """In memory of a device. Rows cross as they are, and are turned there."""

    def put_rows(self, at: int, rows: memoryview) -> None:
        """Store whole rows of a file as tokens at, at+1, ...; queued as by `DeviceRows`."""
        layout = self.layout
        flat = torch.frombuffer(rows, dtype=layout.dtype).to(self.kv.device, non_blocking=True)
        by_token = flat.view(-1, 2, layout.batch, layout.kv_heads, layout.head_dim)
        self.part(at, at + len(by_token)).copy_(by_token.permute(1, 2, 3, 0, 4))

    def gather(self, at: int, slab: Rows, first: int, last: int) -> None:
        """Store tokens first..last-1 of a slab as tokens at, at+1, ..."""
        self.part(at, at + last - first).copy_(slab.part(first, last))


def by_token(kv: torch.Tensor) -> torch.Tensor:
    """K and V, `[2, batch, kv_heads, n, head_dim]`, in the order of a file, in one piece."""
    return kv.permute(3, 0, 1, 2, 4).contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """What a tensor in host memory, in one piece, consists of."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def _used(memory: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """As many rows as fit, as numbers."""
    count = memory.numel() // layout.row_bytes
    return memory[: count * layout.row_bytes].view(layout.dtype)


def _vector(layout: RowLayout) -> np.dtype[np.void]:
    return np.dtype((np.void, layout.head_dim * layout.dtype.itemsize))

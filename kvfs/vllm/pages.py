"""Between the engine's pages and the rows of a layer file.

Attention kernels keep a block of tokens in an order of their own: K turned, numbers in pairs
for one instruction set and in tiles for another. A session must not depend on that, so the
order is learnt: numbers that tell themselves apart are written to a page by the engine's own
kernel, and found there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from kvfs.torch.layout import RowLayout

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`write(key, value, pages, slots)`: the engine's kernel. K and V are `[token][kv_head][head_dim]`,
and token i goes to slot `slots[i]` of the pages."""

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PageOrder:
    """Where in a page each number of its tokens' rows is; a page holds a block of tokens."""

    def __init__(self, places: torch.Tensor, itemsize: int) -> None:
        """`places[i]` is where number i of the rows is in the page."""
        self._unit = _UNITS[itemsize * (together := _together(places, 8 // itemsize))]
        self._of_rows = places[::together] // together
        self._of_page = torch.argsort(self._of_rows)

    @classmethod
    def learn(cls, write: Write, page: torch.Tensor, layout: RowLayout) -> PageOrder:
        """By means of `write`, for pages like this one, shape [1, ...]; what is in it stays.

        Raises:
            ValueError: a page is not the numbers of a block of tokens, in some order.
        """
        tokens = page.numel() // layout.elements
        count = tokens * layout.elements
        number_at = torch.zeros(page.numel(), dtype=torch.int64, device=page.device)
        if count == page.numel():
            numbers = torch.arange(count, device=page.device).view(tokens, *layout.shape)
            slots = torch.arange(tokens, device=page.device)
            # Noughts and ones alone: any element type holds them, and any kernel leaves them be.
            for bit in range(count.bit_length()):
                ones = (numbers >> bit & 1).to(layout.dtype)
                scratch = torch.zeros_like(page)
                write(ones[:, 0].contiguous(), ones[:, 1].contiguous(), scratch, slots)
                number_at |= (scratch.reshape(-1) != 0).to(torch.int64) << bit
        places = torch.argsort(number_at)
        if not torch.equal(number_at[places], torch.arange(page.numel(), device=page.device)):
            raise ValueError(
                f"pages of shape {tuple(page.shape)} do not hold K and V of whole tokens, "
                f"{layout.shape} {layout.dtype_name} each: this kind of attention is not supported"
            )
        return cls(places, layout.dtype.itemsize)

    def rows(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Pages to the rows of their tokens; both uint8, `[n, bytes of a page]`."""
        self._take(pages, self._of_rows, out)

    def pages(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The inverse."""
        self._take(rows, self._of_page, out)

    def _take(self, numbers: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
        numbers, out = numbers.view(self._unit), out.view(self._unit)
        if numbers.device.type == "cpu":  # three times as fast as torch does it
            np.take(numbers.numpy(), places.numpy(), axis=1, out=out.numpy(), mode="clip")
        else:
            torch.index_select(numbers, 1, places, out=out)


class Pages:
    """The engine's memory: pages of each layer. A block is a page, or several that follow each
    other where the kernel has smaller ones. Safe to use from several threads, each its blocks."""

    def __init__(self, caches: Sequence[torch.Tensor], order: PageOrder, block_bytes: int) -> None:
        """`caches` of all layers, each `[pages, ...]`; a block's rows take `block_bytes`."""
        self._caches = caches
        self._order = order
        self._page_bytes = caches[0][0].numel() * caches[0].itemsize
        self._in_block = block_bytes // self._page_bytes

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._caches[0].device

    def get(self, layer: int, blocks: Sequence[int], out: torch.Tensor) -> None:
        """The rows of blocks, one behind the other, to host memory: uint8, shape [bytes]."""
        for pages, part in self._parts(layer, blocks, out):
            numbers = pages.reshape(len(pages), -1).view(torch.uint8)
            if self.device.type == "cpu":
                self._order.rows(numbers, part)
            else:
                rows = torch.empty_like(numbers)
                self._order.rows(numbers, rows)
                part.copy_(rows)

    def put(self, layer: int, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """The inverse."""
        for pages, part in self._parts(layer, blocks, rows):
            filled = torch.empty(part.shape, dtype=torch.uint8, device=self.device)
            self._order.pages(part.to(self.device), filled)
            pages.copy_(filled.view(pages.dtype).view(pages.shape))

    def _parts(
        self, layer: int, blocks: Sequence[int], rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pages that lie one behind the other, with their part of the rows, `[pages, bytes]`."""
        rows, at = rows.view(-1, self._page_bytes), 0
        for first, end in _runs(blocks):
            count = (end - first) * self._in_block
            yield (
                self._caches[layer].narrow(0, first * self._in_block, count),
                rows.narrow(0, at, count),
            )
            at += count


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """What is given as numbers in any order, as runs of neighbours that rise."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[first], numbers[index - 1] + 1
            first = index


def _together(places: torch.Tensor, most: int) -> int:
    """How many neighbours in a row are neighbours in the page everywhere, and begin there at a
    multiple of their count: a power of two."""
    count = most
    while count > 1:
        if len(places) % count == 0:
            groups = places.view(-1, count)
            steps = torch.arange(count, device=places.device)
            if torch.equal(groups, groups[:, :1] + steps) and not (groups[:, 0] % count).any():
                return count
        count //= 2
    return count

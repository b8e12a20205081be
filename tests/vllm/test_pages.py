"""The order of an attention kernel's pages is learnt, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfs.torch.layout import RowLayout
from kvfs.vllm.pages import PageOrder, Pages

HEADS, DIM = 2, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _kernel(order: torch.Tensor, tokens: int) -> Any:
    """One that keeps number i of a page's rows at place order[i]."""

    def write(key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: Any) -> None:
        flat = pages.view(len(pages), -1)
        rows = torch.stack([key, value], 1).view(len(key), -1)
        width = rows.shape[1]
        for row, slot in zip(rows, slots.tolist(), strict=True):
            at = slot % tokens * width
            flat[slot // tokens, order[at : at + width]] = row

    return write


@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([1, 2, 4]),
    pages_in_block=st.integers(1, 3),
    together=st.sampled_from([1, 2, 4, 8]),
    blocks=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    seed=st.integers(0, 99),
)
def test_rows_of_blocks_in_any_order_of_pages(
    dtype: torch.dtype,
    tokens: int,
    pages_in_block: int,
    together: int,
    blocks: list[int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layout = RowLayout(HEADS, DIM, dtype)
    numbers = tokens * layout.elements
    groups = torch.randperm(numbers // together) * together
    order = (groups[:, None] + torch.arange(together)).flatten()
    write = _kernel(order, tokens)
    cache = torch.zeros(8 * pages_in_block, HEADS, tokens, 2 * DIM, dtype=dtype)
    learnt = PageOrder.learn(write, cache[:1], layout)
    assert not cache.any()

    rows = torch.randn(len(blocks) * pages_in_block * tokens, *layout.shape).to(dtype)
    in_block = pages_in_block * tokens
    slots = torch.cat([torch.arange(in_block) + block * in_block for block in blocks])
    pages = Pages([cache], learnt, in_block * layout.row_bytes)
    pages.put(0, blocks, rows.flatten().view(torch.uint8))
    expected = torch.zeros_like(cache)
    write(rows[:, 0], rows[:, 1], expected, slots)
    assert torch.equal(cache, expected)

    out = torch.empty(rows.numel() * rows.itemsize, dtype=torch.uint8)
    pages.get(0, blocks, out)
    assert torch.equal(out.view(dtype).view(rows.shape), rows)


def _forgets_v(key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: Any) -> None:
    pages.view(-1)[: key.numel()] = key.flatten()


@pytest.mark.parametrize("dim", [DIM, DIM - 1])
def test_pages_that_hold_something_else_are_refused(dim: int) -> None:
    page = torch.zeros(1, HEADS, 4, 2 * dim)
    with pytest.raises(ValueError, match="not supported"):
        PageOrder.learn(_forgets_v, page, RowLayout(HEADS, DIM, torch.float32))

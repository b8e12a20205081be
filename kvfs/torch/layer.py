"""One layer of a session as transformers sees it: in memory, or only in its file."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvfs.torch.files import SessionFile
from kvfs.torch.layout import RowLayout, name_of
from kvfs.torch.slab import Slab
from kvfs.torch.staging import SLAB_BYTES, staging


class KVFSLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of one layer: `length` tokens, of which the first `stored` are in the file.

    `reach` is how many tokens the file may hold: more than `stored` after a write that
    failed, or after `forget` until the session has cut the file.

    When the layer is not in memory all of it is in the file, and `keys` and `values` are
    None; `update` brings it back. Else they are views `[1, kv_heads, length, head_dim]`,
    valid until the next call that changes the layer.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, file: SessionFile, layout: RowLayout, stored: int, reader: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.length = stored
        self.stored = stored
        self.reach = stored
        self._file = file
        self._layout = layout
        self._reader = reader
        self._slab: Slab | None = None
        self._incoming: Future[Slab] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: shape and type are known when the session is opened."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V, each `[1, kv_heads, n, head_dim]`, and return all of both.

        Raises:
            ValueError: shape or type is not that of the session.
            OSError: the layer cannot be read back, or a full slab not written.
        """
        self._require_row(key_states)
        self._require_row(value_states)
        slab = self._with_room(key_states.shape[-2])
        slab.put(self.length, key_states, value_states)
        shown = self._show(slab, self.length + key_states.shape[-2])
        if (self.length - self.stored) * self._layout.row_bytes >= SLAB_BYTES:
            self.store()
        return shown

    def get_seq_length(self) -> int:
        """Tokens in this layer."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of K and V during a forward of `query_length` tokens."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: grows without a limit."""
        return -1

    def prefetch(self) -> None:
        """Begin to read the layer in the background, unless it is in memory."""
        if self._slab is None and self._incoming is None:
            self._incoming = self._reader.submit(self._read)

    def load(self) -> None:
        """Have the layer in memory when this returns; OSError if it cannot be read."""
        self._resident()

    def store(self) -> None:
        """Write to the file what it does not hold yet."""
        if self._slab is None or self.stored == self.length:
            return
        width = self._layout.row_bytes
        self.reach = self.length
        with staging(self._layout) as memory:
            while self.stored < self.length:
                last = min(self.length, self.stored + len(memory) // width)
                rows = self._slab.get_rows(self.stored, last, memory)
                self._file.append(rows, self.stored * width)
                self.stored = last

    def offload(self) -> None:
        """Write what the file does not hold yet, and free the memory."""
        self.store()
        self.discard()

    def discard(self) -> None:
        """Free the memory; what was not stored is lost."""
        self._drop_incoming()
        if self._slab is not None:
            self._slab.free()
        self._slab = self.keys = self.values = None
        self.length = self.stored

    def reattach(self, file: SessionFile, stored: int) -> None:
        """Go on with another opening of the file, of which `stored` tokens are valid."""
        self._file = file
        self.length = self.stored = self.reach = stored

    def forget(self, tokens: int) -> None:
        """Drop all after the first `tokens` tokens; the file is cut by the session."""
        self._drop_incoming()
        self.stored = min(self.stored, tokens)
        self.length = tokens
        if self._slab is not None:
            self._show(self._slab, tokens)

    def _drop_incoming(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None and not incoming.cancel() and incoming.exception() is None:
            incoming.result().free()

    def _resident(self) -> Slab:
        if self._slab is None:
            incoming, self._incoming = self._incoming, None
            slab = incoming.result() if incoming is not None else self._read()
            self._show(slab, self.length)
        assert self._slab is not None
        return self._slab

    def _with_room(self, tokens: int) -> Slab:
        slab = self._resident()
        if self.length + tokens > slab.capacity:
            slab = slab.grown(self.length, self.length + tokens)
        return slab

    def _show(self, slab: Slab, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = slab.keys(length), slab.values(length)
        self._slab, self.length = slab, length
        self.keys, self.values = keys, values
        return keys, values

    def _read(self) -> Slab:
        width = self._layout.row_bytes
        slab = Slab(self._layout, self.stored + SLAB_BYTES // width)
        try:
            done = 0
            with staging(self._layout) as memory:
                for rows in self._file.stream(memory, self.stored * width):
                    done += slab.put_rows(done, rows)
        except BaseException:
            slab.free()
            raise
        return slab

    def _require_row(self, states: torch.Tensor) -> None:
        batch, heads, _, head_dim = states.shape
        layout = self._layout
        if (batch, heads, head_dim) != (1, layout.kv_heads, layout.head_dim) or (
            states.dtype != layout.dtype
        ):
            raise ValueError(
                f"{self._file.path} holds 1 sequence of {layout.kv_heads} KV heads x "
                f"{layout.head_dim} in {layout.dtype_name}; the model gave {batch} of "
                f"{heads} x {head_dim} in {name_of(states.dtype)}"
            )

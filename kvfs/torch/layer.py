"""One layer of a session as transformers sees it: blocks that are hot, or only in its file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from kvfs.tiers.handles import NOWHERE, Ids, State
from kvfs.torch import ranges as spans
from kvfs.torch.counters import Counters
from kvfs.torch.files import LayerFile, ScratchFile
from kvfs.torch.hot import HotPool, Slab, Workspace
from kvfs.torch.layout import RowLayout, name_of
from kvfs.torch.offers import SessionOffer
from kvfs.torch.ranges import Ranges
from kvfs.torch.slab import Heads, Rows
from kvfs.torch.source import LayerSource, opened

_epochs = count()
"""Each says what one layer holds, until something other than new tokens changes that."""


class KVFSLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of one layer: `length` tokens, of which the first `stored` are in the file.

    Tokens lie in blocks of one slab each. A block is hot, or all of it is in the file; a
    token that is not in the file is hot. `reach` is how many tokens the file may hold: more
    than `stored` after a write that failed, or after `forget` until the session has cut
    the file.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        file: LayerFile,
        layout: RowLayout,
        pool: HotPool,
        counters: Counters,
        *,
        stored: int = 0,
        sliding_window: int | None = None,
        writes_full_slabs: bool = True,
    ) -> None:
        """`sliding_window` is the model's own, in tokens.

        Raises:
            ValueError: a slab of the pool does not hold one token.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        if pool.slab_bytes < layout.row_bytes:
            raise ValueError(
                f"a token takes {layout.row_bytes} bytes a layer, a slab of the pool has "
                f"{pool.slab_bytes}: give HotPool larger slabs"
            )
        self.is_initialized = True
        self.is_sliding = sliding_window is not None
        self.layout = layout
        self.block_tokens = layout.tokens_in(pool.slab_bytes)
        self.length = stored
        self.stored = stored
        self.reach = stored
        self.make_room: Callable[[], list[int]] = list
        """Asked when a slab is wanted and none is free; the place of one, or nothing."""
        self._file = file
        self._pool = pool
        self._mover = pool.mover
        self._counters = counters
        self._sliding_window = sliding_window
        self._writes_full_slabs = writes_full_slabs
        self._lock = threading.RLock()
        self._slabs: list[Rows | None] = []
        self._ids: Ids = np.empty(0, np.int64)
        self._cold = 0
        self._epoch = next(_epochs)
        self._past: Ranges = []
        self._space: Workspace | None = None
        self._attended: Ranges | None = None
        self._extend_cold(stored)

    # What transformers calls

    @property
    def keys(self) -> torch.Tensor | None:
        """All K, `[batch, kv_heads, length, head_dim]`, as a copy; None unless all is hot."""
        return self._copy(0)

    @keys.setter
    def keys(self, _: torch.Tensor | None) -> None:
        """What transformers sets when it makes a layer is not of use here."""

    @property
    def values(self) -> torch.Tensor | None:
        """All V, `[batch, kv_heads, length, head_dim]`, as a copy; None unless all is hot."""
        return self._copy(1)

    @values.setter
    def values(self, _: torch.Tensor | None) -> None:
        """As for `keys`."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: shape and type are known when the session is opened."""

    def get_seq_length(self) -> int:
        """Tokens in this layer."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of K and V during a forward of `query_length` tokens."""
        seen = spans.total(self.past)
        # What is left out lies before all that is seen, as far as a causal mask can tell.
        return seen + query_length, self.length - seen

    def get_max_length(self) -> int:
        """-1: grows without a limit."""
        return -1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V, each `[batch, kv_heads, n, head_dim]`; what to attend to of both.

        `begin` came before, and `fetch` if the layer is to be fetched. What is returned is
        valid until the next forward, or until the layer after the next one is fetched.

        Raises:
            ValueError: shape or type is not that of the session.
            OSError: a full slab cannot be written.
        """
        self._require_rows(key_states, value_states)
        kv = torch.stack((key_states, value_states))
        if kv.requires_grad:
            kv = kv.detach()
        self._append(kv)
        shown = self._show(kv)
        if self._writes_full_slabs and (
            self.length // self.block_tokens > self.stored // self.block_tokens
        ):
            self.store()
        return shown

    # A forward, as the cache conducts it

    @property
    def past(self) -> Ranges:
        """The tokens that the next forward attends to."""
        if self._sliding_window is not None:
            # As DynamicSlidingWindowLayer: one less than the window, the query is in it too.
            return spans.union([(max(0, self.length - self._sliding_window + 1), self.length)])
        if self._attended is not None:
            return self._attended
        return [(0, self.length)] if self.length else []

    def attend_to(self, attended: Ranges | None) -> None:
        """Leave out all tokens but these from now on; None: leave out none."""
        self._attended = attended

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called in this forward."""
        return self._space is not None

    def begin(self, space: Workspace) -> bool:
        """It is this layer's turn, or soon; it may be put together in `space`.

        Returns whether it needs blocks that are not hot: then `fetch` brings them in.
        """
        self._past = self.past
        self._space = space
        content = self._content()
        if space.content != content:
            space.content, space.valid = content, 0
        return self._cold > 0 and bool(self._needed_blocks())

    def end(self) -> None:
        """The forward is over."""
        self._space = None

    def fetch(self) -> None:
        """Bring in what the forward needs: to slabs as far as some are free, else straight to
        the workspace."""
        self._fetch(self._needed_blocks(), self._space)

    def hot_ids(self) -> Ids:
        """The handles of the blocks that the next forward needs and that are hot."""
        if not self._cold and self._sliding_window is None and self._attended is None:
            return self._ids
        needed = self._blocks_in(self.past)
        return self._ids[[block for block in needed if self._slabs[block] is not None]]

    # Moving blocks

    @property
    def hot_blocks(self) -> list[int]:
        """The numbers of the blocks that are hot."""
        return [block for block, slab in enumerate(self._slabs) if slab is not None]

    @property
    def is_hot(self) -> bool:
        """Whether all blocks are."""
        return not self._cold

    @property
    def hot_count(self) -> int:
        """How many blocks are hot."""
        return len(self._slabs) - self._cold

    @property
    def oldest_full_block(self) -> int | None:
        """The first hot block to which no token can be added any more."""
        full = self.length // self.block_tokens
        return next((block for block in self.hot_blocks if block < full), None)

    def handle(self, block: int) -> int:
        """The handle of a block."""
        return int(self._ids[block])

    def blocks_outside(self, wanted: Ranges) -> list[int]:
        """The hot blocks that hold none of these tokens."""
        inside = set(self._blocks_in(wanted))
        return [block for block in self.hot_blocks if block not in inside]

    def blocks_before(self, token: int) -> list[int]:
        """The hot blocks that begin before this token."""
        return [block for block in self.hot_blocks if block * self.block_tokens < token]

    def lacking(self, wanted: Ranges) -> list[int]:
        """The blocks of these tokens that are not hot."""
        if not self._cold:
            return []
        return [block for block in self._blocks_in(wanted) if self._slabs[block] is None]

    def load(self, wanted: Ranges, offer: SessionOffer | None = None) -> None:
        """Bring these tokens in, as far as slabs are free; OSError if they cannot be read.

        `offer` is of the session, since its files were last cut.
        """
        self._fetch(self.lacking(wanted), None, offer)

    def store(self, upto: int | None = None) -> None:
        """Write to the file what it does not hold yet of the first `upto` tokens, or of all."""
        with self._lock:
            upto = self.length if upto is None else upto
            if self.stored >= upto:
                return
            self.reach = max(self.reach, upto)
            for rows in self._mover.outgoing(self._parts(self.stored, upto), self.layout):
                self._write(rows)

    def demote(self, blocks: list[int]) -> int:
        """Free these blocks, what the file does not hold of them written; the bytes freed.

        Those that are not hot any more when their turn comes are passed over.
        """
        if not blocks:
            return 0
        began = time.perf_counter()
        with self._pool.handles.migrating(self._ids[blocks]) as migration:
            places = migration.before.places[migration.before.places != NOWHERE].tolist()
            with self._lock:
                self.store(min(self.length, (blocks[-1] + 1) * self.block_tokens))
                for block in blocks:
                    self._slabs[block] = None
                self._cold += len(places)
            migration.publish(State.COLD)
        self._pool.give(places)
        self._counters.add(evict_seconds=time.perf_counter() - began)
        return len(places) * self._pool.slab_bytes

    def offload(self) -> None:
        """Write what the file does not hold yet, and free the memory."""
        self.store()
        self.demote(self.hot_blocks)

    def forget(self, tokens: int) -> None:
        """Drop all after the first `tokens` tokens; the file is cut by the session."""
        with self._lock:
            self._epoch = next(_epochs)
            self.stored = min(self.stored, tokens)
            self.length = tokens
            self._attended = None
            kept = -(-tokens // self.block_tokens)
            gone, self._ids = self._ids[kept:], self._ids[:kept]
            self._cold -= self._slabs[kept:].count(None)
            del self._slabs[kept:]
        if len(gone):
            places = self._pool.handles.look(gone).places
            self._pool.handles.remove(gone)
            self._pool.give(places[places != NOWHERE].tolist())

    def close(self) -> None:
        """Close the file, if it has no name and lives by its descriptor."""
        if isinstance(self._file, ScratchFile):
            self._file.close()

    def reattach(self, file: LayerFile, in_file: int) -> int:
        """Go on with another opening of the file, in which `in_file` tokens are valid.

        Returns how many tokens, from the first on, are hot or in the file.
        """
        self._file = file
        self.stored = self.reach = min(self.stored, in_file)
        for block, slab in enumerate(self._slabs):
            end = min(self.length, (block + 1) * self.block_tokens)
            if slab is None and end > self.stored:
                return self.stored
        return self.length

    def rows_by_block(self) -> Iterator[torch.Tensor]:
        """K and V of all tokens, block by block: `[2, batch, kv_heads, n, head_dim]`.

        Each is valid until the next one is asked for; the file is read for what is not hot.
        """
        spare = Slab(self._mover, self._pool.slab_bytes).seen_as(self.layout)
        for block, slab in enumerate(self._slabs):
            first, end = self._span(block)
            if slab is None:
                slab = spare
                with opened(self._file, self.layout, self._mover) as source:
                    source.fill([spare], self.block_tokens, first, end)
            yield slab.part(0, end - first)

    def reorder(self, indices: torch.Tensor) -> bool:
        """Reorder the sequences of the batch in place, if all is hot; else False."""
        if self._cold or len(indices) != self.layout.batch:
            return False
        for slab in self._slabs:
            assert slab is not None
            slab.kv.copy_(slab.kv[:, indices])
        # What a demotion wrote before is in the old order.
        self.stored = 0
        self._epoch = next(_epochs)
        return True

    def fill(self, kv: torch.Tensor) -> None:
        """Append K and V, `[2, batch, kv_heads, n, head_dim]`, without a forward."""
        self._append(kv)

    # Blocks

    def _span(self, block: int) -> tuple[int, int]:
        first = block * self.block_tokens
        return first, min(self.length, first + self.block_tokens)

    def _blocks_in(self, wanted: Ranges) -> list[int]:
        size = self.block_tokens
        blocks = spans.union((first // size, (end - 1) // size + 1) for first, end in wanted)
        return [block for first, end in blocks for block in range(first, end)]

    def _needed_blocks(self) -> list[int]:
        assert self._space is not None, "the layer is used without a forward that began"
        return self.lacking(spans.after(self._past, self._space.valid))

    def _content(self) -> object:
        """What stands in a workspace of this layer, apart from how many tokens."""
        past = self._past
        return self._epoch, past[:-1], past[-1][0] if past else 0

    def _extend_cold(self, tokens: int) -> None:
        fresh = -(-tokens // self.block_tokens) - len(self._slabs)
        with self._lock:
            self._ids = np.append(self._ids, self._pool.handles.add(fresh, State.COLD))
            self._slabs += [None] * fresh
            self._cold += fresh

    def _add_block(self) -> None:
        places = self._pool.take(1) or self.make_room()
        if not places:
            self._extend_cold((len(self._slabs) + 1) * self.block_tokens)
            return
        with self._lock:
            self._ids = np.append(self._ids, self._pool.handles.add(1, State.HOT, places[0]))
            self._slabs.append(self._pool.slab(places[0], self.layout))

    def _append(self, kv: torch.Tensor) -> None:
        count, done = kv.shape[3], 0
        while done < count:
            block, offset = divmod(self.length, self.block_tokens)
            if block == len(self._slabs):
                self._add_block()
            fitting = min(count - done, self.block_tokens - offset)
            part = kv if fitting == count else kv.narrow(3, done, fitting)
            slab = self._slabs[block]
            if slab is None:
                self._write_through(part)
            else:
                slab.put(offset, part)
            self.length += fitting
            done += fitting

    def _write_through(self, kv: torch.Tensor) -> None:
        """Straight to the file: there is no slab for them."""
        with self._lock:
            self.store()
            self.reach = max(self.reach, self.length + kv.shape[3])
            self._write([self._mover.rows_of(kv)])

    def _write(self, rows: list[memoryview]) -> None:
        """What follows what is stored."""
        nbytes = sum(map(len, rows))
        self._file.append(rows, self.stored * self.layout.row_bytes)
        self._counters.add(written_bytes=nbytes)
        self.stored += nbytes // self.layout.row_bytes

    def _parts(self, first: int, last: int) -> Iterator[tuple[Rows, int, int]]:
        """Tokens first..last-1, all hot, slab by slab."""
        for block in self._blocks_in([(first, last)]):
            start = block * self.block_tokens
            slab = self._slabs[block]
            assert slab is not None
            yield slab, max(first, start) - start, min(last - start, self.block_tokens)

    def _copy(self, which: int) -> torch.Tensor | None:
        if self._cold or not self.length:
            return None
        self._mover.join()
        parts = [slab.part(0, self._span(b)[1] - self._span(b)[0]) for b, slab in self._hot()]
        return torch.cat(parts, dim=-2)[which]

    def _hot(self) -> Iterator[tuple[int, Rows]]:
        return ((block, slab) for block, slab in enumerate(self._slabs) if slab is not None)

    # Putting a layer together

    def _show(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the forward attends to, after its own tokens `kv` were appended."""
        space = self._space
        assert space is not None, "the layer is used without a forward that began"
        heads = space.seen_as(self.layout)
        past = self._past
        seen = past[0][1] - past[0][0] if len(past) == 1 else spans.total(past)
        if space.valid < seen:
            self._gather(heads, space.valid)
        heads.put(seen, kv)
        space.valid = seen + kv.shape[3]
        keys, values = heads.part(0, space.valid).unbind(0)
        return keys, values

    def _gather(self, heads: Heads, valid: int) -> None:
        """Copy the hot blocks to their places; the others were fetched there."""
        for at, first, end in spans.placed(spans.after(self._past, valid)):
            for block in self._blocks_in([(first, end)]):
                slab = self._slabs[block]
                if slab is not None:
                    start = block * self.block_tokens
                    begin, stop = max(first, start), min(end, start + self.block_tokens)
                    place = valid + at + begin - first
                    heads.gather(place, slab, begin - start, stop - start)

    def _fetch(
        self, blocks: list[int], space: Workspace | None, offer: SessionOffer | None = None
    ) -> None:
        if not blocks:
            return
        began = time.perf_counter()
        places = self._pool.take(len(blocks))
        promoted, streamed = blocks[: len(places)], blocks[len(places) :]
        try:
            with opened(self._file, self.layout, self._mover, offer) as source:
                if promoted:
                    self._promote(promoted, places, source)
                    places = []
                if space is not None:
                    self._stream(streamed, space, source)
                fetched = len(promoted if space is None else blocks)
        finally:
            self._pool.give(places)
        self._counters.add(
            fetched_blocks=fetched,
            fetched_bytes_warm=source.moved.warm,
            fetched_bytes_mount=source.moved.mount,
            fetch_seconds=time.perf_counter() - began,
        )

    def _promote(self, blocks: list[int], places: list[int], source: LayerSource) -> None:
        left = iter([self._pool.slab(place, self.layout) for place in places])
        with self._pool.handles.migrating(self._ids[blocks]) as migration:
            filled = []
            for first, end in spans.runs(blocks):
                slabs = list(islice(left, end - first))
                source.fill(slabs, self.block_tokens, self._span(first)[0], self._span(end - 1)[1])
                filled.append((first, end, slabs))
            with self._lock:
                for first, end, slabs in filled:
                    self._slabs[first:end] = slabs
                self._cold -= len(blocks)
            migration.publish(State.HOT, np.array(places))

    def _stream(self, blocks: list[int], space: Workspace, source: LayerSource) -> None:
        """What the forward needs of these blocks, straight to where attention wants it."""
        heads = space.seen_as(self.layout)
        width = self.layout.row_bytes
        for run_first, run_end in spans.runs(blocks):
            from_token, to_token = self._span(run_first)[0], self._span(run_end - 1)[1]
            for place, first, end in spans.placed(self._past):
                begin, stop = max(first, from_token), min(end, to_token)
                if begin < stop:
                    at = place + begin - first
                    for rows in source.rows(begin, stop):
                        heads.put_rows(at, rows)
                        at += len(rows) // width

    def _require_rows(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        layout, shape = self.layout, keys.shape
        if not (
            shape[1] == layout.kv_heads
            and shape[0] == layout.batch
            and shape[3] == layout.head_dim
            and keys.dtype == values.dtype == layout.dtype
            and shape == values.shape
        ):
            raise ValueError(
                f"{self._file.path} holds {layout.batch} sequence(s) of {layout.kv_heads} KV heads "
                f"x {layout.head_dim} in {layout.dtype_name}; the model gave K {_said(keys)} "
                f"and V {_said(values)}"
            )


def _said(states: torch.Tensor) -> str:
    return f"{list(states.shape)} in {name_of(states.dtype)}"

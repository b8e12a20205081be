"""The KV cache of one agent conversation, kept in a directory of a KVFS mount."""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfs.tiers.handles import Ids
from kvfs.torch import ranges as spans
from kvfs.torch.counters import Counters
from kvfs.torch.errors import HotBudgetError
from kvfs.torch.files import ScratchFile
from kvfs.torch.fingerprint import Fingerprint, sliding_windows
from kvfs.torch.hot import WORKSPACES, HotPool, Workspace
from kvfs.torch.layer import KVFSLayer
from kvfs.torch.mounts import require_kvfs
from kvfs.torch.offers import SessionOffer
from kvfs.torch.ranges import Ranges
from kvfs.torch.session import Session
from kvfs.torch.summary import SummarySlot
from kvfs.torch.window import Window

# As many layers are brought in at once: a device wants several requests; where few cores copy,
# more would wait for each other.
_WORKERS = min(4, (os.cpu_count() or 1) + 1)
_log = logging.getLogger("kvfs.torch")
_TRIES = 10


@dataclass
class _Kept:
    """What the session was when a batch took the cache over."""

    layers: list[KVFSLayer]
    tokens: array[int]


class KVFSCache(Cache):
    """A `transformers.Cache` whose layers are files of a KVFS session.

    Exact: for the same forward calls, attention sees the numbers that `DynamicCache` would
    give it, however few of them are hot at a time; with `window` it sees some of them.
    Holds one sequence, on the model's device; a batch or beams go to files without a name, until
    `reset` or `rewind_to`. Not safe to use from several threads at once.

        with KVFSCache.open("/mnt/kv", "agent-7", model) as cache:
            model.generate(ids, cache=cache)
            cache.sync()
    """

    layers: list[KVFSLayer]  # type: ignore[assignment]

    def __init__(
        self,
        session: Session,
        model: PreTrainedModel,
        fingerprint: Fingerprint,
        pool: HotPool,
        window: Window | None,
    ) -> None:
        """For `open`, which checks what must hold before."""
        self.pool = pool
        self.counters = Counters()
        self._session = session
        self._fingerprint = fingerprint
        self._layout = fingerprint.row_layout()
        self._sliding = sliding_windows(model)
        self._window = window
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix=f"kvfs-{session.path.name}")
        self._tokens = session.tokens()
        del self._tokens[session.stored :]
        self._length = self._stored_tokens = session.stored
        self._incoming: array[int] = array("i")
        self._kept: _Kept | None = None
        self._fetches: list[Future[None] | None] = [None] * fingerprint.layers
        self._earlier: list[Future[None]] = []
        self._retirements: list[Future[None]] = []
        self._spaces: list[Workspace] = []
        self._held: Ids | None = None
        self._current = 0
        self._told = False
        super().__init__(
            layers=[
                KVFSLayer(
                    file, self._layout, pool, self.counters,
                    stored=session.stored, sliding_window=sliding,
                )
                for file, sliding in zip(session.layers, self._sliding, strict=True)
            ]
        )  # fmt: skip
        for layer in self.layers:
            layer.make_room = self._make_room
        self._hooks = _watch(model, self)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        name: str,
        model: PreTrainedModel,
        *,
        pool: HotPool | None = None,
        hot_bytes: int | None = None,
        window: int | None = None,
        sinks: int = 4,
        rank: int = 0,
        world: int = 1,
    ) -> KVFSCache:
        """Resume the session `name` in `directory`, or begin it.

        Hot memory comes from `pool`, which is on the model's device, or from one of the
        session's own, of `hot_bytes`.
        With `window`, only that many ended rounds, the one that runs, and the first `sinks`
        tokens are attended to. Of a model that is split over `world` ranks, each has a
        cache of its own in the same session.

        Until `close` the model reports its forward calls with this cache, so that the
        session knows its token ids.

        Raises:
            NotKVFSError: `directory` is not on a KVFS mount.
            SessionBusyError: the session is open elsewhere.
            FingerprintError: it holds the KV of another model.
            NotASessionError: there is a directory of that name with other content.
            HotBudgetError: the hot bytes are less than two layers of the session.
            ValueError: what is asked for cannot be; the message says why.
            OSError: as the filesystem reports it.
        """
        if not name or name.startswith(".") or "/" in name:
            raise ValueError(
                f"{name!r} cannot name a session: it is a file name without a dot first"
            )
        device = _device_of(model)
        if pool is not None and hot_bytes is not None:
            raise ValueError("give a pool or hot_bytes, not both: the pool has a budget")
        if pool is not None and pool.device != device:
            raise ValueError(
                f"the pool is on {pool.device} and the model on {device}: give the model a "
                f'HotPool(device="{device}")'
            )
        require_kvfs(directory)
        fingerprint = Fingerprint.of(model, rank, world)
        seen = None if window is None else _window(window, sinks, model)
        hot = HotPool(hot_bytes, device=device) if pool is None else pool
        session = Session(Path(directory) / name, fingerprint)
        try:
            cache = cls(session, model, fingerprint, hot, seen)
        except BaseException:
            session.close()
            raise
        try:
            hot.require(2 * cache._seen_bytes(0))
        except BaseException:
            cache.close()
            raise
        return cache

    @property
    def path(self) -> Path:
        """The session's directory."""
        return self._session.path

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens whose KV is in the cache; ValueError while it holds a batch."""
        self._require_session("tokens")
        return self._tokens.tolist()

    @property
    def rounds(self) -> list[int]:
        """Token count at the end of each round."""
        return self._session.rounds

    @property
    def resident_bytes(self) -> int:
        """Bytes of hot memory that hold KV of this session."""
        return sum(layer.hot_count for layer in self.layers) * self.pool.slab_bytes

    @property
    def summary(self) -> SummarySlot:
        """The small vectors that say what each round is about."""
        return SummarySlot(self.path)

    def end_round(self) -> None:
        """Note that one user request is answered here, and write what is not written.

        With a window: what leaves it is written and freed in the background.
        """
        self._require_session("end_round()")
        self._store()
        if self._length > max(self._session.rounds, default=0):
            self._session.end_round(self._length)
        if self._window is not None:
            self._window.recalled.clear()
            self._retire()

    def sync(self) -> None:
        """Write what is not written and make the session durable."""
        self._require_session("sync()")
        self._store()
        self._session.sync()

    def release(self) -> None:
        """Write what is not written and free the memory.

        The next use brings the layers back from the files. Tensors taken from the cache
        before must not be used any more.
        """
        self._store()
        self._drain()
        for layer in self.layers:
            layer.offload()
        self.pool.forgo(self)

    def demote_oldest_round(self) -> int:
        """Write and free the oldest round that is hot; the bytes freed, 0 if nothing is hot."""
        self._settle()
        hot = [layer.hot_blocks[0] * layer.block_tokens for layer in self.layers if layer.hot_count]
        if not hot:
            return 0
        end = next((end for end in self._round_ends() if end > min(hot)), self._length)
        return sum(layer.demote(layer.blocks_before(end)) for layer in self.layers)

    def load(self) -> None:
        """Have in hot memory when this returns what attention needs and the budget allows."""
        self.prefetch_all()
        for index in range(len(self.layers)):
            self._await(index)

    def prefetch_all(self) -> None:
        """Begin to bring in, in the background, what attention needs and the budget allows."""
        self._settle()
        self._press(0, self._seen_bytes(0))
        offer = None if self._kept is not None else self._session.offer()
        for index in range(len(self.layers)):
            self._prefetch(index, offer)

    def rewind_to(self, ids: torch.Tensor | Sequence[int]) -> int:
        """Crop to what the session has in common with the prompt `ids`, shape [n] or [1, n].

        At least one token of the prompt is left to compute. Returns the tokens kept. A
        batch that the cache holds is dropped: it goes on with the session.
        """
        prompt = _as_list(ids)
        self._leave_batch()
        common = _common_prefix(self._tokens, prompt)
        self._crop_to(min(common, len(prompt) - 1))
        return self._length

    def reopen(self) -> int:
        """Go on after the daemon died and its directory is mounted again.

        What the files lack is written again from hot memory at the next `sync`; from the
        first token on that is in neither, the session is cropped. Returns how many tokens
        that are.

        Raises:
            as `open` does; then it can be tried again.
        """
        self._leave_batch()
        self._break_off()
        rounds = self._session.rounds
        with suppress(OSError):
            self._session.close()
        require_kvfs(self.path.parent)
        self._session = session = Session(self.path, self._fingerprint)
        common = _common_prefix(session.tokens()[: session.stored], self._tokens)
        if common < session.stored:
            session.crop(common)
        files = zip(self.layers, session.layers, strict=True)
        kept = min(layer.reattach(file, common) for layer, file in files)
        lost = max(0, self._length - kept)
        self._length = min(self._length, kept)
        self._stored_tokens = min(common, self._length)
        self._cut()
        self._store()
        for end in rounds:
            if max(session.rounds, default=0) < end <= self._length:
                session.end_round(end)
        if lost:
            _log.warning(
                "session %s: %d tokens were neither in its files nor hot: it has %d now",
                self.path, lost, self._length,
            )  # fmt: skip
        return lost

    def close(self) -> None:
        """Write what is not written, free the memory, and let the session go.

        Lets it go even if an error is raised. Closing twice is harmless.
        """
        if not self._hooks:
            return
        try:
            self._leave_batch()
            self._store()
        finally:
            self._let_go()

    def __enter__(self) -> KVFSCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What is already on its way out says more than a close that fails after it.
        with suppress(OSError) if error is not None else nullcontext():
            self.close()

    # A window

    @property
    def left_out(self) -> Ranges:
        """The tokens that attention does not see, first and last + 1 each."""
        return [] if self._window is None else spans.without(self._attended(), self._length)

    def bring_back(self, number: int) -> None:
        """Attend to round `number`, from 0 on, again until this round ends.

        It is fetched in the background, or by the next forward.

        Raises:
            ValueError: there is no window, or no such round.
        """
        if self._window is None:
            raise ValueError(f"session {self.path} has no window: all its rounds are attended to")
        if not 0 <= number < len(self.rounds):
            raise ValueError(f"session {self.path} has {len(self.rounds)} rounds, not {number}")
        self._window.recalled.add(number)
        self.prefetch_all()

    # What transformers calls

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to layer `layer_idx`, and begin to fetch the next one."""
        layer = self.layers[layer_idx]
        awaited = self._length + len(self._incoming) if self._spaces else 0
        if layer.length + key_states.shape[-2] > awaited:
            raise RuntimeError(
                f"the model that computes layer {layer_idx} is not the one that {self.path} "
                f"was opened with, or the cache is closed: its token ids are not known"
            )
        self._current = layer_idx
        if not layer.has_begun:
            self._turn_of(layer_idx)
        if self._fetches[layer_idx] is not None:
            self._await(layer_idx)
        shown = layer.update(key_states, value_states)
        if layer_idx + 1 < len(self.layers):
            self._turn_of(layer_idx + 1)
        return shown

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache, those of a forward that has not ended not among them."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; ValueError if it is positive."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the tokens to remove, not {tokens_to_remove}")
        self._crop_to(self._length + tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens, and a batch that the cache holds."""
        self._leave_batch()
        self._crop_to(0)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Begin to fetch one layer, as far as the budget has room."""
        self._prefetch(layer_idx, None)

    def _prefetch(self, layer_idx: int, offer: SessionOffer | None) -> None:
        layer = self.layers[layer_idx]
        layer.attend_to(self._attended_or_all())
        wanted = layer.past
        if layer.lacking(wanted):
            self._submit(layer_idx, partial(layer.load, wanted, offer))

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Write what the file of one layer does not hold, and free its memory."""
        self._settle()
        self._await(layer_idx)
        self.layers[layer_idx].offload()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence i of the batch go on from what was sequence `beam_idx[i]`."""
        self._settle()
        if self._kept is None or not all(layer.reorder(beam_idx) for layer in self.layers):
            self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make each sequence `repeats` ones; the cache holds a batch from then on."""
        batch = self.layers[0].layout.batch
        self._select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`; the cache holds a batch from then on."""
        self._select(indices)

    # A forward call, seen from the model's hooks

    def _begin_forward(self, ids: torch.Tensor | None) -> None:
        """A forward with this cache starts; `ids` are its new tokens, shape [batch, n]."""
        self._settle()
        if ids is None:
            raise ValueError("a session stores its token ids: give input_ids, not inputs_embeds")
        if ids.shape[0] != self.layers[0].layout.batch:
            self._begin_batch(ids.shape[0])
        incoming = array("i", ids[0].tolist())
        if self._is_cold_and_fits():
            self.prefetch_all()
        self._reserve(len(incoming))
        needed = [layer.hot_ids() for layer in self.layers]
        self.counters.add(hot_hits=sum(map(len, needed)))
        if self._retirements:
            # What left the window is on its way out: if this forward wants it, it waits.
            self._held = np.concatenate(needed)
            self.pool.handles.hold(self._held)
        self._incoming = incoming
        self._turn_of(0)

    def _end_forward(self) -> None:
        """The forward ended well: its tokens belong to the session."""
        length = self._length + len(self._incoming)
        for index, layer in enumerate(self.layers):
            if layer.length != length:
                raise RuntimeError(
                    f"layer {index} has {layer.length} tokens after a forward to {length}: models "
                    f"in which a layer keeps no KV of its own are not supported"
                )
        self._tokens += self._incoming
        self._incoming = array("i")
        self._length = length
        self._leave_forward()
        if self._kept is None:
            self._store_tokens(min(layer.stored for layer in self.layers))

    def _break_off(self) -> None:
        """The forward did not end well."""
        self._drain()
        self._leave_forward()

    def _leave_forward(self) -> None:
        """Its memory may be moved again."""
        if self._held is not None:
            self._unhold(self._held)
            self._held = None
        for layer in self.layers:
            layer.end()
        self._spaces = []
        self.pool.rest(self)

    def _reserve(self, tokens: int) -> None:
        """Room for a forward of `tokens` tokens: workspaces, and slabs as far as they go."""
        nbytes = self._seen_bytes(tokens)
        slabs = self._press(tokens, nbytes)
        self._current = len(self.layers)
        wanted = slabs + self._slabs_of_spaces(nbytes)
        asked = 0
        while not self._spaces:
            spaces = self.pool.lend(self, nbytes, len(self.layers), slabs)
            if spaces is not None:
                self._spaces = spaces
            elif asked == 0:
                asked += 1
                self.pool.press(wanted)
            elif places := self._make_room() or self._make_room_at_any_price():
                self.pool.give(places)
            elif any(fetch is not None for fetch in self._fetches):
                # What is on its way has slabs that cannot be given back before it is there.
                self._drain()
            elif asked < _TRIES:
                # Another session that is being brought in was faster.
                asked += 1
                self.pool.press(wanted)
            else:
                raise HotBudgetError(
                    f"session {self.path} needs {2 * nbytes} hot bytes for two of its layers, and "
                    f"other sessions hold them: release one, or give the pool a larger budget"
                )
        self._tell_the_cost()

    def _seen_bytes(self, tokens: int) -> int:
        """What attention sees of a layer in a forward of `tokens` tokens, in bytes."""
        if self._window is not None:
            attended = self._attended_or_all()
            for layer in self.layers:
                layer.attend_to(attended)
        # Layers of one kind see the same.
        kinds = {layer.is_sliding: layer for layer in self.layers}
        seen = max(spans.total(layer.past) for layer in kinds.values()) + tokens
        return seen * self.layers[0].layout.row_bytes

    def _press(self, tokens: int, nbytes: int) -> int:
        """Ask for room: the slabs that `tokens` more tokens and what is not hot want, whose number
        is returned, and with them two workspaces of `nbytes`."""
        size = self.layers[0].block_tokens
        slabs = -(-(self._length + tokens) // size) - -(-self._length // size)
        slabs *= len(self.layers)
        slabs += sum(len(layer.lacking(layer.past)) for layer in self.layers if not layer.is_hot)
        if slabs:
            self.pool.press(slabs + self._slabs_of_spaces(nbytes))
        return slabs

    def _is_cold_and_fits(self) -> bool:
        """Whether so much is missing that all of it is better fetched at once than layer by layer,
        and there is room for it."""
        lacking = sum(len(layer.lacking(layer.past)) for layer in self.layers)
        spaces = self._slabs_of_spaces(self._seen_bytes(0))
        return len(self.layers) < lacking <= self.pool.free_slabs - spaces

    def _slabs_of_spaces(self, nbytes: int) -> int:
        """As many slabs as two workspaces of `nbytes` take."""
        return -(-WORKSPACES * nbytes // self.pool.slab_bytes)

    def _space_of(self, layer_idx: int) -> Workspace:
        """One of its own while there are enough; the last two serve the others in turn."""
        count = len(self._spaces)
        if layer_idx < count - 2 or count >= len(self.layers):
            return self._spaces[layer_idx]
        return self._spaces[count - 2 + layer_idx % 2]

    def _turn_of(self, layer_idx: int) -> None:
        """The layer will be used next: fetch what it lacks."""
        layer = self.layers[layer_idx]
        if layer.begin(self._space_of(layer_idx)):
            self._submit(layer_idx, layer.fetch)

    def _make_room(self) -> list[int]:
        """A slab of a layer that is not in use: of the one that has most, its oldest block.

        Blocks to which tokens are still added stay.
        """
        for layer in self._fullest_layers():
            block = layer.oldest_full_block
            if block is not None:
                return self._take_from(layer, block)
        return []

    def _make_room_at_any_price(self) -> list[int]:
        """As `_make_room`, and any block if there is no other."""
        for layer in self._fullest_layers():
            if layer.hot_count:
                return self._take_from(layer, layer.hot_blocks[0])
        return []

    def _fullest_layers(self) -> list[KVFSLayer]:
        in_use = (self._current, self._current + 1)
        others = [layer for index, layer in enumerate(self.layers) if index not in in_use]
        return sorted(others, key=lambda layer: layer.hot_count, reverse=True)

    def _take_from(self, layer: KVFSLayer, block: int) -> list[int]:
        self._let_go_of(layer.handle(block))
        layer.demote([block])
        return self.pool.take(1)

    def _let_go_of(self, handle: int) -> None:
        if self._held is not None and (mine := self._held == handle).any():
            self._unhold(self._held[mine])
            self._held = self._held[~mine]

    def _unhold(self, held: Ids) -> None:
        """Who waits for these blocks may have them: what this forward has queued is done."""
        self.pool.mover.settle()
        self.pool.handles.let_go(held)

    def _submit(self, layer_idx: int, fetch: Callable[[], None]) -> None:
        """Fetch in the background, after what is being fetched for that layer already."""
        before = self._fetches[layer_idx]
        self._earlier = [fetch for fetch in self._earlier if not fetch.done()]
        if before is not None:
            self._earlier.append(before)

        def run() -> None:
            if before is not None:
                # Given to the workers earlier, so one of them has it: this ends.
                before.result()
            fetch()

        self._fetches[layer_idx] = self._workers.submit(self.pool.mover.beside(run))

    def _await(self, layer_idx: int) -> None:
        """Until nothing is being fetched for this layer; raises what went wrong."""
        fetch, self._fetches[layer_idx] = self._fetches[layer_idx], None
        if fetch is not None:
            began = time.perf_counter()
            fetch.result()
            self.pool.mover.join()
            self.counters.add(wait_seconds=time.perf_counter() - began)

    def _drain(self) -> None:
        """Until nothing is done in the background; what failed there will fail again."""
        # The latest first: who waits for an earlier one is gone, or runs, when that is cancelled.
        fetches = [fetch for fetch in self._fetches if fetch is not None]
        fetches += reversed(self._earlier)
        wait([*(fetch for fetch in fetches if not fetch.cancel()), *self._retirements])
        self.pool.mover.join()
        self._fetches = [None] * len(self.layers)
        self._earlier = []
        self._retirements = []

    def _tell_the_cost(self) -> None:
        """Once, if the session does not fit: what a token will cost."""
        if self._told or all(layer.is_hot for layer in self.layers):
            return
        lacking = sum(len(layer.lacking(layer.past)) for layer in self.layers)
        beyond = lacking - self.pool.free_slabs
        if beyond <= 0:
            return
        self._told = True
        nbytes = beyond * self.pool.slab_bytes
        fetched = self.counters.fetched_bytes_warm + self.counters.fetched_bytes_mount
        rate = fetched / self.counters.fetch_seconds if fetched else None
        _log.warning(
            "session %s does not fit %d MB of hot memory: each forward reads %.1f MB%s",
            self.path, self.pool.budget_bytes >> 20, nbytes / 1e6,
            f", about {1e3 * nbytes / rate:.0f} ms" if rate else "",
        )  # fmt: skip

    def _settle(self) -> None:
        """Undo what a forward that did not end, or a cut that failed, has left behind."""
        if not self._hooks:
            raise ValueError(f"the cache of {self.path} is closed")
        self._incoming = array("i")
        if self._held is not None or self._spaces:
            self._break_off()
        length = self._length
        if any(layer.length != length or layer.reach > length for layer in self.layers):
            self._cut()

    def _crop_to(self, tokens: int) -> None:
        self._settle()
        if tokens < self._length:
            self._length = max(0, tokens)
            self._cut()

    def _cut(self) -> None:
        """Bring memory and files down to the length of the session."""
        self._drain()
        del self._tokens[self._length :]
        if self._kept is None:
            self._stored_tokens = min(self._stored_tokens, self._length)
        for layer in self.layers:
            layer.forget(self._length)
        # All files are cut before any is written again: a crash between must not leave
        # rows of the old tokens in one layer beside new ones in another.
        if any(layer.reach > self._length for layer in self.layers):
            if self._kept is None:
                self._session.crop(self._length)
            for layer in self.layers:
                layer.reach = min(layer.reach, self._length)

    def _store(self) -> None:
        self._settle()
        if self._kept is None:
            for layer in self.layers:
                layer.store()
            self._store_tokens(self._length)

    def _store_tokens(self, upto: int) -> None:
        if self._stored_tokens < upto:
            fresh = self._tokens[self._stored_tokens : upto]
            self._session.append_tokens(fresh, at=self._stored_tokens)
            self._stored_tokens = upto

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._break_off()
        for layer in self.layers:
            layer.forget(0)
        self.pool.forgo(self)
        self._workers.shutdown()
        self._session.close()

    # A window

    def _round_ends(self) -> list[int]:
        return self.rounds if self._kept is None else []

    def _attended(self) -> Ranges:
        assert self._window is not None
        return self._window.attended(self.rounds, self._length)

    def _attended_or_all(self) -> Ranges | None:
        return None if self._window is None or self._kept is not None else self._attended()

    def _retire(self) -> None:
        """Let go what the window has left behind, and say what attention loses."""
        attended = self._attended()
        self._retirements = [one for one in self._retirements if not one.done()]
        for layer in self.layers:
            leaving = layer.blocks_outside(attended)
            if leaving:
                retire = self.pool.mover.beside(partial(self._demote_later, layer, leaving))
                self._retirements.append(self._workers.submit(retire))
        if left_out := spans.without(attended, self._length):
            _log.warning(
                "session %s: attention leaves out tokens %s from now on; bring_back(round) lets "
                "it see a round again", self.path,
                ", ".join(f"{first}-{end - 1}" for first, end in left_out),
            )  # fmt: skip

    def _demote_later(self, layer: KVFSLayer, blocks: list[int]) -> None:
        try:
            layer.demote(blocks)
        except OSError as error:
            # Nothing is lost: they stay hot, and leave with the next round.
            _log.warning("session %s: blocks that leave cannot be written: %s", self.path, error)

    # Batches and beams

    def _require_session(self, what: str) -> None:
        if self._kept is not None:
            raise ValueError(
                f"{what}: the cache of {self.path} holds a batch, and a session is one sequence: "
                f"reset() or rewind_to() goes back to the session"
            )

    def _begin_batch(self, batch: int) -> None:
        if self._length:
            raise ValueError(
                f"{self.path} holds {self.layers[0].layout.batch} sequence(s), not {batch}: "
                f"batch_repeat_interleave() makes more of them"
            )
        self._take_over([self._scratch(index, batch) for index in range(len(self.layers))])

    def _select(self, indices: torch.Tensor) -> None:
        """Hold the sequences `indices` of what is held now."""
        self._store()
        self._drain()
        fresh = [self._scratch(index, len(indices)) for index in range(len(self.layers))]
        try:
            for layer, new in zip(self.layers, fresh, strict=True):
                for part in layer.rows_by_block():
                    new.fill(part[:, indices])
                layer.demote(layer.hot_blocks)
        except BaseException:
            _discard(fresh)
            raise
        self._take_over(fresh)

    def _scratch(self, index: int, batch: int) -> KVFSLayer:
        layer = KVFSLayer(
            ScratchFile(self.path, f"scratch of layer {index}"),
            self._layout.batched(batch), self.pool, self.counters,
            sliding_window=self._sliding[index], writes_full_slabs=False,
        )  # fmt: skip
        layer.make_room = self._make_room
        return layer

    def _take_over(self, scratch: list[KVFSLayer]) -> None:
        if self._kept is None:
            self._store()
            self._kept = _Kept(self.layers, array("i", self._tokens))
        else:
            _discard(self.layers)
        self.layers = scratch

    def _leave_batch(self) -> None:
        """Go back to the session, if the cache holds a batch."""
        if self._kept is None:
            return
        self._break_off()
        _discard(self.layers)
        self.layers, self._tokens = self._kept.layers, self._kept.tokens
        self._length = len(self._tokens)
        self._kept = None


def _discard(scratch: list[KVFSLayer]) -> None:
    for layer in scratch:
        layer.forget(0)
        layer.close()


def _device_of(model: PreTrainedModel) -> torch.device:
    """Where all its layers compute."""
    devices = {one.device for one in model.parameters() if not one.is_meta} or {model.device}
    if len(devices) > 1:
        raise ValueError(
            f"the model is spread over {', '.join(sorted(map(str, devices)))}: KVFSCache holds "
            f"KV on one device, so load it on one"
        )
    return devices.pop()


def _window(rounds: int, sinks: int, model: PreTrainedModel) -> Window:
    if rounds < 1 or sinks < 0:
        raise ValueError(f"a window of {rounds} rounds and {sinks} sinks: at least 1 and 0")
    if any(sliding_windows(model)):
        raise ValueError(
            f"{type(model).__name__} has a sliding window of its own: open it without window="
        )
    return Window(rounds, sinks)


def _watch(model: PreTrainedModel, cache: KVFSCache) -> list[RemovableHandle]:
    """Let the model report its forward calls with this cache."""

    def used_in(kwargs: dict[str, Any]) -> bool:
        return any(kwargs.get(name) is cache for name in ("cache", "past_key_values"))

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if used_in(kwargs):
            cache._begin_forward(kwargs.get("input_ids", args[0] if args else None))

    def after(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if used_in(kwargs):
            # Without an output it was broken off: what it leaves behind is undone when the
            # cache is used again, but others may have its memory now.
            if output is None:
                cache._break_off()
            else:
                cache._end_forward()

    # The decoder sees each call, whether it comes through a head, an adapter or directly.
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _as_list(ids: torch.Tensor | Sequence[int]) -> list[int]:
    if not isinstance(ids, torch.Tensor):
        return list(ids)
    if ids.dim() == 2 and ids.shape[0] != 1:
        raise ValueError(f"a KVFS session is one sequence, not a batch of {ids.shape[0]}")
    flat: list[int] = ids.flatten().tolist()
    return flat


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))

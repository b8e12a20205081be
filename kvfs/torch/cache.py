"""The KV cache of one agent conversation, kept in a directory of a KVFS mount."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfs.torch.counters import Counters
from kvfs.torch.fingerprint import Fingerprint
from kvfs.torch.hot import HotPool
from kvfs.torch.layer import KVFSLayer
from kvfs.torch.mounts import require_kvfs
from kvfs.torch.session import Session


class KVFSCache(Cache):
    """A `transformers.Cache` whose layers are files of a KVFS session.

    Exact: a layer in memory is the same numbers as in `DynamicCache`. Holds one sequence
    on the CPU. Not safe to use from several threads at once.

        with KVFSCache.open("/mnt/kv", "agent-7", model) as cache:
            model.generate(ids, cache=cache)
            cache.sync()
    """

    layers: list[KVFSLayer]  # type: ignore[assignment]

    def __init__(
        self, session: Session, model: PreTrainedModel, fingerprint: Fingerprint, pool: HotPool
    ) -> None:
        """For `open`, which checks what must hold before."""
        self._session = session
        self._model = model
        self._fingerprint = fingerprint
        self.pool = pool
        self.counters = Counters()
        self._charged = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"kvfs-{session.path.name}")
        self._tokens = session.tokens()
        self._length = self._stored_tokens = session.stored
        self._incoming: array[int] = array("i")
        layout = fingerprint.row_layout()
        super().__init__(
            layers=[
                KVFSLayer(file, layout, session.stored, self._reader) for file in session.layers
            ]
        )
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

        Until `close` the model reports its forward calls with this cache, so that the
        session knows its token ids.

        Raises:
            NotKVFSError: `directory` is not on a KVFS mount.
            SessionBusyError: the session is open elsewhere.
            FingerprintError: it holds the KV of another model.
            NotASessionError: there is a directory of that name with other content.
            ValueError: the name is not usable, or the model is not on the CPU.
            OSError: as the filesystem reports it.
        """
        if not name or name.startswith(".") or "/" in name:
            raise ValueError(
                f"{name!r} cannot name a session: it is a file name without a dot first"
            )
        if model.device.type != "cpu":
            raise ValueError(
                f"KVFSCache holds KV of models on the CPU; this one is on {model.device}"
            )
        if window is not None or world != 1:
            raise ValueError("window and world are not there yet")
        require_kvfs(directory)
        fingerprint = Fingerprint.of(model)
        session = Session(Path(directory) / name, fingerprint)
        try:
            return cls(session, model, fingerprint, pool or HotPool(hot_bytes))
        except BaseException:
            session.close()
            raise

    @property
    def path(self) -> Path:
        """The session's directory."""
        return self._session.path

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens whose KV is in the cache."""
        return self._tokens.tolist()

    @property
    def rounds(self) -> list[int]:
        """Token count at the end of each round."""
        return self._session.rounds

    def end_round(self) -> None:
        """Note that one user request is answered here, and write what is not written."""
        self._store()
        if self._length > max(self._session.rounds, default=0):
            self._session.end_round(self._length)

    def sync(self) -> None:
        """Write what is not written and make the session durable."""
        self._store()
        self._session.sync()

    @property
    def resident_bytes(self) -> int:
        """Hot bytes of this session."""
        row = self._fingerprint.row_layout().row_bytes
        return sum(layer.length * row for layer in self.layers if layer.keys is not None)

    def demote_oldest_round(self) -> int:
        """Write the oldest round that is hot to the files and free it; the bytes freed."""
        freed = self.resident_bytes
        self.release()
        return freed

    def prefetch_all(self) -> None:
        """Begin to bring everything in, in the background."""
        self._settle()
        for layer in self.layers:
            layer.prefetch()

    def reopen(self) -> None:
        """Go on after the daemon was started again."""
        with suppress(OSError):
            self._session.close()
        require_kvfs(self.path.parent)
        self._session = session = Session(self.path, self._fingerprint)
        self._tokens = session.tokens()
        self._length = self._stored_tokens = session.stored
        for layer, file in zip(self.layers, session.layers, strict=True):
            layer.discard()
            layer.reattach(file, session.stored)

    def release(self) -> None:
        """Write what is not written and free the memory.

        The next use brings the layers back from the files. Tensors taken from the cache
        before must not be used any more.
        """
        self._store()
        for layer in self.layers:
            layer.offload()
        self._charge()

    def load(self) -> None:
        """Have all layers in memory when this returns."""
        self._settle()
        for index, layer in enumerate(self.layers):
            self._prefetch_after(index)
            layer.load()
        self._charge()

    def rewind_to(self, ids: torch.Tensor | Sequence[int]) -> int:
        """Crop to what the session has in common with the prompt `ids`, shape [n] or [1, n].

        At least one token of the prompt is left to compute. Returns the tokens kept.
        """
        prompt = _as_list(ids)
        common = _common_prefix(self._tokens, prompt)
        self._crop_to(min(common, len(prompt) - 1))
        return self._length

    def close(self) -> None:
        """Write what is not written, free the memory, and let the session go.

        Lets it go even if an error is raised. Closing twice is harmless.
        """
        if not self._hooks:
            return
        try:
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

    # What transformers calls

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to layer `layer_idx` while the next one is being fetched."""
        layer = self.layers[layer_idx]
        if layer.length + key_states.shape[-2] > self._length + len(self._incoming):
            raise RuntimeError(
                f"the model that computes layer {layer_idx} is not the one that {self.path} "
                f"was opened with, or the cache is closed: its token ids are not known"
            )
        self._prefetch_after(layer_idx)
        return layer.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache, those of a forward that has not ended not among them."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; ValueError if it is positive."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the tokens to remove, not {tokens_to_remove}")
        self._crop_to(self._length + tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens."""
        self._crop_to(0)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Begin to fetch one layer."""
        self.layers[layer_idx].prefetch()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """ValueError: a session is one sequence."""
        raise _not_one_sequence("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """ValueError: a session is one sequence."""
        raise _not_one_sequence("a batch")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """ValueError: a session is one sequence."""
        raise _not_one_sequence("a batch")

    # A forward call, seen from the model's hooks

    def _begin_forward(self, ids: torch.Tensor | None) -> None:
        """A forward with this cache starts; `ids` are its new tokens, shape [1, n]."""
        self._settle()
        if ids is None:
            raise ValueError("a session stores its token ids: give input_ids, not inputs_embeds")
        if ids.shape[0] != 1:
            raise _not_one_sequence(f"a batch of {ids.shape[0]}")
        self._incoming = array("i", ids[0].tolist())

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
        self._store_tokens(min(layer.stored for layer in self.layers))
        self._charge()

    def _charge(self) -> None:
        now = self.resident_bytes
        self.pool.charge(now - self._charged)
        self._charged = now

    def _settle(self) -> None:
        """Undo what a forward that did not end, or a cut that failed, has left behind."""
        if not self._hooks:
            raise ValueError(f"the cache of {self.path} is closed")
        self._incoming = array("i")
        if any(layer.length != self._length or layer.reach > self._length for layer in self.layers):
            self._cut()

    def _crop_to(self, tokens: int) -> None:
        self._settle()
        if tokens < self._length:
            self._length = max(0, tokens)
            self._cut()

    def _cut(self) -> None:
        """Bring memory and files down to the length of the session."""
        del self._tokens[self._length :]
        self._stored_tokens = min(self._stored_tokens, self._length)
        for layer in self.layers:
            layer.forget(self._length)
        # All files are cut before any is written again: a crash between must not leave
        # rows of the old tokens in one layer beside new ones in another.
        if any(layer.reach > self._length for layer in self.layers):
            self._session.crop(self._length)
            for layer in self.layers:
                layer.reach = min(layer.reach, self._length)

    def _store(self) -> None:
        self._settle()
        for layer in self.layers:
            layer.store()
        self._store_tokens(self._length)

    def _store_tokens(self, upto: int) -> None:
        if self._stored_tokens < upto:
            fresh = self._tokens[self._stored_tokens : upto]
            self._session.append_tokens(fresh, at=self._stored_tokens)
            self._stored_tokens = upto

    def _prefetch_after(self, layer_idx: int) -> None:
        if layer_idx + 1 < len(self.layers):
            self.layers[layer_idx + 1].prefetch()

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for layer in self.layers:
            layer.discard()
        self._charge()
        self._reader.shutdown()
        self._session.close()


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
            cache._end_forward()

    # The decoder sees each call, whether it comes through a head, an adapter or directly.
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, with_kwargs=True),
    ]


def _not_one_sequence(what: str) -> ValueError:
    return ValueError(f"a KVFS session is one sequence, not {what}: open one session a sequence")


def _as_list(ids: torch.Tensor | Sequence[int]) -> list[int]:
    if not isinstance(ids, torch.Tensor):
        return list(ids)
    if ids.dim() == 2 and ids.shape[0] != 1:
        raise _not_one_sequence(f"a batch of {ids.shape[0]}")
    flat: list[int] = ids.flatten().tolist()
    return flat


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))

"""The scheduler's half: which tokens of a request are stored, what to load and what to save."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from cachetools import LRUCache

from kvfs.torch.errors import NotKVFSError
from kvfs.vllm.chains import TOKEN_BYTES, packed
from kvfs.vllm.library import Library
from kvfs.vllm.place import Place
from kvfs.vllm.plan import Load, Plan, Save
from kvfs.vllm.shape import Shape

_logger = logging.getLogger(__name__)
_LIBRARIES = 1024
_NAME_BYTES = 200
_ADDED_TO_ID = re.compile(r"-[0-9a-f]{8}$")  # by the engine, so that ids are unique


class Request(Protocol):
    """What is used of vLLM's."""

    request_id: str
    session_id: str | None
    kv_transfer_params: dict[str, Any] | None
    cache_salt: str | None
    prompt_embeds: Any
    lora_request: Any
    mm_features: Sequence[Any]
    pooling_params: Any

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Of the prompt, and those sampled so far."""


@dataclass(frozen=True)
class _Match:
    """A request's first `tokens` tokens lie in these sessions, one for each rank; the engine has
    `computed` of them itself."""

    sessions: tuple[str, ...]
    tokens: int
    computed: int


@dataclass
class _Followed:
    """A request that runs: blocks up to `saved` are stored, or on their way."""

    request: Request
    folder: str
    saved: int = 0
    is_announced: bool = False
    to_load: tuple[_Match, int] | None = None


class Planner:
    """Follows the engine's requests. With `is_by_request` each conversation has a folder of its
    own, and hits nothing outside it."""

    def __init__(self, place: Place, shapes: Sequence[Shape], *, is_by_request: bool) -> None:
        """`shapes` of all ranks."""
        self._place = place
        self._shapes = shapes
        self._block = shapes[0].block
        self._is_by_request = is_by_request
        self._libraries: LRUCache[str, list[Library]] = LRUCache(_LIBRARIES)
        self._matches: dict[str, _Match] = {}
        self._requests: dict[str, _Followed] = {}
        self._ended: list[str] = []
        self._failures = 0

    def matched(self, request: Request, computed: int) -> int:
        """How many tokens can be loaded behind those `computed`; the last token of a request is
        always computed, since its logits are wanted."""
        before = self._matches.pop(request.request_id, None)
        folder = self._folder(request)
        if folder is None:
            return 0
        tokens = packed(request.all_token_ids[:])
        try:
            found = [library.longest(tokens) for library in self._of(folder)]
        except (OSError, NotKVFSError) as error:
            _logger.warning("nothing is loaded for request %s: %s", request.request_id, error)
            return 0
        there = [one for one in found if one is not None]
        if len(there) < len(found):
            return 0
        match = _Match(tuple(one.name for one in there), min(one.tokens for one in there), computed)
        self._matches[request.request_id] = match
        loadable = min(match.tokens, self._shapes[0].whole(len(tokens) // TOKEN_BYTES - 1))
        if loadable > computed and (before is None or before.sessions != match.sessions):
            for library, session in zip(self._of(folder), match.sessions, strict=True):
                library.bring_in(session)
        return max(0, loadable - computed)

    def allocated(self, request: Request, external: int) -> None:
        """The request is about to run, `external` tokens of the match are to be loaded."""
        match = self._matches.pop(request.request_id, None)
        followed = self._requests.get(request.request_id)
        if followed is None:
            folder = self._folder(request)
            if folder is None:
                return
            followed = _Followed(request, folder, match.tokens // self._block if match else 0)
            self._requests[request.request_id] = followed
        if match is not None and external:
            followed.to_load = match, external

    def plan(
        self,
        computed: Mapping[str, int],
        pages: Callable[[str], list[int]],
        ended: Iterable[str],
    ) -> Plan:
        """Of a step: `computed` tokens of each request will have KV at its end, in these pages."""
        plan = Plan(ended=[*self._ended, *ended], failures=self._failures)
        self._ended = []
        for name in plan.ended:
            self._matches.pop(name, None)
        for name, upto in computed.items():
            if followed := self._requests.get(name):
                if followed.to_load:
                    plan.loads.append(self._load(followed, pages(name)))
                if save := self._save(followed, upto, pages):
                    plan.saves.append(save)
        return plan

    def finished(self, request: Request) -> None:
        """It is no longer followed."""
        self._matches.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)

    def failed(self) -> None:
        """A step's loads failed: what was planned to be saved since was not. The workers have put
        the sessions out of sight."""
        self._failures += 1
        for name, followed in self._requests.items():
            self._ended.append(name)
            followed.saved, followed.is_announced = 0, False

    def _load(self, followed: _Followed, pages: list[int]) -> Load:
        assert followed.to_load is not None
        match, external = followed.to_load
        followed.to_load = None
        first, end = match.computed // self._block, (match.computed + external) // self._block
        return Load(
            request=followed.request.request_id,
            folder=followed.folder,
            sessions=match.sessions,
            tokens=packed(followed.request.all_token_ids[: end * self._block]),
            first=first,
            pages=pages[first:end],
        )

    def _save(
        self, followed: _Followed, upto: int, pages: Callable[[str], list[int]]
    ) -> Save | None:
        # A token that is not known yet was drafted, or is still being sampled.
        end = min(upto, len(followed.request.all_token_ids)) // self._block
        first = followed.saved
        if end <= first:
            return None
        begin = first * self._block if followed.is_announced else 0
        followed.saved, followed.is_announced = end, True
        return Save(
            request=followed.request.request_id,
            folder=followed.folder,
            first=first,
            tokens=packed(followed.request.all_token_ids[begin : end * self._block]),
            pages=pages(followed.request.request_id)[first:end],
        )

    def _of(self, folder: str) -> list[Library]:
        if folder not in self._libraries:
            self._libraries[folder] = [
                Library(self._place.of(shape) / folder, shape) for shape in self._shapes
            ]
        return self._libraries[folder]

    def _folder(self, request: Request) -> str | None:
        """Where its sessions are. None if tokens alone do not say what its KV is."""
        if (
            request.prompt_embeds is not None
            or request.lora_request is not None
            or request.mm_features
            or request.pooling_params is not None
        ):
            return None
        parts = []
        if self._is_by_request:
            told = (request.kv_transfer_params or {}).get("session") or request.session_id
            parts.append(_file_name(told or _ADDED_TO_ID.sub("", request.request_id)))
        if request.cache_salt:
            parts.append(f"salt-{_digest(request.cache_salt)}")
        return "/".join(parts)


def _file_name(told: Any) -> str:
    """One name in a directory for any string."""
    name = quote(str(told), safe="")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    return name if len(name) <= _NAME_BYTES else _digest(name)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

"""An engine of vLLM's kind without a model: blocks, steps, and KV that follows from the tokens."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvfs.torch.fingerprint import Fingerprint
from kvfs.vllm.place import Place
from kvfs.vllm.plan import Plan
from kvfs.vllm.scheduling import Planner
from kvfs.vllm.settings import Settings
from kvfs.vllm.shape import Shape
from kvfs.vllm.worker import Worker

LAYERS, HEADS, DIM, BLOCK, PAGES = 3, 2, 4, 4, 64


def fingerprint(**changes: Any) -> Fingerprint:
    fields: dict[str, Any] = {
        "model": "toy", "type": "llama", "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM,
        "dtype": "float32", "rope": {}, "weights": "1",
    }  # fmt: skip
    return Fingerprint(**{**fields, **changes})


def turned(key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: Any) -> None:
    """A kernel that keeps K turned: a page is `[kv_head][K: dim, token; V: token, dim]`."""
    count, heads, block, _ = pages.shape
    each = pages.view(count, heads, 2, -1)
    k, v = each[:, :, 0].view(count, heads, -1, block), each[:, :, 1].view(count, heads, block, -1)
    for token, slot in enumerate(slots.tolist()):
        k[slot // block, :, :, slot % block] = key[token]
        v[slot // block, :, slot % block] = value[token]


def read(pages: torch.Tensor, slot: int) -> torch.Tensor:
    """What that kernel has written: `[2, kv_head, head_dim]`."""
    count, heads, block, _ = pages.shape
    each = pages.view(count, heads, 2, -1)
    k, v = each[:, :, 0].view(count, heads, -1, block), each[:, :, 1].view(count, heads, block, -1)
    return torch.stack([k[slot // block, :, :, slot % block], v[slot // block, :, slot % block]])


def kv(token: int, layer: int, before: torch.Tensor) -> torch.Tensor:
    """K and V of a token. They follow from what the pages hold of the token before: what is
    computed from wrong ones is wrong, too."""
    told = f"{token} {layer} {before.tolist()}".encode()
    seed = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
    numbers = np.random.default_rng(seed).standard_normal((2, HEADS, DIM), np.float32)
    return torch.from_numpy(numbers).to(before.dtype)


@dataclass
class Asked:
    """As much of vLLM's Request as the planner uses."""

    request_id: str
    all_token_ids: list[int]
    session_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    pooling_params: Any = None


@dataclass
class Answer:
    """`hits` tokens were loaded; `failed` if what was loaded had to be computed again."""

    hits: int
    failed: bool = False


class Agreement:
    """Of ranks in threads of their own."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._failed: list[bool] = []

    def __call__(self, has_failed: bool) -> bool:
        self._failed.append(has_failed)
        self._barrier.wait()
        failed = any(self._failed)
        if self._barrier.wait() == 0:
            self._failed.clear()
        self._barrier.wait()
        return failed


class Rank:
    """A worker and its memory."""

    def __init__(self, place: Place, shape: Shape, agreement: Agreement) -> None:
        self._shape = shape
        self.worker = Worker(
            place, shape, Settings(Path(), "prompt", sync=False, staging_mib=0), agreement
        )
        self.caches = {
            f"layer.{layer}": torch.zeros(PAGES, HEADS, BLOCK, 2 * DIM, dtype=shape.row.dtype)
            for layer in range(LAYERS)
        }
        self.worker.use(self.caches, turned)

    def step(self, plan: Plan, tokens: Sequence[int], pages: list[int], first: int) -> set[int]:
        """The pages that could not be loaded."""
        self.worker.start(plan)
        for name in self.caches:
            self.worker.wait(name)
        self.compute(tokens, pages, first)
        self.worker.save(plan)
        return self.worker.take_errors()

    def compute(self, tokens: Sequence[int], pages: list[int], first: int) -> None:
        slots = [pages[at // BLOCK] * BLOCK + at % BLOCK for at in range(len(tokens))]
        for layer, cache in enumerate(self.caches.values()):
            number = layer + LAYERS * self._shape.fingerprint.rank
            nothing = torch.zeros(2, HEADS, DIM, dtype=cache.dtype)
            for at in range(first, len(tokens)):
                row = kv(tokens[at], number, read(cache, slots[at - 1]) if at else nothing)
                turned(row[:1], row[1:], cache, torch.tensor(slots[at : at + 1]))

    def check(self, tokens: Sequence[int], pages: list[int]) -> None:
        """AssertionError if the pages hold anything else than the KV of these tokens."""
        before = [cache.clone() for cache in self.caches.values()]
        self.compute(tokens, pages, 0)
        assert all(map(torch.equal, before, self.caches.values()))


class Engine:
    """All its KV is forgotten with each request."""

    def __init__(
        self, path: Path, like: Fingerprint | None = None, by_request: bool = False
    ) -> None:
        like = like or fingerprint()
        shapes = [Shape(replace(like, rank=rank), BLOCK) for rank in range(like.ranks)]
        place, agreement = Place(path), Agreement(like.ranks)
        self.planner = Planner(place, shapes, is_by_request=by_request)
        self._ranks = [Rank(place, shape, agreement) for shape in shapes]
        self._threads = ThreadPoolExecutor(len(shapes))
        self._asked = 0

    def answer(
        self, tokens: Sequence[int], chunk: int = 64, *, is_last_told: bool = True, **about: Any
    ) -> Answer:
        """Compute the KV of these tokens, as many in a step as `chunk`; AssertionError if
        the pages hold anything else at the end. That the request ended is told by a next step."""
        self._asked += 1
        request = Asked(f"{self._asked}-{self._asked:08x}", list(tokens), **about)
        pages = [int(page) for page in np.random.default_rng(self._asked).permutation(PAGES)]
        hits = self.planner.matched(request, 0)
        self.planner.allocated(request, hits)
        done, answer = hits, Answer(hits)
        while done < len(tokens):
            end = min(done + chunk, len(tokens))
            plan = self.planner.plan({request.request_id: end}, lambda _: pages, [])
            step = partial(Rank.step, plan=plan, tokens=tokens[:end], pages=pages, first=done)
            errors = set[int]().union(*self._threads.map(step, self._ranks))
            done = end
            if errors:
                self.planner.failed()
                answer.failed = True
                done = min(pages.index(page) for page in errors) * BLOCK
        for rank in self._ranks:
            rank.check(tokens, pages)
        self.planner.finished(request)
        if not is_last_told:
            return answer
        plan = self.planner.plan({}, lambda _: [], [request.request_id])
        for rank in self._ranks:
            rank.worker.save(plan)
            rank.worker.flush()
        return answer

    def close(self) -> None:
        self._threads.shutdown()
        for rank in self._ranks:
            rank.worker.close()

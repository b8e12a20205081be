"""A recorded workload against the tiers: where its requests would have found their KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvfs.tiers.gittins import GittinsPolicy
from kvfs.tiers.replay import Replay, Trace
from mount_tools.plan.ledger import Tiers
from mount_tools.plan.model import Model
from mount_tools.traces import BLOCK_TOKENS

_DAY_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens are in whole blocks of 512. `kept_tokens` are unique: what has to be kept so that
    nothing is computed twice. Shares of the tokens asked for, by the fastest tier that holds
    them; None for a tier whose size is not known. `saved_s` is prefill that was not done, less
    the reading, over the whole trace."""

    requests: int
    hours: float
    asked_tokens: int
    kept_tokens: int
    tokens_a_day: float
    prompt_p50: int
    prompt_p90: int
    prompt_p99: int
    hot_share: float | None
    warm_share: float | None
    cold_share: float | None
    computed_share: float | None
    saved_s: float | None

    @property
    def reused_share(self) -> float:
        """The most that any memory could spare: blocks that were asked for before."""
        return 1 - self.kept_tokens / self.asked_tokens


def measure(
    trace: Trace,
    model: Model,
    tiers: Tiers,
    tokens_a_second: float | None,
    on_request: Callable[[], None] = lambda: None,
) -> Workload:
    """The default policy in each tier, as if tiers held what those above them hold: a request's
    KV is hot if it is among the blocks that hot memory alone would hold, and so on."""
    lengths = np.array([len(request) for request in trace.requests]) * BLOCK_TOKENS
    asked, kept = int(lengths.sum()), trace.blocks * BLOCK_TOKENS
    seconds = max(1.0, trace.times_s[-1] - trace.times_s[0])
    hits = _hit_ratios(trace, model, tiers, on_request)
    hot, warm, cold = (hits.get(name) for name in ("hot", "warm", "cold"))
    return Workload(
        requests=len(trace.requests),
        hours=seconds / 3600,
        asked_tokens=asked,
        kept_tokens=kept,
        tokens_a_day=kept / seconds * _DAY_SECONDS,
        prompt_p50=int(np.percentile(lengths, 50)),
        prompt_p90=int(np.percentile(lengths, 90)),
        prompt_p99=int(np.percentile(lengths, 99)),
        hot_share=hot,
        warm_share=None if warm is None else warm - (hot or 0.0),
        cold_share=None if cold is None else cold - (warm or hot or 0.0),
        computed_share=None if cold is None else 1 - cold,
        saved_s=_saved(asked, hot, warm, cold, model, tiers, tokens_a_second),
    )


def _hit_ratios(
    trace: Trace, model: Model, tiers: Tiers, on_request: Callable[[], None]
) -> dict[str, float]:
    """Of the blocks that are asked for, by the tier that holds them or one above it."""
    found: dict[str, float] = {}
    block_bytes = model.bytes_a_token * BLOCK_TOKENS
    below = 0.0
    for name, size in (
        ("hot", tiers.hot),
        ("warm", tiers.warm),
        ("cold", None if tiers.cold is None else tiers.cold * tiers.ratio),
    ):
        if size is None:
            continue
        capacity = int(size / block_bytes)
        ratio = 0.0
        if capacity >= trace.blocks:
            ratio = 1 - trace.blocks / trace.accesses
        elif capacity:
            ratio = Replay(trace, GittinsPolicy(), capacity).hit_ratio(on_request)
        below = found[name] = max(below, ratio)
    return found


def _saved(
    asked: int,
    hot: float | None,
    warm: float | None,
    cold: float | None,
    model: Model,
    tiers: Tiers,
    tokens_a_second: float | None,
) -> float | None:
    if cold is None or not tokens_a_second or not tiers.cold_speed or not tiers.warm_speed:
        return None
    from_warm = (warm or 0.0) - (hot or 0.0)
    from_cold = cold - (warm or hot or 0.0)
    size = asked * model.bytes_a_token
    reading = size * (from_warm / tiers.warm_speed + from_cold / tiers.ratio / tiers.cold_speed)
    return asked * cold / tokens_a_second - reading

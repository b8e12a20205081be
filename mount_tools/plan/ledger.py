"""The arithmetic: what fits where, how long it takes, how long it lasts. No machine is asked."""

from __future__ import annotations

from dataclasses import dataclass

from mount_tools.plan.model import Model

WORKSPACES = 2
"""Layers that a forward needs in one piece besides all that is hot (docs/adapter.md)."""
FULL_SHARE = 1.0
RECLAIM_SHARE = 0.7
"""From here on what was unused for the time to live goes (docs/operations.md, Reclaim)."""
_DAYS_A_YEAR = 365


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes for KV in each tier, and how fast it comes from there in bytes a second. None where
    nobody knows. `ratio`: how many bytes of KV one byte of the ring holds."""

    hot: int | None
    warm: int | None
    cold: int | None
    warm_speed: float | None
    cold_speed: float | None
    ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One session of so many tokens, and how many of these fit. Times in seconds; None where a
    tier, its speed, or the rate of prefill is not known."""

    tokens: int
    stored_bytes: int
    needed_bytes: int
    fit_hot: int | None
    fit_warm: int | None
    fit_cold: int | None
    resume_warm_s: float | None
    resume_cold_s: float | None
    recompute_s: float | None

    @property
    def gain(self) -> float | None:
        """How many times faster a cold resume is than computing the prompt again."""
        if self.recompute_s is None or not self.resume_cold_s:
            return None
        return self.recompute_s / self.resume_cold_s


def plan_session(
    model: Model, tokens: int, tiers: Tiers, tokens_a_second: float | None
) -> SessionPlan:
    """Resuming reads what attention needs; keeping takes what is stored. `tokens_a_second` is the
    rate of prefill."""
    stored, needed = model.stored_bytes(tokens), model.needed_bytes(tokens)
    return SessionPlan(
        tokens=tokens,
        stored_bytes=stored,
        needed_bytes=needed,
        fit_hot=_fit_hot(model, tokens, tiers.hot),
        fit_warm=None if tiers.warm is None else tiers.warm // max(1, stored),
        fit_cold=None if tiers.cold is None else int(tiers.cold * tiers.ratio) // max(1, stored),
        resume_warm_s=None if not tiers.warm_speed else needed / tiers.warm_speed,
        resume_cold_s=None if not tiers.cold_speed else needed / tiers.ratio / tiers.cold_speed,
        recompute_s=None if not tokens_a_second else tokens / tokens_a_second,
    )


def _fit_hot(model: Model, tokens: int, hot: int | None) -> int | None:
    if hot is None:
        return None
    largest = max(layer.elements for layer in model.layers)
    total = sum(layer.elements for layer in model.layers)
    workspaces = WORKSPACES * round(model.bytes_a_token * tokens * largest / total)
    return max(0, hot - workspaces) // max(1, model.needed_bytes(tokens))


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a load does to the ring and its SSD. `device_bytes_a_year` has the write amplification
    in it; `years` is how long the SSD lasts by its rating, None without one."""

    kv_bytes_a_day: float
    stored_bytes_a_day: float
    days_until_expiry: float | None
    days_until_reclaim: float | None
    device_bytes_a_year: float
    years: float | None


def endure(
    model: Model,
    tiers: Tiers,
    tokens_a_day: float,
    write_amplification: float,
    rated_bytes: float | None,
) -> Endurance:
    """Days that an empty ring takes what is written, nothing being removed: until sessions that
    outlived their time to live go (70 % in use), and until reclaim takes what is least worth
    keeping. `rated_bytes` is the SSD's TBW: the bytes that its maker lets a host write (JEDEC
    JESD218: endurance rating)."""
    kv = model.bytes_a_token * tokens_a_day
    stored = kv / tiers.ratio
    a_year = stored * write_amplification * _DAYS_A_YEAR

    def days(share: float) -> float | None:
        return tiers.cold * share / stored if tiers.cold is not None and stored else None

    return Endurance(
        kv_bytes_a_day=kv,
        stored_bytes_a_day=stored,
        days_until_expiry=days(RECLAIM_SHARE),
        days_until_reclaim=days(FULL_SHARE),
        device_bytes_a_year=a_year,
        years=rated_bytes / a_year if rated_bytes and a_year else None,
    )

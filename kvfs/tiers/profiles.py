"""Profiles: how the tiers behave for a kind of work, as files that a user can change."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from kvfs.tiers.policies import DEFAULT_POLICY, POLICIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAMES = ("gov", "ecommerce", "iot")
_DIRECTORY = resources.files("kvfs.tiers") / "profiles"
_HOUR = 3600
_WEEK = 7 * 24 * _HOUR


class ProfileError(ValueError):
    """A profile cannot be used; the message says in one line which key of which file, and
    what it may be."""


def _between(least: int, most: int, default: float) -> Any:
    return field(default=default, metadata={"range": (least, most)})


@dataclass(frozen=True, slots=True)
class Profile:
    """Without a file the defaults hold.

    Hot: a window holds `hot_rounds` rounds, or `hot_tokens` tokens where only these are
    counted (0: no such window), and of `hot_summary_rounds` before it the summary; a session
    goes to warm after `hot_idle_seconds`. Warm: at a fill of
    `warm_fill_pct` percent a group of `warm_group` sessions goes down; a session that is idle
    for `warm_idle_seconds`, and not expected soon, too. Its files lie in `shards` directories
    by "session" or "device_id". `policy` says what goes first. Cold: a checkpoint each
    `checkpoint_seconds`; sessions unused for `ttl_seconds` may go when the device is filling up.
    """

    name: str = "default"
    hot_rounds: int = _between(0, 10_000, 3)
    hot_tokens: int = _between(0, 1_000_000, 0)
    hot_summary_rounds: int = _between(0, 10_000, 0)
    hot_idle_seconds: float = _between(1, 24 * _HOUR, 20.0)
    warm_fill_pct: int = _between(10, 99, 85)
    warm_group: int = _between(1, 1000, 10)
    warm_idle_seconds: float = _between(1, _WEEK, 300.0)
    shards: int = _between(1, 2**24, 65_536)
    shard_by: str = field(default="session", metadata={"choices": ("session", "device_id")})
    checkpoint_seconds: float = _between(1, 24 * _HOUR, 300.0)
    policy: str = field(default=DEFAULT_POLICY, metadata={"choices": tuple(POLICIES)})
    ttl_seconds: int = _between(_HOUR, 10 * 52 * _WEEK, _WEEK)


def load(chosen: str) -> Profile:
    """The profile of that name, or in that file. Raises ProfileError."""
    return _parse(text_of(chosen), chosen)


def text_of(chosen: str) -> str:
    """The file itself, comments and all. Raises ProfileError."""
    path = _DIRECTORY / f"{chosen}.toml" if chosen in NAMES else Path(chosen)
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ProfileError(
            f"profile {chosen}: there is no such file, and the profiles by name are "
            f"{', '.join(NAMES)}"
        ) from None
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8 text"
        raise ProfileError(f"profile {chosen}: {reason}") from None


def _parse(text: str, file: str) -> Profile:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise ProfileError(f"profile {file}: {fault}") from None
    known = {each.name: each for each in fields(Profile)}
    for key in values:
        if key not in known:
            raise ProfileError(f"profile {file}: {key} is not known; known are {', '.join(known)}")
    values.setdefault("name", Path(file).stem)
    return Profile(**{key: _checked(file, key, known[key], values[key]) for key in values})


def _checked(file: str, key: str, known: Any, value: Any) -> Any:
    choices = known.metadata.get("choices")
    limits = known.metadata.get("range")
    if choices and value not in choices:
        wanted = " or ".join(map(repr, choices))
    elif known.type == "str" and not (isinstance(value, str) and value):
        wanted = "a text"
    elif limits and not _fits(value, known.type, *limits):
        what = "a whole number" if known.type == "int" else "a number"
        wanted = f"{what} from {limits[0]} to {limits[1]}"
    else:
        return float(value) if known.type == "float" else value
    raise ProfileError(f"profile {file}: {key} = {value!r} must be {wanted}")


def _fits(value: Any, type_name: str, least: int, most: int) -> bool:
    # True is an int, and no number that anyone means.
    allowed = (int,) if type_name == "int" else (int, float)
    return type(value) in allowed and least <= value <= most

"""The engines that can be driven on a machine without a GPU."""

from __future__ import annotations

from scripts.engines.engine import Engine
from scripts.engines.environments import LMCACHE

ENGINES = (Engine("lmcache-fs_native", LMCACHE, "lmcache_native"),)


def named(name: str) -> Engine:
    """Raises KeyError with the names that there are."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    names = ", ".join(engine.name for engine in ENGINES)
    raise KeyError(f"there is no engine {name!r}; there are {names}")

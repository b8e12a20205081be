"""The engines that can be driven on a machine without a GPU."""

from __future__ import annotations

from scripts.engines.engine import Engine
from scripts.engines.environments import LMCACHE, MOONCAKE

ENGINES = (
    Engine("lmcache-disk", LMCACHE, "lmcache_disk", finds_again=False),
    Engine("lmcache-fs", LMCACHE, "lmcache_l2", ("fs",)),
    Engine("lmcache-fs_native", LMCACHE, "lmcache_l2", ("fs_native",)),
    Engine("lmcache-bench-l2", LMCACHE, "lmcache_bench", ("fs_native",), many_small=True),
    Engine("mooncake-file", MOONCAKE, "mooncake_files", ("file_per_key",)),
    Engine("mooncake-bucket", MOONCAKE, "mooncake_files", ("bucket",)),
)


def named(name: str) -> Engine:
    """Raises KeyError with the names that there are."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    names = ", ".join(engine.name for engine in ENGINES)
    raise KeyError(f"there is no engine {name!r}; there are {names}")

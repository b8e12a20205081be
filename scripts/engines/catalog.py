"""The engines that can be driven on a machine without a GPU."""

from __future__ import annotations

from scripts.engines.engine import Engine
from scripts.engines.environments import LLAMA, LLAMA_SERVER, LMCACHE, MOONCAKE, VLLM

_VLLM_EXAMPLE = Engine("vllm-example", VLLM, "vllm_example", is_slow_to_start=True)

ENGINES = (
    Engine("lmcache-disk", LMCACHE, "lmcache_disk", finds_again=False, is_pool=True),
    Engine("lmcache-fs", LMCACHE, "lmcache_l2", ("fs",), is_pool=True),
    Engine("lmcache-fs_native", LMCACHE, "lmcache_l2", ("fs_native",), is_pool=True),
    Engine(
        "lmcache-bench-l2", LMCACHE, "lmcache_bench", ("fs_native",), many_small=True, is_pool=True
    ),
    Engine("mooncake-file", MOONCAKE, "mooncake_files", ("file_per_key",)),
    Engine("mooncake-bucket", MOONCAKE, "mooncake_files", ("bucket",), stores_again=False),
    Engine("mooncake-offset", MOONCAKE, "mooncake_files", ("offset_allocator",), keeps_open=True),
    _VLLM_EXAMPLE,
    Engine(
        "vllm-kvfs",
        VLLM,
        "vllm_kvfs",
        imports_kvfs=True,
        is_slow_to_start=True,
        rival=_VLLM_EXAMPLE,
    ),
    Engine(
        "vllm-fs",
        VLLM,
        "vllm_fs",
        is_pool=True,
        leaves="vllm_offload_*",
        is_slow_to_start=True,
    ),
    Engine("vllm-disk", VLLM, "vllm_disk", keeps_open=True),
    Engine("llama-states", LLAMA, "llama_files", ("states",), is_pool=True),
    Engine("llama-sequences", LLAMA, "llama_files", ("sequences",), is_pool=True),
    Engine("llama-server", LLAMA_SERVER, "llama_server", is_pool=True),
)


def named(name: str) -> Engine:
    """Raises KeyError with the names that there are."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    names = ", ".join(engine.name for engine in ENGINES)
    raise KeyError(f"there is no engine {name!r}; there are {names}")

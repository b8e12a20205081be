"""What else one would keep a session in, each on the same filesystem as the ring's image."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.bench.peers.files import Arrays, DirectFiles, Files
from scripts.bench.peers.lmcache_backends import LMCacheDisk, LMCacheFs, LMCacheNativeFs
from scripts.bench.peers.peer import Layers, Peer
from scripts.bench.peers.stores import Lmdb, RocksDb
from scripts.bench.peers.tensors import SafetensorsLayers, SafetensorsSession, Torch, TorchMapped

__all__ = ["ALL", "DirectFiles", "Files", "Layers", "Peer", "installed"]

ALL: tuple[type[Peer], ...] = (
    Files,
    DirectFiles,
    SafetensorsLayers,
    SafetensorsSession,
    Torch,
    TorchMapped,
    Arrays,
    Lmdb,
    RocksDb,
    LMCacheDisk,
    LMCacheFs,
    LMCacheNativeFs,
)


@contextlib.contextmanager
def installed(directory: Path, kinds: Sequence[type[Peer]] = ALL) -> Iterator[list[Peer]]:
    """One of each kind that can be imported here, in a folder of its own; of the others a line
    says what they need."""
    with contextlib.ExitStack() as stack:
        peers = []
        for kind in kinds:
            try:
                peer = kind(directory / kind.__name__)
            except ImportError as missing:
                print(f"{kind.name} is left out: {missing} (see scripts/bench/peers)")
                continue
            stack.callback(peer.end)
            peers.append(peer)
        yield peers

"""Loading: the state that a device describes, from a checkpoint and the log behind it."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from kvfs.engine import journal
from kvfs.engine.device import Device, DeviceError
from kvfs.engine.format import ROOT_INODE, FormatError, Superblock
from kvfs.engine.index import Index
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.keytable import read_table
from kvfs.engine.nodecache import NodeCache
from kvfs.engine.ring import Geometry, Ring
from kvfs.engine.space import longest_extent
from kvfs.engine.state import State
from kvfs.engine.superblocks import Superblocks
from kvfs.engine.vault import Vault

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state that a device describes: checkpoint and replay, without the buffer."""

    superblock: Superblock
    ring: Ring
    index: Index
    state: State
    extent_max: int
    operation: int
    frames: int
    damage: str | None


def load_newest(
    device: Device,
    name: str,
    superblocks: Superblocks,
    index_cache_size: int,
    nodes_max: int,
    key: bytes | None,
) -> Loaded:
    """From the newest checkpoint that can be read. Waits in place. `index_cache_size`, in
    bytes, and `nodes_max` are what of the index and of inodes stays in memory; `key` is that of
    an encrypted ring. Raises DeviceError."""
    reasons = []
    unlocked = Vault.unlock(superblocks.newest, key, name)
    for start in superblocks.starting_points():
        try:
            vault = unlocked.at(start)
            durable = superblocks.newest.durable
            loaded = _load(device, name, start, durable, index_cache_size, nodes_max, vault)
            if loaded.ring.position.sequence < superblocks.newest.replay.sequence:
                raise FormatError("the log does not lead to the newest checkpoint")
        except (FormatError, OSError) as fault:
            reasons.append(str(getattr(fault, "filename", None) or fault))
            continue
        if reasons:
            log.warning("%s: %s; the checkpoint before was used", name, reasons[0])
        return loaded
    raise DeviceError(
        f"{name}: {reasons[0]}; the index cannot be read; repair it with: kvfs fsck {name} --repair"
    )


def _load(
    device: Device,
    name: str,
    superblock: Superblock,
    durable: int,
    index_cache_size: int,
    nodes_max: int,
    vault: Vault,
) -> Loaded:
    """Raises FormatError when the checkpoint is not what was written, OSError."""
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    ring = Ring(geometry, superblock.uuid, superblock.epoch, superblock.replay)
    checkpoint = journal.read_checkpoint(device, superblock.checkpoint, ring)
    read_table(device, superblock, vault)
    # While the store is opened, reads wait in place.
    nodes = NodeCache(device, InlineExecutor(), ring, index_cache_size, vault)
    index = Index(nodes, checkpoint)
    replayed = journal.replay(device, ring, index, superblock, durable)
    extent_max = longest_extent(superblock.segment_size, encrypted=vault.is_on)
    state = State(index, vault.hash_key, extent_max, nodes_max)
    run(state.load_counts())
    with suppress(FileNotFoundError):  # nothing was written yet
        run(state.nodes.node(ROOT_INODE))
    damage = replayed.damage and (
        f"{name} is damaged: {replayed.damage}; mounted read-only; unmount it, then repair it "
        f"with: kvfs fsck {name} --repair"
    )
    return Loaded(
        superblock, ring, index, state, extent_max, replayed.operation, replayed.frames, damage
    )

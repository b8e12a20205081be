"""Loading: the state that a device describes, from a checkpoint and the log behind it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvfs.engine import journal
from kvfs.engine.device import Device, DeviceError
from kvfs.engine.format import EXTENT_SIZE_MAX, FormatError, Superblock
from kvfs.engine.index import Index
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.nodecache import NodeCache
from kvfs.engine.ring import Geometry, Ring
from kvfs.engine.state import State
from kvfs.engine.superblocks import Superblocks

log = logging.getLogger(__name__)

_FRACTION_OF_SEGMENT = 8  # an extent is at most this part of a segment


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
    device: Device, name: str, superblocks: Superblocks, index_cache_size: int, nodes_max: int
) -> Loaded:
    """From the newest checkpoint that can be read. Waits in place. `index_cache_size`, in
    bytes, and `nodes_max` are what of the index and of inodes stays in memory. Raises
    DeviceError."""
    reasons = []
    for start in superblocks.starting_points():
        try:
            durable = superblocks.newest.durable
            loaded = _load(device, name, start, durable, index_cache_size, nodes_max)
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
) -> Loaded:
    """Raises FormatError when the checkpoint is not what was written, OSError."""
    geometry = Geometry(superblock.segment_size, superblock.segment_count)
    ring = Ring(geometry, superblock.uuid, superblock.epoch, superblock.replay)
    checkpoint = journal.read_checkpoint(device, superblock.checkpoint, ring)
    # While the store is opened, reads wait in place.
    index = Index(NodeCache(device, InlineExecutor(), ring, index_cache_size), checkpoint)
    replayed = journal.replay(device, ring, index, superblock, durable)
    extent_max = min(EXTENT_SIZE_MAX, superblock.segment_size // _FRACTION_OF_SEGMENT)
    state = State(index, superblock.hash_key, extent_max, nodes_max)
    run(state.load_counts())
    damage = replayed.damage and (
        f"{name} is damaged: {replayed.damage}; mounted read-only; unmount it, then repair it "
        f"with: kvfs fsck {name} --repair"
    )
    return Loaded(
        superblock, ring, index, state, extent_max, replayed.operation, replayed.frames, damage
    )

"""The two superblock slots: format, read, write."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from kvfs.engine.buffers import aligned
from kvfs.engine.device import Device, DeviceError, read_bytes
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    FIRST_FREE_ID,
    HASH_KEY_SIZE,
    ID_MAX,
    NO_SEGMENT,
    SEGMENT_COUNT_MIN,
    SEGMENT_SIZE_MAX,
    SEGMENT_SIZE_MIN,
    SUPERBLOCK_ADDRESSES,
    Cipher,
    Feature,
    FormatError,
    Pointer,
    Position,
    Superblock,
    SuperblockFlag,
    UnknownFormatError,
)
from kvfs.engine.vault import Vault


@dataclass(frozen=True, slots=True)
class Encryption:
    """How a ring is to be encrypted: under which cipher, and what the operator keeps."""

    cipher: Cipher
    key: bytes


def format_device(
    device: Device,
    segment_size: int,
    *,
    uuid: bytes | None = None,
    encryption: Encryption | None = None,
) -> Superblock:
    """Write an empty ring. Raises DeviceError when the device is too small."""
    if not SEGMENT_SIZE_MIN <= segment_size <= SEGMENT_SIZE_MAX or segment_size % SEGMENT_SIZE_MIN:
        raise DeviceError("the segment size must be 1 MiB to 1 GiB, in whole MiB")
    count = (device.size - DATA_START) // segment_size
    if count < SEGMENT_COUNT_MIN:
        needed = (DATA_START + SEGMENT_COUNT_MIN * segment_size) // 2**20
        raise DeviceError(
            f"the device is too small: {SEGMENT_COUNT_MIN} segments of "
            f"{segment_size // 2**20} MiB need {needed} MiB; choose a smaller --segment-size"
        )
    superblock = Superblock(
        uuid=uuid or secrets.token_bytes(16),
        generation=0,
        epoch=0,
        epoch_start=0,
        created_ns=time.time_ns(),
        device_size=DATA_START + count * segment_size,
        segment_size=segment_size,
        segment_count=count,
        id_floor=FIRST_FREE_ID,
        hash_key=secrets.token_bytes(16),
        oplog_token=secrets.token_bytes(16),
        oplog_home=b"",
        flags=SuperblockFlag.CLEAN,
        operation=0,
        checkpoint=Pointer(),
        replay=Position(segment=0, offset=0, next_segment=1, sequence=1, previous_checksum=0),
    )
    if encryption is not None:
        vault = Vault.new(encryption.cipher, encryption.key, superblock.uuid)
        superblock = replace(
            superblock,
            features=Feature.ENCRYPTED,
            cipher=encryption.cipher,
            hash_key=bytes(HASH_KEY_SIZE),
            sealed_keys=vault.sealed_keys(vault.turn),
        )
    # Both slots, the older one first: one alone that gets lost must not lose the ring.
    for generation in (superblock, superblock.next()):
        write_superblock(device, generation)
    return generation


@dataclass(frozen=True, slots=True)
class Superblocks:
    """The valid superblocks, the newest first. Where there is only one, the other may have
    been newer."""

    valid: tuple[Superblock, ...]

    @property
    def newest(self) -> Superblock:
        return self.valid[0]

    @property
    def one_is_lost(self) -> bool:
        return len(self.valid) < len(SUPERBLOCK_ADDRESSES)

    def starting_points(self) -> list[Superblock]:
        """The newest; and the same with the checkpoint before, from which a longer part of
        the log leads to the same state."""
        checkpoints = [
            replace(
                self.newest,
                checkpoint=block.checkpoint,
                replay=block.replay,
                operation=block.operation,
                key_tables=block.key_tables,
                sealed_keys=block.sealed_keys,
            )
            for block in self.valid
        ]
        return list(dict.fromkeys(checkpoints))


def read_superblocks(device: Device, name: str) -> Superblocks:
    """Raises DeviceError, with what to do, when there is none that can be trusted."""
    found: list[Superblock] = []
    reasons: list[str] = []
    if device.size < SUPERBLOCK_ADDRESSES[-1] + BLOCK:
        raise DeviceError(f"{name} is too small to be a KVFS ring; make one with: kvfs mkfs {name}")
    for address in SUPERBLOCK_ADDRESSES:
        try:
            found.append(read_superblock(device, address))
        except UnknownFormatError as fault:
            raise DeviceError(f"{name}: {fault}") from None
        except (FormatError, OSError) as fault:
            reasons.append(str(fault))
    if not found:
        reason = next((r for r in reasons if "no KVFS" not in r), reasons[0])
        raise DeviceError(
            f"{name}: {reason}; if nothing on it is needed, format it with: "
            f"kvfs mkfs {name} --force"
        )
    found.sort(key=lambda superblock: superblock.generation, reverse=True)
    newest = found[0]
    if newest.device_size > device.size:
        raise DeviceError(
            f"{name} is cut: it was formatted with {newest.device_size} bytes and has "
            f"{device.size}; restore its full size before mounting"
        )
    return Superblocks(tuple(found))


def read_superblock(device: Device, address: int) -> Superblock:
    """Raises FormatError for one that is none, or of a ring that cannot be; OSError."""
    superblock = Superblock.unpack(read_bytes(device, address, BLOCK))
    size, count, replay = superblock.segment_size, superblock.segment_count, superblock.replay
    if (
        not SEGMENT_SIZE_MIN <= size <= SEGMENT_SIZE_MAX
        or size % SEGMENT_SIZE_MIN
        or count < SEGMENT_COUNT_MIN
        or superblock.device_size != DATA_START + count * size
    ):
        raise FormatError("its segments do not make up the ring")
    if (
        replay.segment >= count
        or (replay.next_segment >= count and replay.next_segment != NO_SEGMENT)
        or replay.offset > size
        or replay.offset % BLOCK
    ):
        raise FormatError("its log begins outside of the ring")
    if superblock.id_floor > ID_MAX:
        raise FormatError("its ids are beyond all that there can be")
    return superblock


def write_superblock(device: Device, superblock: Superblock) -> None:
    """To its slot, durable on return. Raises OSError."""
    block = aligned(BLOCK)
    block[:] = superblock.pack()
    device.write(superblock.address, [block])
    device.flush()

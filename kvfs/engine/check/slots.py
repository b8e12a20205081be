"""The two superblock slots, each checked by itself and against the other."""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.engine.check.findings import Finding
from kvfs.engine.device import Device
from kvfs.engine.format import SUPERBLOCK_ADDRESSES, FormatError, Superblock
from kvfs.engine.superblocks import read_superblock, read_superblocks


@dataclass(frozen=True, slots=True)
class Slots:
    """`older` is None where the other slot cannot be used."""

    newest: Superblock
    older: Superblock | None
    findings: list[Finding]

    @property
    def id_floor(self) -> int:
        return max(self.newest.id_floor, self.older.id_floor if self.older else 0)


def read_slots(device: Device, name: str) -> Slots:
    """Raises DeviceError when there is no superblock that can be trusted."""
    newest = read_superblocks(device, name).newest
    older, findings = None, []
    for number, address in enumerate(SUPERBLOCK_ADDRESSES):
        try:
            superblock = read_superblock(device, address)
            if superblock.address != address:
                raise FormatError("it belongs in the other slot")
            if _identity(superblock) != _identity(newest):
                raise FormatError("it is of another ring than the newer one")
            if superblock.generation < newest.generation - 1:
                raise FormatError("it is older than it should be: a write was lost")
        except (FormatError, OSError) as fault:
            findings.append(Finding("superblock", f"slot {number}: {fault}", address=address))
            continue
        if superblock.generation != newest.generation:
            older = superblock
    return Slots(newest, older, findings)


def _identity(superblock: Superblock) -> tuple[bytes, int, int, bytes]:
    """What never changes."""
    return (
        superblock.uuid, superblock.segment_size, superblock.segment_count, superblock.hash_key,
    )  # fmt: skip

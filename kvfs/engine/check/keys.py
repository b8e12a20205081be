"""The key table, against what is encrypted under its keys."""

from __future__ import annotations

from collections.abc import Iterator

from kvfs.engine import metadata
from kvfs.engine.check.findings import Finding
from kvfs.engine.check.load import Loaded
from kvfs.engine.check.tables import Tables
from kvfs.engine.device import Device
from kvfs.engine.format import FormatError


def lost_keys(device: Device, loaded: Loaded, tables: Tables) -> Iterator[Finding]:
    """What no key opens any longer; and counts that would let a key live for too long, or not
    for long enough."""
    vault = loaded.base.vault
    if not vault.is_on:
        return
    yield from _bad_copies(device, loaded)
    for extent in tables.extents.values():
        if extent.cipher and vault.keys.find(extent.key_id) is None:
            message = f"extent {extent.extent_id} is lost: its key is"
            yield Finding("data", message, address=extent.address, is_lost=True)
    # What the log changes in the table is not made good here.
    if not loaded.log.frames:
        wrong = vault.keys.counts() ^ vault.keys.of(tables.inodes, tables.extents.values()).counts()
        for ino in sorted({ino for ino, _, _ in wrong}):
            yield Finding("keys", "the key table counts its extents wrong", ino)


def _bad_copies(device: Device, loaded: Loaded) -> Iterator[Finding]:
    """All of the key table is there twice: where one copy is bad, the other one was used."""
    base = loaded.base
    places = [*base.superblock.key_tables, *(p for part in base.vault.table for p in part.places)]
    for place in places:
        try:
            if place.stored:
                metadata.read(device, place)
        except (FormatError, OSError) as fault:
            yield Finding("keys", f"a copy of the key table is bad: {fault}", address=place.address)

"""Somebody who has the device of an encrypted ring, and its master key: what can be read?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvfs.engine.check.frames import all_frames
from kvfs.engine.check.load import read_base
from kvfs.engine.check.slots import read_slots
from kvfs.engine.format import (
    Extent,
    FormatError,
    RecordKind,
    unpack_key_entries,
    unpack_key_parts,
)
from kvfs.engine.journal import extent_of
from kvfs.engine.keys import Keys
from kvfs.engine.ring import Frame
from kvfs.engine.vault import Vault
from tests.support.devices import RecordingDevice
from tests.support.encrypted import KEY


def records(image: bytes | bytearray) -> list[Extent]:
    """Every extent that any frame in an image names."""
    device = RecordingDevice(bytearray(image))
    newest = read_slots(device, "ring").newest
    return [
        extent_of(frame.header, record)
        for frame in all_frames(device, newest)
        for record in frame.records
        if record.kind == RecordKind.DATA
    ]


def known_vaults(image: bytes | bytearray, old: bytes = b"", key: bytes = KEY) -> Iterator[Vault]:
    """All that somebody with the master key gets out of an image, and out of what lay in the
    places of an old one: the keys in the key tables of both superblocks, in all tables that
    these open, and in all frames."""
    device = RecordingDevice(bytearray(image))
    slots = read_slots(device, "ring")
    unlocked = Vault.unlock(slots.newest, key, "ring")
    for superblock in (slots.newest, slots.older):
        assert superblock is not None
        vault = read_base(device, superblock, unlocked).vault
        for source in (image, old or image):
            frames = all_frames(RecordingDevice(bytearray(source)), superblock)
            for frame in frames:
                vault.learn_if_possible(frame.items)
            for entries in tables_opened(vault, source, frames):
                vault.keys.learn_from(Keys([entries]))
        yield vault


def tables_opened(vault: Vault, image: bytes | bytearray, frames: list[Frame]) -> Iterator[Any]:
    """Parts of key tables that any frame has, as far as the keys of a vault open them."""
    secrets = [vault.turn.table, *(part.secret for part in vault.table)]
    bodies = [
        bytes(image[at : at + record.stored])
        for frame in frames
        for record in frame.records
        if record.kind == RecordKind.KEYS
        for at in [frame.header.address + record.payload]
    ]
    for secret in secrets:
        for body in bodies:
            with suppress(FormatError):
                plain = vault.open_metadata(secret, body)
                try:
                    secrets += [
                        p.secret for p in unpack_key_parts(plain) if p.secret not in secrets
                    ]
                except FormatError:
                    yield unpack_key_entries(plain)


def readable(before: bytes, after: bytes, key: bytes = KEY) -> set[int]:
    """The extents whose stored bytes, as an image of before has them, can be decrypted with
    what is in an image of after."""
    found = set()
    for vault in known_vaults(after, before, key):
        for extent in records(before):
            stored = memoryview(before)[extent.address : extent.address + extent.stored]
            out = memoryview(bytearray(extent.size))
            try:
                vault.open_extent(extent, stored, out)
            except FormatError:
                continue
            found.add(extent.extent_id)
    return found


def names_readable(before: bytes, after: bytes, key: bytes = KEY) -> bytes:
    """All names and values in the frames of one image that the keys of another open."""
    device = RecordingDevice(bytearray(before))
    frames = all_frames(device, read_slots(device, "ring").newest)
    found = b""
    for vault in known_vaults(after, before, key):
        for frame in frames:
            for _, value in vault.opened_if_possible(frame.items):
                found += value or b""
    return found

"""The key table of an encrypted ring: read, and appended anew by each checkpoint.

A root that points to parts, each under a key of its own that the root holds: what changed
alone is written. All of it is written twice, since a block that rots here would take all
that its keys open with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvfs.engine import metadata
from kvfs.engine.ciphers import new_secret
from kvfs.engine.device import Device
from kvfs.engine.format import (
    BLOCK,
    KEY_ENTRY,
    KEY_PART_SIZE,
    FormatError,
    KeyPart,
    Pointer,
    RecordKind,
    Superblock,
    pack_key_parts,
    round_up,
    unpack_key_entries,
    unpack_key_parts,
)
from kvfs.engine.io import Completion, Step, wait
from kvfs.engine.keys import Keys
from kvfs.engine.metadata import EncodedRecord
from kvfs.engine.vault import Turn, Vault

_COPIES = 2


def read_table(device: Device, superblock: Superblock, vault: Vault) -> None:
    """Have the vault know all keys of a checkpoint. Raises FormatError, OSError."""
    faults = read_what_is_whole(device, superblock, vault)
    if faults:
        raise faults[0]


def read_what_is_whole(device: Device, superblock: Superblock, vault: Vault) -> list[FormatError]:
    """The same, as far as it is possible. Returns what is wrong with the rest."""
    if not superblock.key_tables[0].stored:
        return []
    try:
        vault.table = _table(_read(device, superblock.key_tables, vault, vault.turn.table))
    except FormatError as fault:
        return [fault]
    parts, faults = [], []
    for part in vault.table:
        try:
            parts.append(unpack_key_entries(_read(device, part.places, vault, part.secret)))
        except FormatError as fault:
            parts.append(unpack_key_entries(b""))
            faults.append(fault)
    vault.keys = Keys(parts)
    return faults


def _table(root: bytes) -> list[KeyPart]:
    table = unpack_key_parts(root)
    if not table or len(table) & len(table) - 1:
        raise FormatError("the root of the key table has a wrong number of parts")
    return table


def _read(device: Device, places: tuple[Pointer, ...], vault: Vault, secret: bytes) -> bytes:
    """Of two copies the first that is whole."""
    faults = []
    for place in places:
        try:
            return vault.open_metadata(secret, metadata.read(device, place))
        except (FormatError, OSError) as fault:
            faults.append(fault)
    raise FormatError(f"the key table cannot be read: {faults[0]}")


@dataclass(slots=True)
class Appended:
    """A new key table. `written` and `replaced` are all that came and went of it."""

    roots: tuple[Pointer, Pointer]
    table: list[KeyPart]
    written: list[Pointer] = field(default_factory=list)
    replaced: list[Pointer] = field(default_factory=list)


def size_max(vault: Vault) -> int:
    """Bytes that the next one takes in the ring, at most, if a good many keys come until then."""
    if not vault.is_on:
        return 0
    parts = 2 * len(vault.keys.parts)
    entries = len(vault.keys) + vault.keys.fresh
    content = entries * KEY_ENTRY.itemsize + parts * (KEY_PART_SIZE + BLOCK)
    return _COPIES * (round_up(content) + 2 * BLOCK)


def append(
    vault: Vault,
    turn: Turn,
    roots: tuple[Pointer, Pointer],
    submit: Callable[[Callable[[], list[EncodedRecord]]], Completion[list[EncodedRecord]]],
    write: Callable[[list[EncodedRecord]], Step[list[Pointer]]],
) -> Step[Appended]:
    """Write the parts that changed, and a root; `roots` are those of the table before. `submit`
    runs work in a thread, `write` appends to the ring. Raises OSError."""
    numbers = sorted(vault.keys.changed | set(range(len(vault.table), len(vault.keys.parts))))
    secrets = [new_secret() for _ in numbers]
    records = yield from wait(submit(partial(_encoded, vault, numbers, secrets)))
    pointers = yield from write([*records, *map(_copy, records)])
    pairs = zip(pointers[: len(records)], pointers[len(records) :], strict=True)
    # When there are more parts than before, all of them changed.
    was, count = vault.table, len(vault.keys.parts)
    table = was.copy() if len(was) == count else [KeyPart((Pointer(), Pointer()), b"")] * count
    replaced = [*roots]
    replaced += [place for part in was for place in part.places] if len(was) != count else []
    for number, pair, secret in zip(numbers, pairs, secrets, strict=True):
        replaced += table[number].places
        table[number] = KeyPart(pair, secret)
    body = vault.seal_metadata(turn.table, pack_key_parts(table))
    root = metadata.encode(RecordKind.KEYS, body)
    first, second = yield from write([root, _copy(root)])
    return Appended((first, second), table, [*pointers, first, second], replaced)


def _encoded(vault: Vault, numbers: list[int], secrets: list[bytes]) -> list[EncodedRecord]:
    """Runs in a thread."""
    parts = (vault.keys.living(number).tobytes() for number in numbers)
    sealed = map(vault.seal_metadata, secrets, parts)
    return [metadata.encode(RecordKind.KEYS, body) for body in sealed]


def _copy(encoded: EncodedRecord) -> EncodedRecord:
    return replace(encoded, record=replace(encoded.record))

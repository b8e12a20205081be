"""What of a ring is encrypted, and under which key.

The bytes and the names of an inode are under its own key (`keys.py`), what was reclaimed
under one of the ring. The keys lie in a key table that each checkpoint writes, encrypted under
a table key; those of inodes that came since, in frames under a log key. Both stand in the
superblocks alone, under the master key, and change with each checkpoint: so what a checkpoint
leaves out of the table is nowhere, once both superblocks have gone on.

A superblock also has the next log key: where the newer of the two is lost, the older one
leads to what was logged behind the checkpoint of the newer.

Of a ring that is not encrypted the vault is open: all is as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from kvfs.engine.ciphers import derived, master_secret, new_secret, seal, unseal, unseal_into
from kvfs.engine.codec import Codec
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    HASH_KEY_SIZE,
    KEY,
    NONCE_SIZE,
    SEAL_OVERHEAD,
    SECRET_SIZE,
    TABLE_KEYS,
    Cipher,
    Dentry,
    Extent,
    FormatError,
    Inode,
    Item,
    ItemKind,
    KeyPart,
    RecordHeader,
    Superblock,
    key_owner,
    secret_key,
)
from kvfs.engine.keys import Keys

_SALT_SIZE = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """The keys of one checkpoint: of its table, of the frames behind it, and of those behind
    the next one."""

    table: bytes
    log: bytes
    next_log: bytes

    @classmethod
    def first(cls) -> Turn:
        return cls(new_secret(), new_secret(), new_secret())


@dataclass(slots=True)
class Vault:
    """`hash_key` is for names. `table` is where the parts of the key table lie. `log_secrets`
    are those that frames may be under, of all superblocks."""

    hash_key: bytes
    cipher: Cipher = Cipher.NONE
    uuid: bytes = b""
    turn: Turn = field(default_factory=Turn.first)
    keys: Keys = field(default_factory=Keys)
    table: list[KeyPart] = field(default_factory=list)
    log_secrets: list[bytes] = field(default_factory=list)
    _master: bytes = b""
    _used: set[bytes] = field(default_factory=set)
    _ring_secret: bytes = b""
    # Of this mount: after a crash ids are new, but not in an image that was put back.
    _salt: bytes = field(default_factory=lambda: os.urandom(_SALT_SIZE))

    # -- making and opening

    @classmethod
    def new(cls, cipher: Cipher, key: bytes, uuid: bytes) -> Vault:
        """For an empty ring. `key` is what the operator keeps, `uuid` the ring's."""
        vault = cls(os.urandom(HASH_KEY_SIZE), cipher, uuid)
        vault._use(master_secret(key, uuid))
        return vault

    @classmethod
    def unlock(cls, superblock: Superblock, key: bytes | None, name: str) -> Vault:
        """As a superblock has it, without its key table. Raises DeviceError without the key, or
        with another."""
        if not superblock.cipher:
            return cls(superblock.hash_key)
        if key is None:
            raise DeviceError(
                f"{name} is encrypted: give its key with --key-file, --key-command or --keyring"
            )
        vault = cls(b"", superblock.cipher, superblock.uuid)
        vault._use(master_secret(key, superblock.uuid))
        try:
            vault._open(superblock)
        except FormatError:
            raise DeviceError(f"{name}: this is not the key that it was encrypted with") from None
        return vault

    def _use(self, master: bytes) -> None:
        self._master = master
        self._ring_secret = derived(master, b"kvfs ring " + self.uuid)

    def _open(self, superblock: Superblock) -> None:
        plain = unseal(self.cipher, self._master, superblock.sealed_keys, self.uuid)
        self.hash_key, secrets = plain[:HASH_KEY_SIZE], plain[HASH_KEY_SIZE:]
        table, log, next_log = (
            secrets[at : at + SECRET_SIZE] for at in range(0, len(secrets), SECRET_SIZE)
        )
        self.turn = Turn(table, log, next_log)
        self.log_secrets = [log, next_log]

    def at(self, superblock: Superblock) -> Vault:
        """The same as another superblock has it, without a key table. What either has opens
        the log. Raises FormatError."""
        if not self.is_on:
            return Vault(self.hash_key)
        vault = Vault(b"", self.cipher, self.uuid)
        vault._master, vault._ring_secret = self._master, self._ring_secret
        vault._open(superblock)
        vault.log_secrets = list(dict.fromkeys([*vault.log_secrets, *self.log_secrets]))
        return vault

    @property
    def is_on(self) -> bool:
        return self.cipher != Cipher.NONE

    @property
    def overhead(self) -> int:
        """Bytes that an item, or an extent, takes more."""
        return SEAL_OVERHEAD if self.is_on else 0

    # -- superblocks

    def next_turn(self) -> Turn:
        """For the next checkpoint. A log key that was used is never one that goes on."""
        log = self.turn.next_log
        return Turn(new_secret(), new_secret() if log in self._used else log, new_secret())

    def sealed_keys(self, turn: Turn) -> bytes:
        """For a superblock."""
        plain = self.hash_key + turn.table + turn.log + turn.next_log
        return seal(self.cipher, self._master, plain, self.uuid)

    def began(self, turn: Turn, table: list[KeyPart]) -> None:
        """The newest superblock has them."""
        self.turn, self.table = turn, table
        self.log_secrets = [turn.log, turn.next_log]
        self._used.clear()

    # -- the key table

    def seal_metadata(self, secret: bytes, body: bytes) -> bytes:
        return seal(self.cipher, secret, body, self.uuid)

    def open_metadata(self, secret: bytes, body: bytes) -> bytes:
        """Raises FormatError."""
        return unseal(self.cipher, secret, body, self.uuid)

    # -- items

    def sealed(self, items: list[Item]) -> list[Item]:
        """Items as a frame, or a node, has them."""
        if not self.is_on:
            return items
        return [(key, None if value is None else self._seal(key, value)) for key, value in items]

    def with_secrets(self, items: list[Item]) -> list[Item]:
        """The items of a commit unit, as its frames have them: with the keys that are new."""
        if not self.is_on:
            return items
        told = []
        for ino, secret in self.keys.untold(items):
            key = secret_key(ino)
            told.append((key, seal(self.cipher, self.turn.log, secret, key)))
            self._used.add(self.turn.log)
        return [*self.sealed(items), *told]

    def opened(self, items: list[Item]) -> list[Item]:
        """Items of a node, or of a frame whose keys were learnt. Raises FormatError."""
        if not self.is_on:
            return items
        return [(key, None if value is None else self._unseal(key, value)) for key, value in items]

    def opened_if_possible(self, items: list[Item]) -> list[Item]:
        """Without those whose keys are dead."""
        return [item for one in items for item in self._opened_if_possible(one)]

    def _opened_if_possible(self, item: Item) -> list[Item]:
        try:
            return self.opened([item])
        except FormatError:
            return []

    def learn(self, items: list[Item]) -> list[Item]:
        """Take in the keys that are among the items of frames. Returns the others. Raises
        FormatError for one that cannot be opened."""
        if not self.is_on:
            return items
        for key, value in _secrets(items):
            self.keys.learn(key_owner(key), self._open_secret(key, value))
        return [item for item in items if item[0][0] != TABLE_KEYS]

    def learn_if_possible(self, items: list[Item]) -> None:
        """Those that can be opened, of inodes whose keys are not known."""
        for key, value in _secrets(items):
            if self.keys.find(key_owner(key)) is None:
                with suppress(FormatError):
                    self.keys.learn(key_owner(key), self._open_secret(key, value))

    def _open_secret(self, key: bytes, value: bytes) -> bytes:
        for secret in self.log_secrets:
            try:
                plain = unseal(self.cipher, secret, value, key)
            except FormatError:
                continue
            self._used.add(secret)
            return plain
        raise FormatError("a key in the log is under none that a superblock has")

    def _seal(self, key: bytes, value: bytes) -> bytes:
        owner, start = self._secret_part(key, value)
        if start is None:
            return value
        secret = self._ring_secret if owner is None else self.keys.find_or_make(owner)
        return value[:start] + seal(self.cipher, secret, value[start:], key)

    def _unseal(self, key: bytes, value: bytes) -> bytes:
        owner, start = self._secret_part(key, value)
        if start is None:
            return value
        return value[:start] + unseal(self.cipher, self._secret_of(owner), value[start:], key)

    def _secret_part(self, key: bytes, value: bytes) -> tuple[int | None, int | None]:
        """Whose key an item's value is under (None: the ring's), and from which byte on it is
        encrypted (None: it is not)."""
        _, owner, kind, _ = KEY.unpack(key)
        match kind:
            case ItemKind.INODE | ItemKind.SUMMARY:
                return owner, Inode.STRUCT.size
            case ItemKind.DENTRY:
                # A name is its inode's, not the directory's.
                return int.from_bytes(value[:8], "little"), Dentry.STRUCT.size
            case ItemKind.XATTR | ItemKind.SYMLINK:
                return owner, 0
            case ItemKind.LOG:
                return None, 0
        return None, None

    def _secret_of(self, ino: int | None) -> bytes:
        if ino is None:
            return self._ring_secret
        secret = self.keys.find(ino)
        if secret is None:
            raise FormatError(f"the key of inode {ino} is gone")
        return secret

    # -- extents

    def seal_extent(self, record: RecordHeader, secret: bytes, data: bytes | memoryview) -> bytes:
        """The bytes of an extent as they are stored. An id is never used twice, so neither is
        the nonce."""
        nonce = record.extent_id.to_bytes(NONCE_SIZE - _SALT_SIZE, "little") + self._salt
        context = _context(record.extent_id, record.size, record.codec)
        return seal(self.cipher, secret, data, context, nonce)

    def open_extent(self, extent: Extent, stored: memoryview, out: memoryview) -> memoryview:
        """The bytes as the codec takes them: `out` itself where there is none. Raises
        FormatError."""
        secret = self._secret_of(extent.key_id)
        context = _context(extent.extent_id, extent.size, extent.codec)
        if extent.codec == Codec.NONE:
            unseal_into(self.cipher, secret, stored, context, out)
            return out
        return memoryview(unseal(self.cipher, secret, stored, context))


def _context(extent_id: int, size: int, codec: int) -> bytes:
    return b"%d %d %d" % (extent_id, size, codec)


def _secrets(items: Iterable[Item]) -> Iterator[tuple[bytes, bytes]]:
    for key, value in items:
        if key[0] == TABLE_KEYS and value is not None:
            yield key, value

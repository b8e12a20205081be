"""Key-value stores: a value for each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.bench.peers.peer import Layers, Peer

_MAP_SIZE = 64 * 1024**3  # of addresses: the file is as long as what is in it
_BLOB_SIZE_MIN = 4096


def _key(session: str, name: str) -> bytes:
    return f"{session}/{name}".encode()


class Lmdb(Peer):
    """A session is saved in one transaction, and restored in one that copies out of the map."""

    name = "LMDB"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import lmdb

        self.lmdb = lmdb
        self.environment: Any = None

    def open(self) -> None:
        self.environment = self.lmdb.open(str(self.root), map_size=_MAP_SIZE)

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()
        self.environment = None

    def save(self, session: str, layers: Layers) -> None:
        with self.environment.begin(write=True) as transaction:
            for name, data in layers.items():
                transaction.put(_key(session, name), data)

    def restore(self, session: str, into: Layers) -> None:
        with self.environment.begin(buffers=True) as transaction:
            for name, view in into.items():
                view[:] = transaction.get(_key(session, name))

    def remove(self, session: str) -> None:
        prefix = _key(session, "")
        with self.environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                found = cursor.delete()


class RocksDb(Peer):
    """Values lie in blob files, beside the tree."""

    name = "RocksDB, blobs"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import rocksdict

        self.rocksdict = rocksdict
        self.database: Any = None

    def open(self) -> None:
        options = self.rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(_BLOB_SIZE_MIN)
        self.database = self.rocksdict.Rdict(str(self.root), options)

    def close(self) -> None:
        if self.database is not None:
            self.database.close()
        self.database = None

    def save(self, session: str, layers: Layers) -> None:
        for name, data in layers.items():
            self.database[_key(session, name)] = bytes(data)
        # Out of the memory tables, so that a restore reads files.
        self.database.flush()

    def restore(self, session: str, into: Layers) -> None:
        for name, view in into.items():
            view[:] = self.database[_key(session, name)]

    def remove(self, session: str) -> None:
        prefix = _key(session, "")
        self.database.delete_range(prefix, prefix + b"\xff")

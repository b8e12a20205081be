"""A session on disk: its directory, what it says of itself, how long it is."""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs.torch.errors import FingerprintError, NotASessionError, SessionBusyError
from kvfs.torch.files import SessionFile, named, set_xattr, temporary_of
from kvfs.torch.fingerprint import Fingerprint

_VERSION = 1
_TOKEN_BYTES = 4


@dataclass
class Record:
    """The content of `session.json`; `rounds` holds the token count at each round's end."""

    fingerprint: Fingerprint
    rounds: list[int] = field(default_factory=list)

    def encode(self) -> bytes:
        """As JSON, with shape and element type of each layer for readers without torch."""
        layout = self.fingerprint.row_layout()
        layer = {"shape": layout.shape, "dtype": layout.dtype_name}
        document = {
            "version": _VERSION,
            "fingerprint": self.fingerprint.to_json(),
            "layers": [layer] * self.fingerprint.layers,
            "rounds": self.rounds,
        }
        return json.dumps(document, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> Record:
        """The inverse of `encode`; ValueError, KeyError or TypeError if it is not one."""
        document: dict[str, Any] = json.loads(content)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']} is not known")
        return cls(Fingerprint.from_json(document["fingerprint"]), list(document["rounds"]))


class Session:
    """An open session directory, locked against a second opener until `close`."""

    def __init__(self, path: Path, fingerprint: Fingerprint) -> None:
        """Open the session at `path`, or create it (mode 0700).

        Files longer than the shortest one, in tokens, are cut to it.

        Raises:
            SessionBusyError: it is open elsewhere.
            FingerprintError: it belongs to another model.
            NotASessionError: the directory holds something else.
            OSError: as the filesystem reports it.
        """
        self.path = path
        self._row_bytes = fingerprint.row_layout().row_bytes
        _make_directory(path)
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._lease = -1
        try:
            self._lock()
            self._description = SessionFile(self._directory, path / "session.json")
            self._record = self._read_record() or self._create(fingerprint)
            self._require(fingerprint)
            self.layers = [
                SessionFile(self._directory, path / f"layer.{index:03d}")
                for index in range(fingerprint.layers)
            ]
            self._tokens = SessionFile(self._directory, path / "tokens")
            self._ensure_files(fingerprint)
            self._lease = self._tokens.lease()
            self.stored = self._valid_tokens()
            self.crop(self.stored)
        except BaseException:
            self.close()
            raise

    @property
    def rounds(self) -> list[int]:
        """Token count at the end of each round."""
        return list(self._record.rounds)

    def tokens(self) -> array[int]:
        """The ids of all stored tokens, int32."""
        ids = array("i")
        ids.frombytes(self._tokens.read())
        return ids

    def append_tokens(self, ids: array[int], at: int) -> None:
        """Store `ids` as tokens at, at+1, ..."""
        self._tokens.append(memoryview(ids).cast("B"), at * _TOKEN_BYTES)

    def end_round(self, tokens: int) -> None:
        """Note that a round ended with `tokens` tokens in the session."""
        self._write_record(Record(self._record.fingerprint, [*self._record.rounds, tokens]))

    def crop(self, tokens: int) -> None:
        """Cut every file that is longer than `tokens` tokens, and forget later rounds."""
        widths = [(self._tokens, _TOKEN_BYTES)]
        widths += [(layer, self._row_bytes) for layer in self.layers]
        for file, width in widths:
            if file.size() > tokens * width:
                file.truncate(tokens * width)
        rounds = [end for end in self._record.rounds if end <= tokens]
        if rounds != self._record.rounds:
            self._write_record(Record(self._record.fingerprint, rounds))

    def sync(self) -> None:
        """Make everything written so far durable."""
        # KVFS commits in operation order: one fsync covers every earlier write, of any file.
        with named(self._tokens.path):
            os.fsync(self._lease)

    def close(self) -> None:
        """Give up lock and lease. The descriptors are gone even if an error is raised."""
        directory, self._directory = self._directory, -1
        lease, self._lease = self._lease, -1
        try:
            if lease >= 0:
                with named(self._tokens.path):
                    os.close(lease)
        finally:
            if directory >= 0:
                os.close(directory)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SessionBusyError(
                f"session {self.path} is open in another cache or process: close it there first"
            ) from None

    def _read_record(self) -> Record | None:
        try:
            content = self._description.read()
        except FileNotFoundError:
            return None
        try:
            return Record.decode(content)
        except (ValueError, KeyError, TypeError) as error:
            raise NotASessionError(
                f"{self._description.path} cannot be read ({error!r}): "
                f"remove {self.path} or choose another name"
            ) from None

    def _create(self, fingerprint: Fingerprint) -> Record:
        self._require_no_foreign_files()
        set_xattr(self._directory, "model", str(fingerprint))
        record = Record(fingerprint)
        self._write_record(record)
        return record

    def _require_no_foreign_files(self) -> None:
        left_by_a_crash = temporary_of(self._description.path).name
        foreign = sorted(set(os.listdir(self._directory)) - {left_by_a_crash})
        if foreign:
            raise NotASessionError(
                f"{self.path} holds {foreign[0]!r} but no session.json: choose another name"
            )

    def _require(self, fingerprint: Fingerprint) -> None:
        stored = self._record.fingerprint
        different = stored.differences(fingerprint)
        if different:
            raise FingerprintError(
                f"session {self.path} was written by [{stored}], this model is [{fingerprint}]; "
                f"they differ in {', '.join(different)}: choose another name"
            )

    def _ensure_files(self, fingerprint: Fingerprint) -> None:
        self._tokens.ensure({"dtype": "int32", "shape": "1"})
        layout = fingerprint.row_layout()
        shape = ",".join(map(str, layout.shape))
        for layer in self.layers:
            layer.ensure({"dtype": layout.dtype_name, "shape": shape})

    def _valid_tokens(self) -> int:
        lengths = [layer.size() // self._row_bytes for layer in self.layers]
        return min(self._tokens.size() // _TOKEN_BYTES, *lengths)

    def _write_record(self, record: Record) -> None:
        self._description.replace(record.encode())
        self._record = record


def _make_directory(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)

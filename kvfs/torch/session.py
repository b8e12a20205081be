"""A session on disk: its directory, what it says of itself, how long it is.

Tensor-parallel ranks share the directory and `session.json`; each has files of its own,
whose names end in `.rR`, and locks only those.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs.torch.errors import FingerprintError, NotASessionError, SessionBusyError
from kvfs.torch.files import SessionFile, named, set_xattr, temporary_of
from kvfs.torch.fingerprint import Fingerprint
from kvfs.torch.offers import SessionOffer

_VERSION = 1
_TOKEN_BYTES = 4
_TOKENS_ARE = {"dtype": "int32", "shape": "1"}
_OF_A_RANK = re.compile(r"\.r\d+(\.tmp)?$")


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
    """One rank's part of an open session directory, locked against a second opener."""

    def __init__(self, path: Path, fingerprint: Fingerprint) -> None:
        """Open the session at `path`, or create it (mode 0700).

        Files longer than the shortest one of all ranks, in tokens, are cut to it.

        Raises:
            SessionBusyError: it is open elsewhere.
            FingerprintError: it belongs to another model, or this rank to other weights.
            NotASessionError: the directory holds something else, or is another user's.
            OSError: as the filesystem reports it.
        """
        self.path = path
        self._row_bytes = fingerprint.row_layout().row_bytes
        self._ranks = fingerprint.ranks
        self._rank = fingerprint.rank
        self._own = _suffix(fingerprint)
        _make_directory(path)
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._lease = -1
        try:
            self._require_own_directory()
            self._tokens = self._file(f"tokens{self._own}")
            self._description = self._file("session.json")
            self._lock()
            self._record = self._read_record() or self._create(fingerprint.shared())
            self._require(self._record.fingerprint, fingerprint.shared())
            self._require_own(fingerprint)
            self.layers = [
                self._file(f"layer.{index:03d}{self._own}") for index in range(fingerprint.layers)
            ]
            self._ensure_files(fingerprint)
            if self._lease < 0:
                self._lease = self._tokens.lease()
            self.stored = self._valid_tokens(fingerprint.layers)
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
        self._tokens.append([memoryview(ids).cast("B")], at * _TOKEN_BYTES)

    def end_round(self, tokens: int) -> None:
        """Note that a round ended with `tokens` tokens in the session; rank 0 writes it down."""
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

    def offer(self) -> SessionOffer:
        """What the daemon will offer of the files, to be used before they are cut."""
        return SessionOffer(self._directory)

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

    def _file(self, name: str) -> SessionFile:
        return SessionFile(self._directory, self.path / name)

    def _lock(self) -> None:
        """One sequence has one writer: of the directory, or of a rank's files in it."""
        locked = self._directory
        if self._ranks > 1:
            self._tokens.ensure(_TOKENS_ARE)
            locked = self._lease = self._tokens.lease()
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"rank {self._rank} of session" if self._ranks > 1 else "session"
            raise SessionBusyError(
                f"{what} {self.path} is open in another cache or process: close it there first"
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
        self._description.replace(record.encode(), tag=self._own)
        return record

    def _require_own_directory(self) -> None:
        """Who made it for us would read what we write."""
        if os.geteuid() not in (0, os.fstat(self._directory).st_uid):
            raise NotASessionError(f"{self.path} belongs to another user: choose another name")

    def _require_no_foreign_files(self) -> None:
        names = os.listdir(self._directory)
        ours = {"session.json", temporary_of(self._description.path, self._own).name}
        if self._ranks > 1:
            # Another rank may be creating the session now.
            ours.update(name for name in names if _OF_A_RANK.search(name))
        foreign = sorted(set(names) - ours)
        if foreign:
            raise NotASessionError(
                f"{self.path} holds {foreign[0]!r} but no session.json: choose another name"
            )

    def _require(self, stored: Fingerprint, mine: Fingerprint) -> None:
        different = stored.differences(mine)
        if different:
            raise FingerprintError(
                f"session {self.path} was written by [{stored}], this model is [{mine}]; "
                f"they differ in {', '.join(different)}: choose another name"
            )

    def _require_own(self, fingerprint: Fingerprint) -> None:
        """A rank's share of the weights is its own: a file beside its layers names it."""
        if self._ranks == 1:
            return
        own = self._file(f"fingerprint{self._own}")
        try:
            stored = Fingerprint.from_json(json.loads(own.read()))
        except FileNotFoundError:
            own.replace(json.dumps(fingerprint.to_json()).encode())
        else:
            self._require(stored, fingerprint)

    def _ensure_files(self, fingerprint: Fingerprint) -> None:
        self._tokens.ensure(_TOKENS_ARE)
        layout = fingerprint.row_layout()
        shape = ",".join(map(str, layout.shape))
        for layer in self.layers:
            layer.ensure({"dtype": layout.dtype_name, "shape": shape})

    def _valid_tokens(self, layers: int) -> int:
        """What every file of every rank has: a crash may leave one rank behind another."""
        lengths = [layer.size() // self._row_bytes for layer in self.layers]
        lengths.append(self._tokens.size() // _TOKEN_BYTES)
        for rank in range(self._ranks):
            if rank != self._rank:
                lengths += self._lengths_of(rank, layers)
        return min(lengths)

    def _lengths_of(self, rank: int, layers: int) -> Iterator[int]:
        widths = {f"layer.{index:03d}.r{rank}": self._row_bytes for index in range(layers)}
        for name, width in {**widths, f"tokens.r{rank}": _TOKEN_BYTES}.items():
            try:
                yield self._file(name).size() // width
            except FileNotFoundError:
                yield 0

    def _write_record(self, record: Record) -> None:
        if self._rank == 0:
            self._description.replace(record.encode())
        self._record = record


def _suffix(fingerprint: Fingerprint) -> str:
    return f".r{fingerprint.rank}" if fingerprint.ranks > 1 else ""


def _make_directory(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)

"""The summary slot: a small vector a round, and an index that finds the round a question is about.

A summary is so short that all of them stay in memory while the KV is cold. The vector of a
question is compared with them, and only the round that answers it is brought in.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

DIMENSIONS = 128
"""Numbers in a summary."""

Vector = npt.NDArray[np.float32]
Encoder = Callable[[str], npt.NDArray[np.floating[Any]]]
"""What makes a vector of a text: any length, see `project`."""

_FILE = "summary"
_HEAD = struct.Struct("<IIQ")
_TOKEN_BYTES = 4
_CHECKED_BYTES = _HEAD.size + DIMENSIONS * 4
_RECORD_BYTES = _CHECKED_BYTES + 8
_PROJECTION_SEED = 2048


@dataclass(frozen=True)
class Match:
    """A round that a question may be about; `score` is the cosine, at most 1."""

    session: str
    round: int
    score: float


class SummarySlot:
    """The summaries of one session: the file `summary` beside its layers.

    A record a round, at its number's place, little-endian: round (4 bytes), tokens at the
    round's end (4), xxh3-64 of the ids of the round's tokens (8), the vector (128 float32),
    xxh3-64 of all before (8). A record that is torn, or that speaks of tokens which the
    session has no more, is as if it were not there.
    """

    def __init__(self, directory: Path) -> None:
        """Of the session at `directory`, which need not have summaries."""
        self._directory = directory

    def put(self, round: int, vector: npt.ArrayLike) -> None:
        """Store the summary of a round that has ended, `[128]` numbers.

        Raises:
            IndexError: no such round has ended in the session.
            ValueError: the vector has another length, or is not finite.
            OSError: as the filesystem reports it.
        """
        numbers = np.asarray(vector, dtype="<f4")
        if numbers.shape != (DIMENSIONS,) or not np.isfinite(numbers).all():
            raise ValueError(
                f"a summary is {DIMENSIONS} finite numbers, not {list(numbers.shape)}: "
                f"`project` makes one of a longer vector"
            )
        heads = _heads(self._directory)
        if not 0 <= round < len(heads):
            raise IndexError(
                f"round {round} has not ended in {self._directory}, which has {len(heads)}: "
                f"call end_round() before"
            )
        checked = heads[round] + numbers.tobytes()
        record = checked + _checksum(checked)
        fd = os.open(self._directory / _FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(fd, record, round * _RECORD_BYTES)
        finally:
            os.close(fd)

    def get(self, round: int) -> Vector | None:
        """The summary of a round; None if there is none, or none that is valid."""
        return dict(self).get(round)

    def __iter__(self) -> Iterator[tuple[int, Vector]]:
        """Round and summary of all that are valid."""
        try:
            content = (self._directory / _FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return
        for round, head in enumerate(_heads(self._directory)):
            record = content[round * _RECORD_BYTES :][:_RECORD_BYTES]
            checked = record[:_CHECKED_BYTES]
            if record == checked + _checksum(checked) and checked.startswith(head):
                yield round, np.frombuffer(checked, "<f4", offset=_HEAD.size)


class SummaryIndex:
    """All summaries of the sessions in one directory, in memory: 512 bytes a round."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Read what is there now; OSError as the filesystem reports it."""
        self._directory = Path(directory)
        self._places: list[tuple[str, int]] = []
        self._vectors = np.empty((0, DIMENSIONS), np.float32)
        self.refresh()

    def refresh(self) -> None:
        """Read the summaries again."""
        found = [
            (name, round, vector)
            for name in sorted(os.listdir(self._directory))
            for round, vector in SummarySlot(self._directory / name)
        ]
        self._places = [(name, round) for name, round, _ in found]
        vectors = [vector for *_, vector in found]
        self._vectors = _unit(np.array(vectors, np.float32).reshape(-1, DIMENSIONS))

    def search(self, vector: npt.ArrayLike, k: int = 1) -> list[Match]:
        """The `k` rounds whose summaries are nearest to `vector`, `[128]`, the nearest first."""
        scores = self._vectors @ _unit(np.asarray(vector, np.float32))
        nearest = np.argsort(-scores, kind="stable")[:k]
        found = [(self._places[at], float(scores[at])) for at in nearest]
        return [Match(session, round, score) for (session, round), score in found]


def project(vector: npt.ArrayLike) -> Vector:
    """A vector of at least 128 numbers as a summary.

    One of 128 is taken as it is. A longer one is projected onto 128 orthonormal directions,
    drawn once for its length and the same everywhere: angles between vectors are kept up to
    about 1/sqrt(128). ValueError if it is shorter.
    """
    numbers = np.asarray(vector, np.float32)
    if numbers.ndim != 1 or len(numbers) < DIMENSIONS:
        raise ValueError(f"{list(numbers.shape)} is no vector of at least {DIMENSIONS} numbers")
    if len(numbers) == DIMENSIONS:
        return numbers
    projected: Vector = numbers @ _directions(len(numbers))
    return projected


@cache
def _directions(length: int) -> Vector:
    """`[length, 128]`, columns orthonormal."""
    # Vectors are stored, so the directions must never change: numpy keeps the numbers of
    # RandomState for good, and only the signs of a QR decomposition are left open.
    drawn = np.random.RandomState(_PROJECTION_SEED).standard_normal((length, DIMENSIONS))
    columns, triangle = np.linalg.qr(drawn)
    directions: Vector = (columns * np.sign(np.diagonal(triangle))).astype(np.float32)
    return directions


def _heads(directory: Path) -> list[bytes]:
    """What the record of each round of a session begins with, as its tokens are now."""
    try:
        rounds: list[int] = json.loads((directory / "session.json").read_bytes())["rounds"]
        tokens = (directory / "tokens").read_bytes()
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return []  # what another program wrote has no rounds
    ends = [end for end in rounds if end * _TOKEN_BYTES <= len(tokens)]
    return [
        _HEAD.pack(number, end, _digest(tokens[first * _TOKEN_BYTES : end * _TOKEN_BYTES]))
        for number, (first, end) in enumerate(pairwise([0, *ends]))
    ]


def _digest(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content)


def _checksum(content: bytes) -> bytes:
    return _digest(content).to_bytes(8, "little")


def _unit(vectors: Vector) -> Vector:
    """Scaled to length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Vector = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled

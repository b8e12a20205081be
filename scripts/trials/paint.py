"""Patterns that say whose they are: each line of 64 bytes names the file that it was written to,
its version and its place there, and proves it.

A *mark* is the number of a file that nobody else has. A line is eight words: a magic number,
mark, version, the line's number in the file, and four that mix these. So a line of another
session, of another place, or of bytes that were overwritten is known by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

LINE = 64
_MAGIC = 0x746E696170205346
_WORDS = LINE // 8
_Words = npt.NDArray[np.uint64]


def mark_of(name: str) -> int:
    """The mark of a file that is known by a name."""
    return xxhash.xxh3_64_intdigest(name.encode())


def paint(mark: int, version: int, start: int, end: int) -> bytes:
    """The bytes [start, end) of a pattern without an end."""
    first = start // LINE
    numbers = np.arange(first, -(-end // LINE), dtype=np.uint64)
    lines = np.empty((len(numbers), _WORDS), np.uint64)
    lines[:, 0], lines[:, 1], lines[:, 2], lines[:, 3] = _MAGIC, mark, version, numbers
    lines[:, 4:] = _proof(lines[:, 1], lines[:, 2], numbers)
    skip = start - first * LINE
    return lines.tobytes()[skip : skip + end - start]


def _proof(marks: _Words, versions: _Words, numbers: _Words) -> _Words:
    """Four words a line, by the mixing steps of splitmix64."""
    seed = marks * np.uint64(0x9E3779B97F4A7C15) ^ versions * np.uint64(0xD1B54A32D192ED03)
    seed ^= numbers * np.uint64(0x8CB92BA72F3D8DD7)
    words: _Words = seed[:, np.newaxis] + np.arange(1, 5, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


@dataclass(frozen=True, slots=True)
class Lines:
    """The whole lines of a part of a file, `first` being the number of the first one."""

    words: _Words
    first: int

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, offset: int) -> Lines:
        """`offset` is a multiple of a line; what is left of a line at the end is passed over."""
        assert offset % LINE == 0
        words = np.frombuffer(data, np.uint64, len(data) // LINE * _WORDS)
        return cls(words.reshape(-1, _WORDS), offset // LINE)

    def wrong(self, marks: Collection[int], *, holes: bool = True) -> npt.NDArray[np.intp]:
        """Which are neither lines of these marks that lie where they were written nor zeros, where
        there may be holes."""
        words = self.words
        numbers = np.arange(self.first, self.first + len(words), dtype=np.uint64)
        own = np.isin(words[:, 1], np.array(sorted(marks), np.uint64))
        own &= (words[:, 0] == _MAGIC) & (words[:, 3] == numbers)
        own &= (words[:, 4:] == _proof(words[:, 1], words[:, 2], numbers)).all(axis=1)
        return np.flatnonzero(~own & words.any(axis=1) if holes else ~own)

    def describe(self, at: int) -> str:
        """One of them, as it is found."""
        magic, mark, version, number = (int(word) for word in self.words[at, :4])
        place = f"line {self.first + at} (byte {(self.first + at) * LINE})"
        if not self.words[at].any():
            return f"{place}: zeros"
        proof = _proof(*(self.words[at : at + 1, column] for column in (1, 2, 3)))[0]
        if magic != _MAGIC or (proof != self.words[at, 4:]).any():
            return f"{place}: bytes that nobody wrote so: {self.words[at].tobytes().hex(' ', 8)}"
        return f"{place}: line {number} of file {mark:016x}, version {version}"


@dataclass(frozen=True, slots=True)
class Stroke:
    """The bytes [start, end) of a file are those of a pattern."""

    mark: int
    version: int
    start: int
    end: int

    @property
    def data(self) -> bytes:
        return paint(self.mark, self.version, self.start, self.end)


@dataclass(frozen=True, slots=True)
class Painting:
    """What a file contains: strokes, the last on top; zeros elsewhere."""

    size: int = 0
    strokes: tuple[Stroke, ...] = ()

    def with_stroke(self, stroke: Stroke) -> Painting:
        kept = tuple(
            one for one in self.strokes if one.start < stroke.start or one.end > stroke.end
        )
        return Painting(max(self.size, stroke.end), (*kept, stroke))

    def cut(self, size: int) -> Painting:
        strokes = (replace(one, end=min(one.end, size)) for one in self.strokes)
        return Painting(size, tuple(one for one in strokes if one.start < one.end))

    def render(self) -> bytearray:
        content = bytearray(self.size)
        for stroke in self.strokes:
            content[stroke.start : stroke.end] = stroke.data
        return content


def difference(found: bytes | bytearray, expected: bytes | bytearray) -> str | None:
    """How these differ, where they do: the first place, and whose bytes are there."""
    if found == expected:
        return None
    length = min(len(found), len(expected))
    left, right = np.frombuffer(found, np.uint8, length), np.frombuffer(expected, np.uint8, length)
    differs = np.flatnonzero(left != right)
    first = int(differs[0]) if len(differs) else length
    sizes = f"{len(found)} bytes, {len(expected)} expected, {len(differs)} differ"
    told = f"wrong from byte {first} on ({sizes})"
    line = first // LINE
    for name, data in (("found", found), ("expected", expected)):
        lines = Lines.of(data, 0)
        if line < len(lines.words):
            told += f"; {name} {lines.describe(line)}"
    return told

"""What devices do to a ring: each damage gives another image, and the blocks that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kvfs.engine.format import BLOCK, DATA_START
from tests.rot.anatomy import Anatomy, Structure

_RUN_MAX = 40


@dataclass(frozen=True, slots=True)
class Damaged:
    """An image that is not what was written. `is_wide`: more than one structure may be hit."""

    image: bytearray
    hit: frozenset[int]
    what: str
    is_wide: bool


@dataclass(frozen=True, slots=True)
class _Draw:
    """One damage being made, of choices by `random`."""

    anatomy: Anatomy
    random: Random

    @property
    def whole(self) -> bytes:
        return self.anatomy.ring.image

    def structure(self) -> Structure:
        """Of each kind as often: nine in ten are in use."""
        kinds = self.anatomy.structures
        kind = self.random.choice(sorted(kinds))
        used = [one for one in kinds[kind] if one.is_used]
        every = kinds[kind] if not used or self.random.random() < 0.1 else used
        return self.random.choice(every)

    def block(self) -> int:
        """One in use, or next to it."""
        return self.random.choice(sorted(self.structure().blocks))

    def segment(self) -> tuple[int, int]:
        """First and last block of one in which something is."""
        geometry = self.anatomy.geometry
        address = max(DATA_START, self.block() * BLOCK)
        start = geometry.address(geometry.segment(address)) // BLOCK
        return start, start + geometry.segment_size // BLOCK

    def span(self) -> tuple[int, int]:
        """Some blocks from one in use on."""
        start = self.block()
        return start, min(start + self.random.randint(1, _RUN_MAX), len(self.whole) // BLOCK)

    def other(self) -> bytes:
        return self.random.choice(self.anatomy.ring.stages)


# Where new bytes come, and which: offset and bytes.
_Change = Iterator[tuple[int, bytes]]


def _flipped(draw: _Draw) -> _Change:
    """Some bits of one structure."""
    one = draw.structure()
    for _ in range(draw.random.choice((1, 1, 1, 2, 8))):
        at = one.address + draw.random.randrange(one.length)
        yield at, bytes([draw.whole[at] ^ 1 << draw.random.randrange(8)])


def _zeroed_block(draw: _Draw) -> _Change:
    yield draw.block() * BLOCK, bytes(BLOCK)


def _noise_in_a_block(draw: _Draw) -> _Change:
    yield draw.block() * BLOCK, draw.random.randbytes(BLOCK)


def _zeroed_run(draw: _Draw) -> _Change:
    start, end = draw.span()
    yield start * BLOCK, bytes((end - start) * BLOCK)


def _misdirected(draw: _Draw) -> _Change:
    """A block lands elsewhere, its own place stays as it was."""
    block, place = draw.block(), draw.block()
    yield place * BLOCK, _part(draw.whole, block, block + 1)
    yield block * BLOCK, _part(draw.other(), block, block + 1)


def _swapped(draw: _Draw) -> _Change:
    """Two blocks lie where the other belongs."""
    one, two = draw.block(), draw.block()
    yield one * BLOCK, _part(draw.whole, two, two + 1)
    yield two * BLOCK, _part(draw.whole, one, one + 1)


def _lost_block(draw: _Draw) -> _Change:
    block = draw.block()
    yield block * BLOCK, _part(draw.other(), block, block + 1)


def _lost_run(draw: _Draw) -> _Change:
    start, end = draw.span()
    yield start * BLOCK, _part(draw.other(), start, end)


def _stale_segment(draw: _Draw) -> _Change:
    start, end = draw.segment()
    yield start * BLOCK, _part(draw.other(), start, end)


def _zeroed_segment(draw: _Draw) -> _Change:
    start, end = draw.segment()
    yield start * BLOCK, bytes((end - start) * BLOCK)


def _of_the_twin(draw: _Draw) -> _Change:
    """Blocks of a copy of this ring, which went on by itself."""
    start, end = draw.span()
    yield start * BLOCK, _part(draw.anatomy.ring.twin, start, end)


def _of_a_stranger(draw: _Draw) -> _Change:
    """Blocks of another ring, from where they lay there or elsewhere."""
    start, end = draw.span()
    stranger = draw.anatomy.ring.stranger
    source = draw.random.choice((start, draw.random.randrange(DATA_START // BLOCK, 2048)))
    yield start * BLOCK, _part(stranger, source, source + end - start)


def _cut_and_filled(draw: _Draw) -> _Change:
    """The device was cut, and made as long as before with zeros."""
    start = draw.block()
    yield start * BLOCK, bytes(len(draw.whole) - start * BLOCK)


def _part(image: bytes, start: int, end: int) -> bytes:
    return image[start * BLOCK : end * BLOCK]


_WIDE = (
    _zeroed_run, _misdirected, _swapped, _lost_run, _stale_segment, _zeroed_segment, _of_the_twin,
    _of_a_stranger, _cut_and_filled,
)  # fmt: skip
_NARROW = (_flipped, _flipped, _flipped, _zeroed_block, _noise_in_a_block, _lost_block)
KINDS: dict[str, Callable[[_Draw], _Change]] = {
    kind.__name__.strip("_"): kind for kind in (*_NARROW, *_WIDE)
}


def damaged(anatomy: Anatomy, random: Random, kind: str | None = None) -> Damaged:
    """A damage of any kind, or of this one."""
    make = random.choice((*_NARROW, *_WIDE)) if kind is None else KINDS[kind]
    image = bytearray(anatomy.ring.image)
    touched: set[int] = set()
    for at, data in make(_Draw(anatomy, random)):
        image[at : at + len(data)] = data
        touched.update(range(at // BLOCK, -(-(at + len(data)) // BLOCK)))
    whole = anatomy.ring.image
    hit = frozenset(b for b in touched if _part(whole, b, b + 1) != _part(image, b, b + 1))
    name = make.__name__.strip("_").replace("_", " ")
    return Damaged(image, hit, f"{name}: {_described(anatomy, hit)}", make in _WIDE)


def _described(anatomy: Anatomy, hit: frozenset[int]) -> str:
    kinds = {one.kind for same in anatomy.structures.values() for one in same if one.blocks & hit}
    return f"{len(hit)} blocks from {min(hit, default=0)} on ({', '.join(sorted(kinds))})"

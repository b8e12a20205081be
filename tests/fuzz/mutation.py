"""Bytes made wrong at random: as they rot, as they are cut, and as somebody would forge them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_EDITS_MAX = 4
_SPAN_MAX = 64
_WIDTHS = (1, 2, 4, 8)


def mutated(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """`data` with a few edits; parts of `others` may be put into it."""
    result = bytearray(data)
    for _ in range(random.randint(1, _EDITS_MAX)):
        _edit(random, result, others)
    return bytes(result)


def _edit(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = random.randint(0, len(data))
    match random.randrange(8):
        case 0 if data:
            data[at % len(data)] ^= 1 << random.randrange(8)
        case 1:
            _put(data, at, random.randbytes(random.randint(1, 4)))
        case 2 | 3:
            # Numbers of a struct mostly lie at multiples of their width.
            width = random.choice(_WIDTHS)
            order = "little" if random.randrange(4) else "big"
            number = _number(random, 8 * width).to_bytes(width, order)  # type: ignore[arg-type]
            _put(data, at // width * width if random.randrange(4) else at, number)
        case 4:
            del data[at : at + random.randint(1, _SPAN_MAX)]
        case 5:
            start = random.randint(0, len(data))
            data[at:at] = data[start : start + random.randint(1, _SPAN_MAX)]
        case 6 if others:
            other = random.choice(others)
            start = random.randint(0, len(other))
            _put(data, at, other[start : start + random.randint(1, 4 * _SPAN_MAX)])
        case _:
            del data[at:]


def _put(data: bytearray, at: int, new: bytes) -> None:
    """Over what is there, and never beyond its end."""
    room = max(0, len(data) - at)
    data[at : at + len(new)] = new[:room]


def _number(random: Random, bits: int) -> int:
    """Near 0, near a power of two, near the largest, or any."""
    top = (1 << bits) - 1
    near = random.choice((0, top, 1 << random.randrange(bits), random.getrandbits(bits)))
    return (near + random.randint(-2, 2)) & top

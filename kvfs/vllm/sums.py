"""The file `sums` of a session: a checksum of each block in each layer.

The ring checks what it stored; this checks that what a file holds is what belongs there: not
cut, not another file's, not of other tokens.

A header (magic `KVFSSUMS`, tokens in a block, layers: 4 bytes each), then 8 bytes for each
layer of the first block, of the second, ...; all little-endian.
"""

from __future__ import annotations

import struct

import numpy as np

from kvfs.vllm.chains import Numbers

NAME = "sums"
_HEADER = struct.Struct("<8sII")
_MAGIC = b"KVFSSUMS"
_SUM_BYTES = 8


def header(block: int, layers: int) -> bytes:
    """What the file begins with."""
    return _HEADER.pack(_MAGIC, block, layers)


def place(blocks: int, layers: int) -> int:
    """The byte at which the sums behind so many blocks begin."""
    return _HEADER.size + blocks * layers * _SUM_BYTES


def parse(content: bytes, block: int, layers: int) -> Numbers:
    """Sums by block and layer.

    Raises:
        ValueError: it is not such a file, or one for other blocks or layers.
    """
    if content[: _HEADER.size] != header(block, layers):
        raise ValueError(f"no sums for blocks of {block} tokens and {layers} layers")
    numbers = np.frombuffer(content[_HEADER.size :], np.uint8)
    whole = len(numbers) // (layers * _SUM_BYTES) * layers * _SUM_BYTES
    return numbers[:whole].view("<u8").reshape(-1, layers)

"""What tests do to an image as a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvfs.engine.format import BLOCK, Feature, Superblock, checksum

_CHUNK = 1024**2


def digest(image: Path) -> str:
    """Of all its bytes."""
    found = hashlib.sha256()
    with image.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def sealed(body: bytes) -> bytes:
    """A block with its checksum put right."""
    body = body[: BLOCK - 8]
    return body + checksum(body).to_bytes(8, "little")


def from_a_newer_release(superblock: Superblock, features: Mapping[int, str]) -> bytes:
    """The block as a release would write it that knows these features, by bit."""
    bits = sum(1 << bit for bit in features)
    names = ",".join(features[bit] for bit in sorted(features)).encode()
    packed = replace(superblock, features=Feature(bits)).pack()
    return sealed(packed[: Superblock.NAMES_AT] + names.ljust(512, b"\0"))

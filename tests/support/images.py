"""What tests do to an image as a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CHUNK = 1024**2


def digest(image: Path) -> str:
    """Of all its bytes."""
    found = hashlib.sha256()
    with image.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()

"""The header of a safetensors file: a length (8 bytes), JSON, and behind it the bytes of all
tensors without gaps. The format is that of github.com/huggingface/safetensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mount_tools.moving.entries import RefusedError

HEADER_MAX = 8 * 1024 * 1024
_LENGTH = struct.Struct("<Q")
LENGTH_SIZE = _LENGTH.size
_METADATA = "__metadata__"
_ALIGNMENT = 8
_SIZE_MAX = 1 << 62
_RANK_MAX = 16

# Names of element types there and here, and the size of an element in bytes.
TYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": (None, 8), "U32": (None, 4), "U16": (None, 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
TYPE_OF = {name: theirs for theirs, (name, _) in TYPES.items() if name is not None}


@dataclass(frozen=True, slots=True)
class Tensor:
    """`dtype` as the file names it; `size` is what it takes, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * TYPES[self.dtype][1]


def pack_header(tensors: Sequence[Tensor], metadata: dict[str, str]) -> bytes:
    """Of a file with these tensors, in this order."""
    document: dict[str, Any] = {_METADATA: metadata}
    at = 0
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    packed = json.dumps(document, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % _ALIGNMENT)
    if len(packed) > HEADER_MAX:
        raise RefusedError("too many files for one header: export the session with --tar")
    return _LENGTH.pack(len(packed)) + packed


def header_length(first: bytes) -> int:
    """Of the JSON that follows the first 8 bytes. Raises RefusedError."""
    (length,) = _LENGTH.unpack(first)
    if length > HEADER_MAX:
        raise RefusedError(f"a safetensors header of {length} bytes: more than a session has")
    return int(length)


def parse_header(packed: bytes) -> tuple[list[Tensor], dict[str, str]]:
    """Tensors in the order of their bytes, and the metadata. Raises RefusedError for what is no
    such header, and where tensors overlap or leave gaps."""
    try:
        document = json.loads(packed, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise RefusedError("a safetensors header that is no JSON object, or says a thing twice")
    metadata = document.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(map(_is_text, metadata.values())):
        raise RefusedError("a safetensors header whose metadata are no texts")
    if not all(map(_is_text, (*metadata, *document))):
        raise RefusedError("a safetensors header with a name that is no text")
    placed = sorted((_placed(name, told) for name, told in document.items()), key=_place)
    end = 0
    for start, stop, tensor in placed:
        if start != end or stop - start != tensor.size:
            raise RefusedError(f"tensor {tensor.name[:200]!r} is not where it should be")
        end = stop
    return [tensor for _, _, tensor in placed], metadata


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _place(placed: tuple[int, int, Tensor]) -> tuple[int, int]:
    return placed[:2]


def _is_text(value: Any) -> bool:
    """JSON may have halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _placed(name: str, told: Any) -> tuple[int, int, Tensor]:
    refused = RefusedError(f"tensor {name[:200]!r} is described wrongly")
    if not isinstance(told, dict) or not isinstance(told.get("dtype"), str):
        raise refused
    if told["dtype"] not in TYPES:
        raise RefusedError(f"tensor {name[:200]!r} is of type {told['dtype'][:20]!r}, unknown here")
    shape, offsets = _numbers(told.get("shape")), _numbers(told.get("data_offsets"))
    if shape is None or len(shape) > _RANK_MAX or offsets is None or len(offsets) != 2:
        raise refused
    return offsets[0], offsets[1], Tensor(name, told["dtype"], tuple(shape))


def _numbers(value: Any) -> list[int] | None:
    is_list = isinstance(value, list) and all(
        type(one) is int and 0 <= one <= _SIZE_MAX for one in value
    )
    return value if is_list else None

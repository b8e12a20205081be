"""Row 12: lossless compression of real KV: what it saves, how fast it is undone, and that it is
left alone where the disk is faster.

The KV of SmolLM2 for text and tool results, bfloat16, saved by the adapter.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from kvfs.engine.codec import Codec, decode, encode, layout_of
from kvfs.torch import KVFSCache
from scripts.bench.disk import pwritev, timed, touched
from scripts.bench.mount import fresh_mount
from scripts.bench.plan import Plan
from scripts.bench.real_kv import load_with_text
from scripts.bench.rows import Row, bound_row

TOKENS = 2048
RATIO_MIN = 1.45
DECODE_GB_S_MIN = 2.0
THREADS = 2
# Of the batches of `auto` one in 64 is compressed, to see whether that would pay now.
RAW_SHARE_MIN = 63 / 64
_REPEATS = 8
_COPIES = 6
_LAYOUT_XATTRS = ("user.kvfs.dtype", "user.kvfs.shape")


@dataclass(frozen=True, slots=True)
class Packed:
    """An extent as it is stored, and what it was made of."""

    codec: Codec
    item_size: int
    stored: memoryview
    plain: memoryview


def measure(plan: Plan) -> list[Row]:
    with fresh_mount(plan.directory, "4G", "--warm", "1G") as mount:
        os.setxattr(mount.point, "user.kvfs.codec", b"planes")
        session = _save(mount.point)
        layers = sorted(session.glob("layer.*"))
        size = sum(path.stat().st_size for path in layers)
        stored = sum(path.stat().st_blocks * 512 for path in layers)
        packed = [extent for path in layers for extent in _packed(path)]
        speeds = [_decode_speed(packed) for _ in range(plan.rounds + 1)][1:]
        encode_speed = _encode_speed(layers)
        disk_speed = pwritev(plan.directory / "raw", 256 * 1024 * 1024)
        os.setxattr(mount.point, "user.kvfs.codec", b"auto")
        copies = [_copy(layers, mount.point / f"copy-{number}") for number in range(_COPIES + 1)]
        # The first one tells `auto` how fast encoder and disk are.
        shares = [_raw_share(copy) for copy in copies[1:]]
    return [
        bound_row("12a", f"KV of {TOKENS} tokens in planes: bytes for one in whole blocks",
                  [size / stored], "x", at_least=RATIO_MIN, remark="aim 1.5"),
        bound_row("12b", f"the same decoded, {THREADS} threads", speeds, "GB/s",
                  at_least=DECODE_GB_S_MIN, remark=f"{len(packed)} extents, encoded at "
                  f"{encode_speed:.2f} GB/s by one thread"),
        bound_row("12c", "the same with `auto`: share stored raw", shares, "x",
                  at_least=RAW_SHARE_MIN, remark=f"the disk takes {disk_speed / 1000:.2f} GB/s; "
                  f"one batch in 64 is a probe"),
    ]  # fmt: skip


def _save(mountpoint: Path) -> Path:
    model, ids = load_with_text(TOKENS)
    with torch.no_grad(), KVFSCache.open(mountpoint, "agent", model) as cache:
        model(torch.tensor([ids]), cache=cache, logits_to_keep=1)
        cache.sync()
        return Path(cache.path)


def _packed(path: Path) -> list[Packed]:
    """The extents of a layer file, encoded as the daemon did it."""
    plain = memoryview(path.read_bytes())
    layout = layout_of(*(os.getxattr(path, name) for name in _LAYOUT_XATTRS))
    found = []
    for extent in _extents(path):
        part = plain[extent["offset"] : extent["offset"] + extent["length"]]
        stored = encode(Codec.PLANES, layout, part)
        codec = Codec.NONE if stored is None else Codec.PLANES
        found.append(Packed(codec, layout.item_size, memoryview(stored or part), part))
    return found


def _decode_speed(packed: list[Packed]) -> float:
    """GB/s of plain bytes."""
    longest = max(len(extent.plain) for extent in packed)
    workers = [(packed[number::THREADS], touched(longest)) for number in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        seconds = timed(lambda: list(pool.map(_decode_all, workers)))
    for extent in packed:
        out = workers[0][1][: len(extent.plain)]
        decode(extent.codec, extent.item_size, extent.stored, out)
        if out != extent.plain:
            raise SystemExit("an extent is not what it was")
    return _REPEATS * sum(len(extent.plain) for extent in packed) / seconds / 1e9


def _decode_all(worker: tuple[list[Packed], memoryview]) -> None:
    extents, buffer = worker
    for _ in range(_REPEATS):
        for extent in extents:
            out = buffer[: len(extent.plain)]
            decode(extent.codec, extent.item_size, extent.stored, out)


def _encode_speed(layers: list[Path]) -> float:
    """GB/s of one thread."""
    size = sum(path.stat().st_size for path in layers)
    contents = [(path, layout_of(*(os.getxattr(path, x) for x in _LAYOUT_XATTRS)),
                 memoryview(path.read_bytes())) for path in layers]  # fmt: skip
    return size / timed(lambda: [encode(Codec.PLANES, layout, data)
                                 for _, layout, data in contents]) / 1e9  # fmt: skip


def _copy(layers: list[Path], session: Path) -> Path:
    """Another session of the same bytes, durable when this returns."""
    session.mkdir()
    for layer in layers:
        path = session / layer.name
        with path.open("wb") as file:
            for name in _LAYOUT_XATTRS:
                os.setxattr(path, name, os.getxattr(layer, name))
            file.write(layer.read_bytes())
    fd = os.open(session, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return session


def _raw_share(session: Path) -> float:
    extents = [extent for path in session.iterdir() for extent in _extents(path)]
    raw = sum(extent["length"] for extent in extents if extent["codec"] == "none")
    return float(raw / sum(extent["length"] for extent in extents))


def _extents(path: Path) -> list[dict[str, int | str]]:
    found: list[dict[str, int | str]] = json.loads(os.getxattr(path, "user.kvfs.extents"))
    return found

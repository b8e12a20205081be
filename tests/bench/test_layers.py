"""What the benchmarks do with layers: a wrong byte, wherever it is, ends them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from scripts.bench import mapped
from scripts.bench.layers import check, cut, layer_paths, noise, read, restore, save

LAYERS, LAYER_SIZE = 3, 16 * 4096


@pytest.mark.parametrize("direct", [False, True])
def test_what_was_saved_is_restored(tmp_path: Path, direct: bool) -> None:
    data, found = (noise(LAYERS * LAYER_SIZE) for _ in range(2))
    paths = layer_paths(tmp_path, LAYERS)
    save(paths, cut(data, LAYER_SIZE), writers=2)
    restore(paths, cut(found, LAYER_SIZE), direct=direct)
    check(found, data)


@pytest.mark.parametrize("at", [0, 4095, 2 * LAYER_SIZE - 1])
def test_a_wrong_byte_is_found(at: int) -> None:
    data = noise(2 * LAYER_SIZE)
    found = bytearray(data)
    found[at] ^= 1
    with pytest.raises(SystemExit, match="wrong bytes"):
        check(memoryview(found), data)


def test_a_file_that_ends_early_is_found(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(bytes(5000))
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(SystemExit, match="ends early"):
        read(fd, memoryview(bytearray(5001)), at_once=4096)
    os.close(fd)


def test_layers_in_parts_are_put_together(tmp_path: Path) -> None:
    data = noise(2 * LAYER_SIZE)
    paths = [str(tmp_path / name) for name in ("0.kvmap", "1.kvmap")]
    # The first layer: its second half in the one file, its first half in the other.
    half = LAYER_SIZE // 2
    Path(paths[0]).write_bytes(bytes(4096) + data[half:LAYER_SIZE])
    Path(paths[1]).write_bytes(bytes(data[:half]) + data[LAYER_SIZE:])
    parts = [
        [mapped.Part(paths[1], 0, half, 0), mapped.Part(paths[0], 4096, half, half)],
        [mapped.Part(paths[1], half, LAYER_SIZE, 0)],
    ]
    copied, found = np.zeros(2 * LAYER_SIZE, np.uint8), np.zeros(2 * LAYER_SIZE, np.uint8)
    mapped.copy_out(parts, mapped.map_files(parts), [copied[:LAYER_SIZE], copied[LAYER_SIZE:]])
    mapped.read_out(parts, cut(memoryview(found), LAYER_SIZE))
    check(memoryview(copied), data)
    check(memoryview(found), data)

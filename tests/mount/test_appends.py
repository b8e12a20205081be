"""Decoding appends a little to every layer at each step: the ring gets large frames."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.support.mounter import Mounter

LAYERS = 32
STEPS = 64
STEP_SIZE = 4096


def test_a_turn_of_small_appends_costs_little_more_than_its_bytes(
    mounter: Mounter, kv_mount: Path
) -> None:
    rng = random.Random(1)
    files = [
        os.open(kv_mount / f"layer.{n:03}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for n in range(LAYERS)
    ]
    contents = [bytearray() for _ in files]
    before = mounter.stats()["counters"]["device_written"]
    for _ in range(3):
        for _ in range(STEPS):
            for fd, content in zip(files, contents, strict=True):
                data = rng.randbytes(STEP_SIZE)
                assert os.write(fd, data) == STEP_SIZE
                content += data
        os.fsync(files[0])
    written = mounter.stats()["counters"]["device_written"] - before
    payload = sum(map(len, contents))
    assert payload == 3 * STEPS * LAYERS * STEP_SIZE
    assert written <= 1.1 * payload
    for fd in files:
        os.close(fd)
    mounter.umount()
    mounter.mount()
    for number, content in enumerate(contents):
        assert (kv_mount / f"layer.{number:03}").read_bytes() == content

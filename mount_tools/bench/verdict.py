"""What the figures say, in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from mount_tools.bench.work import Row

GOOD, FAIR = 0.8, 0.5
_PLAIN_SHARE = 0.6
COMPRESSED = 1.05
_FUSE_LIMIT = 3000.0  # MB/s that one reader gets through FUSE


def verdict(rows: Mapping[str, Row], compressed: float, load: float, mountpoint: Path) -> str:
    """`compressed`: how many times smaller the session is stored. `load`: how many threads wanted
    to run before it began, by processor."""
    direct, plain = rows["restore, cold, O_DIRECT"], rows["restore, cold, plain reads"]
    speed = float(np.median(direct.kvfs))
    if direct.ratio is None:
        return f"restore reaches {speed:.0f} MB/s; the device was not measured beside it"
    found = f"restore reaches {direct.ratio:.2f} of the device"
    if direct.ratio >= GOOD:
        grade, advice = "good", list(_of_plain_reads(speed, plain, mountpoint))
    else:
        grade = "fair" if direct.ratio >= FAIR else "poor"
        advice = list(_of_restore(direct, compressed, load))
    return "; ".join([f"{found}: {grade}", *advice])


def _of_restore(direct: Row, compressed: float, load: float) -> Iterator[str]:
    if load > 1:
        yield f"others kept the processors busy (a load of {load:.1f} each): measure again without"
    elif compressed > COMPRESSED:
        yield (
            f"it is stored {compressed:.1f} times smaller, and unpacking may be what it waits for: "
            "try setfattr -n user.kvfs.codec -v none DIR for what is written next"
        )
    elif float(np.median(direct.device)) > _FUSE_LIMIT:
        yield "FUSE carries no more: kvfs.torch maps warm files instead, and prefetches"
    else:
        yield "look at what else uses the device, and at kvfs stat MNT"


def _of_plain_reads(speed: float, plain: Row, mountpoint: Path) -> Iterator[str]:
    if float(np.median(plain.kvfs)) < _PLAIN_SHARE * speed:
        device = mountpoint.stat().st_dev
        bdi = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        yield f"plain reads are slower: open with O_DIRECT, or raise {bdi}"

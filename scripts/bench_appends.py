"""What decoding costs on the device: small appends to every layer, one fsync a turn.

    python scripts/bench_appends.py [--dir DIR] [--turns 8]

32 layer files, 64 steps a turn, 4 KiB a layer and step, one fsync at the turn's end.
Prints the bytes written on the device (frames with their heads, as the daemon counts
them) over the bytes appended, before any checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

KVFS = str(Path(sys.executable).with_name("kvfs"))
LAYERS, STEPS, STEP_SIZE = 32, 64, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk")
    parser.add_argument("--turns", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        image, mountpoint = Path(name) / "ring.img", Path(name) / "mnt"
        mountpoint.mkdir()
        kvfs("mkfs", image, "--size", "2G")
        kvfs("mount", mountpoint, image, "--log", Path(name) / "log")
        try:
            written = append(mountpoint, arguments.turns)
        finally:
            kvfs("umount", mountpoint)
    payload = arguments.turns * STEPS * LAYERS * STEP_SIZE
    print(f"{payload} bytes appended, {written} written on the device: {written / payload:.3f}")


def append(mountpoint: Path, turns: int) -> int:
    """Bytes written on the device for it."""
    session = mountpoint / "session"
    session.mkdir()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    layers = [os.open(session / f"layer.{n:03}", flags, 0o600) for n in range(LAYERS)]
    before = device_written(mountpoint)
    for _ in range(turns):
        for _ in range(STEPS):
            for fd in layers:
                os.write(fd, os.urandom(STEP_SIZE))
        os.fsync(layers[0])
    written = device_written(mountpoint) - before
    for fd in layers:
        os.close(fd)
    return written


def device_written(mountpoint: Path) -> int:
    stats = json.loads((mountpoint / ".kvfs" / "stats.json").read_text())
    return int(stats["counters"]["device_written"])


def kvfs(*arguments: str | Path) -> None:
    subprocess.run([KVFS, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

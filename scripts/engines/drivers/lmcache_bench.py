"""LMCache's own benchmark, as its command runs it: lmcache_bench.py DIR TYPE

Chunks of its default 256 KiB. It says how long it took and how many it found; what it loads in a
run of its own it does not compare, so that is done here, by the pattern that it writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from content import digest
from serving import Outcome, serve

KEYS, KEY_SIZE = 1024, 256 * 1024
COMMAND = Path(sys.executable).with_name("lmcache")


def main() -> None:
    directory, kind = sys.argv[1:]
    spec = json.dumps({"type": kind, "base_path": directory})

    def bench(only: str) -> Outcome:
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            subprocess.run(
                [
                    COMMAND, "bench", "l2", "--l2-adapter", spec, "--only", only,
                    "--num-keys", str(KEYS), "--data-size-kb", str(KEY_SIZE // 1024),
                    "--rounds", "1", "--warmup-rounds", "0", "--format", "json", "--quiet",
                    "--output", report.name,
                ],
                check=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            told = json.load(report)["metrics"]["op_0"]
        hits = told["total_success"] if only == "load" else 0
        seconds = told["duration_avg_ms"] / 1000
        return Outcome(seconds, told["total_success"] * KEY_SIZE, hits, _digest(Path(directory)))

    serve(lambda: bench("store"), lambda: bench("load"))


def _digest(directory: Path) -> str:
    """Of what is in the files, and of the pattern where there is none."""
    pattern = [np.full(KEY_SIZE, number & 0xFF, np.uint8) for number in range(256)]
    files = {int(name.split("@")[1], 16): directory / name for name in os.listdir(directory)}
    return digest(
        np.fromfile(files[key], np.uint8) if key in files else pattern[key & 0xFF]
        for key in range(KEYS)
    )


main()

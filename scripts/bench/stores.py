"""What it takes to store files of four shapes, as engines do, in one directory after the other.

    python -m scripts.bench.stores DIR... [--rounds 5]

A directory each of what is compared: of ext4, of a mount, of another FUSE filesystem. Prints the
medians in ms, as a table in Markdown.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

KIB, MIB = 1024, 1024 * 1024
_SMALL, _SMALL_SIZE = 1024, 256 * KIB
_LARGE, _LARGE_SIZE = 4, 5632 * KIB


def small_files(place: Path, content: memoryview) -> None:
    """Each written to another name, and renamed."""
    for number in range(_SMALL):
        path = place / f"{number}"
        _write(place / f"{number}.tmp", content[:_SMALL_SIZE], _SMALL_SIZE)
        os.rename(place / f"{number}.tmp", path)


def large_files(piece: int) -> Callable[[Path, memoryview], None]:
    def store(place: Path, content: memoryview) -> None:
        for number in range(_LARGE):
            _write(place / f"{number}", content[:_LARGE_SIZE], piece)

    return store


SHAPES = {
    f"{_SMALL} files of {_SMALL_SIZE // KIB} KiB": small_files,
    "22 MiB in writes of 1 MiB": large_files(MIB),
    "22 MiB in writes of 128 KiB": large_files(128 * KIB),
    "22 MiB in writes of 4 KiB": large_files(4 * KIB),
}


def main(
    directories: Annotated[list[Path], typer.Argument(help="One of each filesystem.")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    content = memoryview(os.urandom(_LARGE_SIZE))
    print("| |", *(f"{directory} |" for directory in directories))
    print("|---" * (len(directories) + 1) + "|")
    for name, shape in SHAPES.items():
        seconds: dict[Path, list[float]] = {directory: [] for directory in directories}
        for number in range(rounds):
            for directory in directories:
                seconds[directory].append(_seconds(shape, directory / f"stores-{number}", content))
        print(f"| {name} |", *(f"{1000 * statistics.median(s):.0f} |" for s in seconds.values()))


def _seconds(shape: Callable[[Path, memoryview], None], place: Path, content: memoryview) -> float:
    place.mkdir()
    started = time.perf_counter()
    shape(place, content)
    seconds = time.perf_counter() - started
    shutil.rmtree(place)
    return seconds


def _write(path: Path, content: memoryview, piece: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for start in range(0, len(content), piece):
            os.write(fd, content[start : start + piece])
    finally:
        os.close(fd)


if __name__ == "__main__":
    typer.run(main)

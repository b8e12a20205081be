"""The `-o` options of a mount."""

from __future__ import annotations

from collections.abc import Iterable

import typer

# fusermount3 takes them by these names. Of those in a row the last one holds.
_ALTERNATIVES = (
    ("ro", "rw"),
    ("allow_other",),
    ("suid", "nosuid"),
    ("dev", "nodev"),
    ("exec", "noexec"),
    ("async", "sync"),
    ("dirsync",),
    ("noatime",),
)
_ROW_OF = {name: row for row in _ALTERNATIVES for name in row}


def split_options(options: Iterable[str]) -> list[str]:
    """`-o ro,noexec -o sync`, one by one."""
    return [word for option in options for word in option.split(",") if word]


def is_known(word: str) -> bool:
    return word in _ROW_OF


def parse_options(options: Iterable[str]) -> frozenset[str]:
    """Those that hold. Raises typer.BadParameter for an unknown one."""
    chosen: dict[tuple[str, ...], str] = {}
    for word in split_options(options):
        if not is_known(word):
            raise typer.BadParameter(f"-o {word} is not known; known are {', '.join(_ROW_OF)}")
        chosen[_ROW_OF[word]] = word
    return frozenset(chosen.values())

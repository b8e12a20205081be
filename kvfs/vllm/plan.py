"""What the scheduler tells the workers of a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Load:
    """Blocks `first`, `first + 1`, ... of a session, into the engine's pages, one a block."""

    request: str
    folder: str
    """Below the root and a rank's own part of it."""
    sessions: tuple[str, ...]
    """For each rank, the name of the session in the folder."""
    tokens: bytes
    """Of all blocks, up to the last one."""
    first: int
    pages: list[int]


@dataclass(frozen=True)
class Save:
    """Blocks `first`, `first + 1`, ... of a request, from the engine's pages, one a block."""

    request: str
    folder: str
    first: int
    tokens: bytes
    """Of these blocks; with the first save of a request, of all blocks up to the last one."""
    pages: list[int]


@dataclass
class Plan:
    """Of one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Requests of which no more will be saved."""
    failures: int = 0
    """How many steps whose loads failed the scheduler knows of."""

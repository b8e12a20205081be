"""Where a file lies in the ring: how many reads it takes, and which segments it shares with
others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvfs.engine.format import round_up
from kvfs.engine.ring import Geometry
from mount_tools.bars import Spread, column
from mount_tools.segments import Segments


@dataclass(frozen=True, slots=True)
class Part:
    """Of a file in one segment, in bytes on the device; `share` of the file, from 0 to 1;
    `live_pct` of the segment, of all files."""

    segment: int
    stored: int
    extents: int
    share: float
    live_pct: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`runs` lie without a gap on the device in the order of the file; `largest_run` in bytes;
    `parts` by segment, None for a user who may not see how the ring is filled."""

    extents: int
    runs: int
    largest_run: int
    stored: int
    parts: list[Part] | None


def layout_of(extents: Sequence[dict[str, Any]], segments: Segments | None) -> Layout:
    """`extents` as user.kvfs.extents tells, in the order of the file: an extent that was partly
    overwritten is there once for each slice."""
    taken = {extent["address"]: round_up(extent["stored"]) for extent in extents}
    runs = _runs(extents)
    stored = sum(taken.values())
    return Layout(
        extents=len(taken),
        runs=len(runs),
        largest_run=max(runs, default=0),
        stored=stored,
        parts=None if segments is None else _parts(taken, stored, segments),
    )


def ring_line(layout: Layout, segments: Segments, width: int) -> str:
    """The whole ring: the higher a character the more of these segments is the file's."""
    spread = Spread(segments.count, min(width, segments.count))
    shares = np.zeros(segments.count)
    for part in layout.parts or ():
        shares[part.segment] = part.stored / segments.size
    return "".join(column(share) if share else "·" for share in spread.means(shares).tolist())


def _runs(extents: Sequence[dict[str, Any]]) -> list[int]:
    """Their lengths."""
    runs: list[int] = []
    last, end = -1, -1
    for extent in extents:
        address, taken = extent["address"], round_up(extent["stored"])
        if address == last:
            continue
        if address == end:
            runs[-1] += taken
        else:
            runs.append(taken)
        last, end = address, address + taken
    return runs


def _parts(taken: dict[int, int], stored: int, segments: Segments) -> list[Part]:
    geometry = Geometry(segments.size, segments.count)
    bytes_in: Counter[int] = Counter()
    extents_in: Counter[int] = Counter()
    for address, size in taken.items():
        bytes_in[geometry.segment(address)] += size
        extents_in[geometry.segment(address)] += 1
    return [
        Part(
            segment=segment,
            stored=bytes_in[segment],
            extents=extents_in[segment],
            share=round(bytes_in[segment] / stored, 4),
            live_pct=max(0, int(segments.live_pct[segment])),
        )
        for segment in sorted(bytes_in)
    ]

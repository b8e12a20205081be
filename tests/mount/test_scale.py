"""Many sessions behind a real mount: right at any scale; a million files within the goals."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import remount
from scripts.bench.many_files import build, visit_sessions
from scripts.bench.mount import Mount
from scripts.bench.plan import Plan


def test_sessions_made_by_the_library_are_served(fuse: None, tmp_path: Path) -> None:
    mount = Mount(tmp_path / "ring.img", tmp_path / "mnt")
    mount.point.mkdir()
    build(mount.image, sessions=40)
    mount.mount()
    try:
        visited = visit_sessions(mount.point, mount.stats()["pid"], sessions=40, visits=40)
    finally:
        mount.end()
    assert visited.wrong == []


@pytest.mark.scale
@pytest.mark.timeout(3600)
def test_a_million_files(fuse: None, tmp_path: Path) -> None:
    rows = remount.measure(Plan(tmp_path, rounds=1, is_short=False))
    assert [row for row in rows if row.met is False] == []

"""`kvfs heatmap`: sessions by their heat, and the layers of each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.support.command import error_line
from tests.support.mounter import Mounter, kvfs
from tests.support.sessions import make_session, sync

LAYERS = {"agent-1": 2, "team/agent-2": 60, "$x^$ 1": 1}


@pytest.fixture(scope="module")
def mounter(fuse: None) -> Iterator[Mounter]:
    """Of three sessions all were used once, one layer ten times since."""
    made = Mounter("128M")
    try:
        made.mount()
        for name, layers in LAYERS.items():
            make_session(made.mountpoint / name, layers)
        (made.mountpoint / "notes").mkdir()
        with (made.mountpoint / "agent-1" / "layer.001").open("r+b") as file:
            for _ in range(10):
                file.write(bytes(4096))
                file.flush()
        sync(made.mountpoint)
        yield made
    finally:
        made.close()


def test_the_hottest_session_comes_first_with_the_heat_of_its_layers(mounter: Mounter) -> None:
    rows = json.loads(kvfs("heatmap", mounter.mountpoint, "--json").stdout)
    assert rows[0]["name"] == "agent-1"
    assert {row["name"]: len(row["layers"]) for row in rows} == LAYERS
    heats = [row["heat"] for row in rows]
    assert heats == sorted(heats, reverse=True)
    layers = rows[0]["layers"]
    assert layers["layer.001"] > layers["layer.000"] > 0
    for name, heat in layers.items():
        path = mounter.mountpoint / "agent-1" / name
        assert heat == pytest.approx(float(os.getxattr(path, "user.kvfs.heat")))


def test_to_look_is_no_use(mounter: Mounter) -> None:
    first = kvfs("heatmap", mounter.mountpoint, "--json").stdout
    assert kvfs("heatmap", mounter.mountpoint, "--json").stdout == first


def test_bars_are_as_long_as_they_are_hot(mounter: Mounter) -> None:
    head, first, *others = kvfs("heatmap", mounter.mountpoint).stdout.splitlines()
    assert head.split() == ["session", "heat", "layers", "tier", "unused"]
    assert first.startswith("agent-1 ")
    assert "█" * 12 in first
    (many,) = (line for line in others if line.startswith("team/agent-2 "))
    assert len(many.split()[-3]) == 40, "of 60 layers, put together"


def test_so_many_as_asked_for_are_printed(mounter: Mounter) -> None:
    lines = kvfs("heatmap", mounter.mountpoint, "--top", "1").stdout.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "and 2 colder ones (--top 3 for all)"


def test_a_picture_is_drawn(mounter: Mounter, tmp_path: Path) -> None:
    """Names that matplotlib would take for formulas are among its labels."""
    path = tmp_path / "heat.png"
    result = kvfs("heatmap", mounter.mountpoint, "--plot", path)
    assert result.stderr == ""
    picture = imread(path)
    assert min(picture.shape[:2]) > 200
    assert len({tuple(pixel) for pixel in picture[::4, ::4].reshape(-1, picture.shape[2])}) > 50


def test_what_cannot_be_shown_is_one_line(mounter: Mounter, tmp_path: Path) -> None:
    top = mounter.mountpoint
    assert kvfs("heatmap", top / "notes").stdout == f"no sessions in {top / 'notes'}\n"
    file = top / "agent-1" / "layer.000"
    assert "is not a directory" in error_line(kvfs("heatmap", file, check=False))
    assert "is not on KVFS" in error_line(kvfs("heatmap", tmp_path, check=False))
    line = error_line(kvfs("heatmap", top, "--plot", tmp_path / "x.pdf", check=False))
    assert "ends in .png" in line
    line = error_line(kvfs("heatmap", top / "notes", "--plot", tmp_path / "x.png", check=False))
    assert "nothing to draw" in line

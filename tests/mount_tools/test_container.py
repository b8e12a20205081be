"""The Dockerfile takes what the package is made from."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "mount_tools" / "container" / "Dockerfile"


def copied() -> set[str]:
    lines = re.findall(r"^COPY (?!--)(.*) /src\S*$", DOCKERFILE.read_text(), re.MULTILINE)
    return {source for line in lines for source in line.split()}


def test_everything_that_it_copies_is_there() -> None:
    assert all((ROOT / source).exists() for source in copied())


def test_it_copies_all_that_the_wheel_is_built_from() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r"^packages = \[(.*)\]$", settings, re.MULTILINE)[:1]
    shared = re.findall(r'^"(.*)" = "share/', settings, re.MULTILINE)
    wanted = {name.strip(' "') for name in packages.split(",")}
    assert wanted | set(shared) | {"pyproject.toml", "README.md", "LICENSE"} == copied()

"""The manual pages tell what the help tells: `make man` makes them anew."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from mount_tools.main import app

PAGES = Path(__file__).parents[2] / "docs" / "man"
VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def page(name: str) -> str:
    text = (PAGES / name).read_text()
    return text.replace("\\-", "-").replace("\\&", "").replace("\\(aq", "'").replace("\\e", "\\")


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_page_with_its_options_and_examples(verb: str) -> None:
    text = page(f"man1/kvfs-{verb}.1")
    options = [name for one in VERBS[verb].params for name in one.opts if name.startswith("-")]
    assert not [name for name in options if name not in text], "run make man"
    examples = VERBS[verb].help.partition("Examples:\n")[2].splitlines()
    assert examples
    assert not [line for line in examples if line.strip() not in text], "run make man"


def test_every_page_is_of_a_verb() -> None:
    found = {path.name for path in PAGES.glob("man*/*")}
    assert found == {"kvfs.1", "mount.kvfs.8", *(f"kvfs-{verb}.1" for verb in VERBS)}


def test_man_takes_them() -> None:
    if shutil.which("man") is None:
        pytest.skip("man is missing")
    for path in PAGES.glob("man*/*"):
        result = subprocess.run(
            ["man", "--warnings", "--local-file", path],
            check=True,
            capture_output=True,
            text=True,
            env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
        )
        assert (result.stderr, "OPTIONS" in result.stdout) == ("", True), path

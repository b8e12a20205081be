"""The documents name tests: each of them exists, and each line has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("docs/*.md"))
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_COMMAND = re.compile(r"`(?:make|python|kvfs) |`tests/")
_LAST_HEADS = ("shown by", "shown by, or why not", "shown at length by")


def rows(document: str) -> Iterator[list[str]]:
    """The cells of each line of its tables, but for the heads."""
    for line in (ROOT / "docs" / document).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_row = line.startswith("|") and not set(line) <= set("|- ")
        if is_row and cells[-1] not in _LAST_HEADS:
            yield cells


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    for file, name in _TEST.findall(document.read_text()):
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
        assert name.startswith("test_")


def test_every_line_of_the_semantics_names_a_test() -> None:
    lines = list(rows("semantics.md"))
    assert len(lines) > 60
    for cells in lines:
        assert _TEST.search(cells[-1]), cells[0]


def test_every_fault_is_there_once_with_a_test() -> None:
    faults = {int(cells[0]): cells[-1] for cells in rows("faults.md")}
    assert list(faults) == list(range(1, 45))
    assert all(_TEST.search(shown) for shown in faults.values())


def test_every_promise_names_a_test_and_a_command() -> None:
    for cells in rows("promises.md"):
        assert len(cells) == 3, cells
        assert _TEST.search(cells[1]), cells[0]
        assert _COMMAND.search(cells[2]), cells[0]

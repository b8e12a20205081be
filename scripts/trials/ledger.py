"""The manifest of a writer, on an ordinary filesystem: each operation before it begins, and what
became of it. What was answered is a promise."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from scripts.trials.tree import Action, Tree


@dataclass(slots=True)
class Ledger:
    """`path` is the manifest since `tree`, which is kept beside it. `doubtful` is an operation
    that was begun and not answered."""

    path: Path
    tree: Tree = field(default_factory=Tree)
    doubtful: Action | None = None
    _lines: TextIO | None = None

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """What was promised so far."""
        snapshot = path.with_suffix(".tree")
        tree = pickle.loads(snapshot.read_bytes()) if snapshot.exists() else Tree()
        ledger = cls(path, tree)
        for action, written in _entries(path):
            if written is None:
                ledger.doubtful = action
            elif written >= 0:
                action.apply(tree, written)
        return ledger

    def begin(self) -> None:
        """Anew, with the tree as it is."""
        self.close()
        snapshot = self.path.with_suffix(".tree")
        temporary = snapshot.with_suffix(".new")
        temporary.write_bytes(pickle.dumps(self.tree))
        # First: what is in the tree already must not be applied to it again.
        self.path.unlink(missing_ok=True)
        temporary.replace(snapshot)
        self.doubtful = None
        self._lines = self.path.open("w", buffering=1)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def intends(self, action: Action) -> None:
        self._note({"intent": action.document})

    def answered(self, action: Action, written: int) -> None:
        self._note({"written": written})
        action.apply(self.tree, written)

    def refused(self) -> None:
        """It was answered with an error: nothing of it was done."""
        self._note({"written": -1})

    def _note(self, line: object) -> None:
        assert self._lines is not None, "begin it first"
        self._lines.write(json.dumps(line) + "\n")


def _entries(path: Path) -> Iterator[tuple[Action, int | None]]:
    """Each operation with the bytes that were answered; -1 where it was refused, None where it was
    not answered."""
    lines = path.read_text().splitlines() if path.exists() else []
    action: Action | None = None
    for line in map(json.loads, lines):
        if "intent" in line:
            action = Action.from_document(line["intent"])
        else:
            assert action is not None
            yield action, line["written"]
            action = None
    if action is not None:
        yield action, None

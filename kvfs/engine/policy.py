"""What is kept and what goes next: the protocol between who holds bytes and who decides."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Keys = Sequence[int] | npt.NDArray[np.integer[Any]]
Victims = npt.NDArray[np.int64]


class Hint(IntEnum):
    """What an agent said about the next use of its session."""

    NONE = 0
    TOOL_RUNNING = 1  # the next turn comes by itself
    TURN_EXPECTED = 2  # the tool is done, or a time was named
    WAITING = 3  # for a person
    FINISHED = 4


class Policy(Protocol):
    """Names what goes next. Keys are ints of the caller's choice: blocks, sessions, inodes.

    The policy decides nothing by itself: what `victims` names is held until `remove`. Times
    are seconds of any clock that does not go back.
    """

    def __len__(self) -> int:
        """How many keys are held."""

    def touch(self, keys: Keys, now_s: float) -> None:
        """Keys, each once, were used by one request, the last of a sequence first. Those not
        held are held from now on."""

    def hint(self, keys: Keys, hint: Hint) -> None:
        """Said after a use; it holds until the next one."""

    def victims(self, count: int, now_s: float) -> Victims:
        """At most `count` held keys, the first to go first. What was just used may be among
        them: not worth keeping."""

    def remove(self, keys: Keys) -> None:
        """Keys are no longer held; what was learnt of them may be remembered."""

    def forget(self, keys: Keys) -> None:
        """Keys do not exist any more and may be given to something else."""

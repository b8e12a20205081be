"""A history cut in three places of each write to the device: at its begin, inside it, at its end.

A write is a frame or a superblock. What no flush had covered when the power failed is there in
order, or lost, or any part of it is there. Or only the daemon was killed: all that it had
written is there, and what it had answered lies in the tmpfs. Cuts have numbers, and what a cut
leaves follows from the history's seed and its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from kvfs.engine import check
from tests.crash.history import History, Left, Life
from tests.crash.model import Tree
from tests.support.devices import (
    SECTOR,
    Media,
    MemoryDevice,
    Survival,
    Written,
    everything_survives,
    nothing_survives,
    random_survival,
)
from tests.support.encrypted import KEY

A_WRITE = 3  # cuts: before it, inside it, behind it (and before a flush that follows)
_PAGE = 4096


class Fate(Enum):
    """What became of the writes that no flush had covered."""

    IN_ORDER = "in order"
    LOST = "lost"
    REORDERED = "dropped, reordered or torn"
    KILLED = "the daemon killed"


@dataclass(frozen=True, slots=True)
class Cut:
    """`moment` events had happened in the device's life, and of the write that was under way
    the part `begun`. The media are as they were then, until the next cut is asked for."""

    seed: int
    number: int
    life: Life
    moment: int
    begun: Written
    media: Media

    def __str__(self) -> str:
        return f"seed {self.seed}, cut {self.number}"

    @property
    def left(self) -> Left | None:
        """What the tmpfs held, if the daemon alone ends here, inside the write."""
        is_inside = self.number % A_WRITE == 1
        return self.life.left.get(self.begun.number) if is_inside else None

    @property
    def after_kill(self) -> list[Tree]:
        """The states that may be found when the tmpfs is left: nothing answered is missing."""
        assert self.left is not None
        return self._states(self.left.answered)

    @property
    def after_power_cut(self) -> list[Tree]:
        """The states that may be found without it: nothing confirmed is missing."""
        return self._states(self.life.device.noted("confirmed", self.moment, 0))

    def _states(self, oldest: int) -> list[Tree]:
        return self.life.states[oldest : self.life.device.noted("started", self.moment, 0) + 1]

    @property
    def newest_given(self) -> int:
        """The highest inode number that had been given."""
        given = self.life.used[: self.life.device.noted("used", self.moment, 0)]
        return max(given, default=0)

    def happens(self) -> tuple[Fate, bytearray]:
        """What became of the writes, and what is on the device."""
        random = Random(f"{self.seed} {self.number}")
        fate = Fate.KILLED if self.left else random.choices(list(_SHARES), [*_SHARES.values()])[0]
        return fate, self.media.left_by(self._survival(fate, random), [self.begun])

    def _survival(self, fate: Fate, random: Random) -> Survival:
        match fate:
            case Fate.IN_ORDER | Fate.KILLED:
                return everything_survives
            case Fate.LOST:
                return lambda write: (
                    everything_survives(write) if write is self.begun else nothing_survives(write)
                )
            case Fate.REORDERED:
                return random_survival(random, random.choice([SECTOR, _PAGE]))


_SHARES = {Fate.IN_ORDER: 3, Fate.LOST: 2, Fate.REORDERED: 5}


def cuts(history: History, seed: int, numbers: range) -> Iterator[Cut]:
    """In their order, as far as the history goes."""
    number = 0
    for life in history.lives_of_devices:
        media = life.device.at_begin()
        for moment, event in enumerate(life.device.events):
            if isinstance(event, Written):
                for begun in _parts(event, Random(f"{seed} {number} inside")):
                    if number in numbers:
                        yield Cut(seed, number, life, moment, begun, media)
                    number += 1
            media.undergo(event)


def _parts(write: Written, random: Random) -> Iterator[Written]:
    """Nothing of it, a part, all of it. Every other part ends within the first page, where
    what is not payload lies."""
    end = random.choice([_PAGE, len(write.data)])
    yield replace(write, data=b"")
    yield replace(write, data=write.data[: random.randrange(1, min(end, len(write.data)))])
    yield write


def check_cut(history: History, cut: Cut) -> Fate:
    """It opens, is a state that may be, work goes on, and fsck has no complaint. Raises
    AssertionError."""
    fate, image = cut.happens()
    # A torn superblock is replaced when the other one is mounted.
    fsck(image, but={"superblock"})
    if cut.left is None:
        history.check_image(image, cut.after_power_cut, cut.newest_given)
    else:
        history.check_left(image, cut.left, cut.after_kill)
    fsck(image)
    return fate


def fsck(image: bytearray, but: Set[str] = frozenset()) -> None:
    """Raises AssertionError when it finds anything, `but` in these structures."""
    report = check.check(MemoryDevice(image), "the ring", key=KEY)
    findings = [finding for finding in report.findings if finding.structure not in but]
    assert not findings, "fsck: " + "; ".join(map(str, findings[:5]))

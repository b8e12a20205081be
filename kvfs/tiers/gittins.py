"""The default policy: what is kept is what will be used most for the room and the time it takes.

How long it takes until a key is used again is learnt, as a distribution for each class of keys
that look alike (how often used, with how much that was new, after what gap, under which hint).
Of it and of a key's age the Gittins index is computed:

    G(age) = max over t of  P(used within t more) / E[time held until then]

the rate of hits per second that keeping the key yields if it is kept as long as that pays.
Those with the lowest index go.

The index is Gittins' ("Bandit processes and dynamic allocation indices", 1979); ages,
classes and hits per space-time are those of LHD (Beckmann, Chen, Cidon: "LHD: improving cache
hit rate by maximizing hit density", NSDI 2018), which has the rate for all time to come in
place of the maximum. The distributions are Kaplan and Meier's estimate (1958): a key that was
not used again yet counts as at risk up to its age, whether it is held or not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvfs.engine.policy import Hint, Keys, Victims
from kvfs.tiers.ranked import RankedPolicy, Values, grown
from kvfs.tiers.slots import Slots

Classes = npt.NDArray[np.int32]
Counts = npt.NDArray[np.float64]  # by class and bin of age

# Bins of ages: a quarter of a second and below, then three an octave, up to nine days.
_AGE_MIN_S = 0.25
_BINS_AN_OCTAVE = 3
_BINS = 66
_EDGES_S = np.concatenate([[0.0], _AGE_MIN_S * 2 ** (np.arange(_BINS) / _BINS_AN_OCTAVE)])
_WIDTHS_S = np.diff(_EDGES_S)

# Classes: how often a key was used (1, 2, 3 or more), how many keys of the request were new,
# the gap before the last use, the hint. The last key of a request is in a class of its own: it
# is seldom whole, and so seldom used again.
_USES = 3
_NEW_EDGES = np.array([1, 4, 8, 16, 64])
_GAPS = 5
_OCTAVES_A_GAP = 2.5
_SHAPE = (_USES, len(_NEW_EDGES) + 1, _GAPS)
_TAIL = int(np.prod(_SHAPE))
_CLASSES = (_TAIL + 1) * len(Hint)
_BY_HINT = (_TAIL + 1, len(Hint), _BINS)

# A class that was seen seldom is taken to be as all together: that much weight have they.
_PRIOR_KEYS = 50.0
# Learning looks at all keys: not before a share of them was used.
_LEARN_SHARE = 16
_LEARN_MIN = 8192
# Uses after which what was learnt counts 1 / e.
_MEMORY_USES = 50e6


class GittinsPolicy(RankedPolicy):
    """What a key yields is learnt from the uses of all that look like it."""

    def __init__(self, history: int = 1 << 20) -> None:
        super().__init__(history)
        self._gap_s = np.zeros(0, np.float32)
        self._uses = np.zeros(0, np.int32)
        self._class = np.zeros(0, np.int32)
        self._reused = np.zeros((_CLASSES, _BINS))
        self._given_up = np.zeros((_CLASSES, _BINS))  # those forgotten at that age
        self._index = np.ones((_CLASSES, _BINS))
        self._lesson = 1  # in uses: after so many
        self._unlearnt = 0

    def _grown(self, size: int) -> None:
        super()._grown(size)
        self._gap_s = grown(self._gap_s, size)
        self._uses = grown(self._uses, size)
        self._class = grown(self._class, size)

    def touch(self, keys: Keys, now_s: float) -> None:
        super().touch(keys, now_s)
        self._unlearnt += len(keys)

    def victims(self, count: int, now_s: float) -> Victims:
        # Not when something is used: that is while somebody waits, and nobody may ever ask.
        if self._unlearnt >= self._lesson:
            self._learn()
        return super().victims(count, now_s)

    def _used(self, slots: Slots) -> None:
        known = slots[self._is_known[slots]]
        np.add.at(self._reused, self._cells(known, self._now_s), 1)
        self._gap_s[known] = self._now_s - self._used_s[known]
        self._uses[slots] += 1
        self._class[slots] = self._classify(slots)

    def _classify(self, slots: Slots) -> Classes:
        uses = np.minimum(self._uses[slots], _USES) - 1
        new = np.searchsorted(_NEW_EDGES, np.count_nonzero(self._uses[slots] == 1), "right")
        gaps = (np.log2(np.maximum(self._gap_s[slots], 1)) / _OCTAVES_A_GAP).astype(int)
        gaps = np.where(uses == 0, 0, np.minimum(gaps + 1, _GAPS - 1))
        classes = np.ravel_multi_index((uses, np.full_like(uses, new), gaps), _SHAPE)
        if slots.size > 1:
            classes[0] = _TAIL
        return (classes * len(Hint)).astype(np.int32)

    def _hinted(self, slots: Slots, hint: Hint) -> None:
        self._class[slots] += hint - self._class[slots] % len(Hint)

    def _worth(self, slots: Slots, now_s: float) -> Values:
        return self._index[self._cells(slots, now_s)]

    def _cells(self, slots: Slots, now_s: float) -> tuple[Classes, Slots]:
        """The classes and the bins of age."""
        return self._class[slots], _bins(now_s - self._used_s[slots])

    def _forgotten(self, slots: Slots) -> None:
        self._given_up += self._count(slots)
        self._uses[slots] = 0
        self._gap_s[slots] = 0

    # -- learning

    def _learn(self) -> None:
        kept = np.exp(-self._unlearnt / _MEMORY_USES)
        self._reused *= kept
        self._given_up *= kept
        waiting = self._given_up + self._count(np.flatnonzero(self._is_known))
        index = _learnt_index(self._reused.reshape(_BY_HINT), waiting.reshape(_BY_HINT))
        self._index = index.reshape(_CLASSES, _BINS)
        # Soon at first, then after a share of what is known was used.
        rare = max(_LEARN_MIN, len(self._slots) // _LEARN_SHARE)
        self._lesson, self._unlearnt = min(2 * self._lesson, rare), 0

    def _count(self, slots: Slots) -> Counts:
        cells = np.ravel_multi_index(self._cells(slots, self._now_s), (_CLASSES, _BINS))
        counts = np.bincount(cells, minlength=_CLASSES * _BINS)
        return counts.reshape(_CLASSES, _BINS).astype(np.float64)


def _learnt_index(reused: Counts, waiting: Counts) -> Counts:
    """Both arrays: keys used again, and those that are not yet, by class, hint and bin. The
    hazard is the probability of a use within a bin of age, of those that got there."""
    reused, waiting = _with_all_as_unhinted(reused), _with_all_as_unhinted(waiting)
    events = reused + waiting
    # Who waits in a bin was at risk in half of it.
    at_risk = events[..., ::-1].cumsum(-1)[..., ::-1] - waiting / 2
    of_all = (reused[:, Hint.NONE].sum(0) + 1e-3) / (at_risk[:, Hint.NONE].sum(0) + 1)
    of_hint = _shrunk(reused.sum(0), at_risk.sum(0), of_all)
    index = np.broadcast_to(gittins_index(of_hint, _WIDTHS_S), reused.shape).copy()
    is_seen = at_risk[..., 0] > 0
    index[is_seen] = gittins_index(_shrunk(reused, at_risk, of_hint)[is_seen], _WIDTHS_S)
    return index


def _with_all_as_unhinted(counts: Counts) -> Counts:
    """Of a key without a hint it is not known yet which one comes: it is like all of them."""
    counts = counts.copy()
    counts[:, Hint.NONE] = counts.sum(1)
    return counts


def _shrunk(reused: Counts, at_risk: Counts, prior: Counts) -> Counts:
    return np.minimum((reused + _PRIOR_KEYS * prior) / (at_risk + _PRIOR_KEYS), 1)


def gittins_index(hazard: Counts, widths: npt.NDArray[np.float64]) -> Counts:
    """Hits per unit of `widths`, of a key that reached each bin (the last axis of `hazard`,
    which holds the probability of a use within the bin)."""
    index = np.zeros_like(hazard)
    for first in range(hazard.shape[-1]):
        ahead, widths_ahead = hazard[..., first:], widths[first:]
        unused = np.ones_like(ahead)
        unused[..., 1:] = np.cumprod(1 - ahead[..., :-1], -1)
        hits = np.cumsum(unused * ahead, -1)
        held = np.cumsum(unused * (1 - ahead / 2) * widths_ahead, -1)
        index[..., first] = (hits / held).max(-1)
    return index


def _bins(ages_s: npt.NDArray[np.float64]) -> Slots:
    octaves = np.log2(np.maximum(ages_s, _AGE_MIN_S / 2) / _AGE_MIN_S)
    bins: Slots = np.floor(octaves * _BINS_AN_OCTAVE).astype(np.int64) + 1
    return bins.clip(0, _BINS - 1)

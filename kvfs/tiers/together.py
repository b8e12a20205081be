"""Which sessions are used together: a team of agents, an agent and its helpers.

Learnt from what comes back after it was away: the sessions that began a turn just before may
have announced it. Each such pair is an edge, with how often the one was followed by the
other and how often it was not. Everything is bounded, and old evidence fades.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cachetools import LRUCache

WINDOW_SECONDS = 30.0
_SESSIONS_MAX = 8192
_EDGES_MAX = 16  # of a session
_LATELY_MAX = 64
_TRIALS_MAX = 32


@dataclass(slots=True)
class _Edge:
    """`tried`: when the last of the `trials` began, of which `hits` came true; `came`: that
    one did."""

    tried: float
    came: bool = True
    trials: float = 1.0
    hits: float = 1.0

    @property
    def sureness(self) -> float:
        """One success less and one failure more than there were: two are no rule."""
        return max(0.0, (self.hits - 1) / (self.trials + 1))

    def tries(self, now: float) -> None:
        if self.trials >= _TRIALS_MAX:
            self.trials, self.hits = self.trials / 2, self.hits / 2
        self.trials += 1
        self.tried, self.came = now, False


@dataclass(slots=True)
class Together:
    """Edges from a session to those that followed it within 30 s."""

    _edges: LRUCache[int, dict[int, _Edge]] = field(default_factory=lambda: LRUCache(_SESSIONS_MAX))
    _lately: OrderedDict[int, float] = field(default_factory=OrderedDict)

    @property
    def edge_count(self) -> int:
        return sum(map(len, self._edges.values()))

    def began(
        self, session: int, now: float, was_away: bool, is_away: Callable[[int], bool]
    ) -> Iterator[tuple[int, float]]:
        """A session begins a turn, maybe after it was away also `WINDOW_SECONDS` ago. Gives
        those that are away and may follow it, and how sure that is."""
        self._forget(now)
        if was_away:
            for earlier in self._lately:
                if earlier != session:
                    self._followed(earlier, session, now)
        self._lately[session] = now
        self._lately.move_to_end(session)
        if len(self._lately) > _LATELY_MAX:
            self._lately.popitem(last=False)
        for other, edge in self._edges.get(session, {}).items():
            if is_away(other):
                if now - edge.tried > WINDOW_SECONDS:
                    edge.tries(now)
                yield other, edge.sureness

    def _followed(self, earlier: int, session: int, now: float) -> None:
        edges = self._edges.setdefault(earlier, {})
        edge = edges.get(session)
        if edge is not None:
            if now - edge.tried <= WINDOW_SECONDS and not edge.came:
                edge.came = True
                edge.hits += 1
            return
        if len(edges) >= _EDGES_MAX:
            del edges[min(edges, key=lambda other: edges[other].tried)]
        edges[session] = _Edge(now)

    def _forget(self, now: float) -> None:
        while self._lately:
            session, began = next(iter(self._lately.items()))
            if now - began <= WINDOW_SECONDS:
                return
            del self._lately[session]

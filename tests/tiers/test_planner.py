"""The planner on a small tier: what it brings in, and what it sends down."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvfs.engine.io import Completion, Step, wait
from kvfs.tiers.budget import Bandwidth, Budget
from kvfs.tiers.hints import parse
from kvfs.tiers.planner import Planner
from kvfs.tiers.predict import Predictor, Reason

SIZE, GROUP = 1000, 2


@dataclass
class Tier:
    """Sessions come up and go down when the test says so. Implements planner.Tier."""

    up: set[int] = field(default_factory=set)
    calls: list[tuple[str, int]] = field(default_factory=list)
    pending: list[Callable[[OSError | None], None]] = field(default_factory=list)
    is_strained: bool = False

    def is_whole(self, session: int) -> bool:
        return session in self.up

    def promote(self, session: int) -> Step[int]:
        yield from self._wait("up", session)
        self.up.add(session)
        return SIZE

    def demote(self, sessions: list[int]) -> Step[None]:
        yield from self._wait("down", *sessions)
        self.up -= set(sessions)

    def _wait(self, what: str, *sessions: int) -> Step[None]:
        self.calls += [(what, session) for session in sessions]
        done: Completion[None] = Completion()
        self.pending.append(lambda failure: done.finish(error=failure))
        yield from wait(done)


@dataclass
class Bench:
    tier: Tier = field(default_factory=Tier)
    now: float = 0.0
    demand_waits: bool = False
    demanded: int = 0

    def __post_init__(self) -> None:
        self.budget = Budget(Bandwidth(1e6))
        self.planner = Planner(
            self.tier, Predictor(), self.budget, GROUP, self.spawn, lambda: self.demand_waits,
            lambda: self.demanded, lambda: self.now,
        )  # fmt: skip
        self.at(0.0)
        self.at(10.0)

    def spawn(self, step: Step[None]) -> Completion[None]:
        completion: Completion[None] = Completion()

        def resume() -> None:
            try:
                next(step).when_done(resume)
            except StopIteration:
                completion.finish()

        resume()
        return completion

    def at(self, now: float) -> list[tuple[str, int]]:
        """What a tick has the tier do."""
        self.now = now
        before = len(self.tier.calls)
        self.planner.tick(now)
        return self.tier.calls[before:]

    def hints(self, session: int, value: bytes, now: float) -> None:
        self.planner.hint(session, parse(value), now, SIZE)

    def happens(self, failure: OSError | None = None) -> None:
        self.tier.pending.pop(0)(failure)


def test_an_opened_session_is_brought_in_once_nobody_reads_it() -> None:
    bench = Bench()
    bench.planner.saw_open(7, 10.0, SIZE)
    assert bench.at(11.0) == []
    bench.planner.saw_use(7, 11.5)
    assert bench.at(13.0) == [], "it is being read"
    assert bench.at(14.0) == [("up", 7)]
    bench.happens()
    bench.planner.saw_use(7, 15.0)
    assert bench.planner.outcomes.right[Reason.OPENED] == 1
    assert bench.planner.outcomes.right_bytes == SIZE
    assert bench.at(18.0) == []


def test_who_has_read_all_of_a_session_does_not_get_it_brought_in_a_second_time() -> None:
    bench = Bench()
    bench.planner.saw_open(7, 10.0, SIZE)
    bench.planner.saw_use(7, 10.5, SIZE // 2)
    bench.planner.saw_open(7, 10.6, SIZE)  # the next layer
    bench.planner.saw_use(7, 10.7, SIZE - SIZE // 2)
    assert bench.at(20.0) == []


def test_who_reads_at_once_what_it_opened_has_the_device_for_itself() -> None:
    bench = Bench()
    bench.planner.saw_open(7, 10.0, SIZE)
    for now in (11.0, 12.0, 13.0):
        bench.demanded += 1_000_000
        assert bench.at(now) == []
    assert bench.at(14.1) == [("up", 7)], "what it did not read"


def test_a_tools_end_brings_the_session_in_at_once() -> None:
    bench = Bench()
    bench.hints(7, b"tool_done", 10.0)
    assert bench.tier.calls == [("up", 7)]


def test_one_that_is_up_is_left_alone() -> None:
    bench = Bench()
    bench.tier.up.add(7)
    bench.hints(7, b"tool_done", 10.0)
    assert bench.tier.calls == []


def test_no_guess_begins_while_a_reader_waits() -> None:
    bench = Bench(demand_waits=True)
    bench.hints(7, b"tool_done", 10.0)
    assert bench.at(11.0) == []
    bench.demand_waits = False
    assert bench.at(12.0) == [("up", 7)]


def test_what_was_read_for_others_leaves_nothing_to_guess_with() -> None:
    bench = Bench()
    bench.demanded = 10_000_000
    bench.hints(7, b"tool_done", 10.0)
    assert bench.at(10.9) == []
    assert bench.at(11.1) == [("up", 7)]


def test_the_surest_goes_first_and_not_too_many_at_once() -> None:
    bench = Bench(demand_waits=True)
    bench.hints(1, b"turn_expected=1", 10.0)
    bench.hints(2, b"tool_done", 10.0)
    bench.hints(3, b"tool_done", 10.0)
    bench.demand_waits = False
    assert bench.at(11.0) == [("up", 2)]
    assert bench.at(12.0) == []
    bench.happens()
    assert bench.tier.calls[1:] == [("up", 3)]
    bench.happens()
    assert bench.tier.calls[2:] == [("up", 1)]


def test_a_guess_that_failed_fails_nobody() -> None:
    bench = Bench()
    bench.hints(7, b"tool_done", 10.0)
    bench.happens(OSError(errno.EIO, "the device failed"))
    assert bench.budget.in_flight == 0
    assert bench.at(11.0) == []
    assert bench.at(41.0) == [("up", 7)], "not at once, but as long as it is wanted"


def test_idle_sessions_go_down_in_groups() -> None:
    bench = Bench()
    for session in (1, 2, 3):
        bench.tier.up.add(session)
        bench.planner.saw_use(session, 10.0)
    assert bench.at(309.0) == []
    assert bench.at(310.0) == [("down", 1), ("down", 2)]
    assert bench.at(311.0) == []
    bench.happens()
    assert bench.tier.calls[2:] == [("down", 3)]
    bench.happens()
    assert bench.tier.up == set()
    assert bench.at(313.0) == []


def test_one_that_is_used_again_before_its_turn_stays_up() -> None:
    bench = Bench()
    for session in (1, 2, 3):
        bench.tier.up.add(session)
        bench.planner.saw_use(session, 10.0)
    bench.at(310.0)
    bench.planner.saw_use(3, 311.0)
    bench.happens()
    assert bench.at(312.0) == []
    assert bench.tier.calls == [("down", 1), ("down", 2)]


def test_one_that_cannot_go_down_stays_and_tries_again() -> None:
    bench = Bench()
    bench.tier.up.add(1)
    bench.planner.saw_use(1, 10.0)
    assert bench.at(310.0) == [("down", 1)]
    bench.happens(OSError(errno.EIO, "the device failed"))
    assert bench.tier.up == {1}
    assert bench.at(311.0) == [("down", 1)]


def test_a_wrong_guess_is_counted_and_goes_down() -> None:
    bench = Bench()
    bench.hints(7, b"tool_done", 10.0)
    bench.happens()
    assert bench.at(60.0) == []
    assert bench.at(71.0) == [("down", 7)]
    assert bench.planner.outcomes.wrong[Reason.TOOL_DONE] == 1
    assert bench.planner.outcomes.wrong_bytes == SIZE


def test_a_session_that_was_removed_is_forgotten() -> None:
    bench = Bench(demand_waits=True)
    bench.hints(7, b"tool_done", 10.0)
    bench.planner.removed(7)
    bench.demand_waits = False
    assert bench.at(11.0) == []


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["open", "use", "tool_done", "turn_expected=3", "end", "fail", "busy"]),
        st.integers(1, 8),
        st.sampled_from([0.0, 0.5, 5.0, 70.0, 400.0]),
    ),
    max_size=60,
)


@given(MOVES)
def test_whatever_happens_limits_hold_and_all_ends_idle(
    moves: list[tuple[str, int, float]],
) -> None:
    bench, now = Bench(), 10.0
    for move, session, pause in moves:
        now += pause
        begun = [call for call in bench.at(now) if call[0] == "up"]
        assert not (begun and bench.demand_waits)
        match move:
            case "open":
                bench.planner.saw_open(session, now, SIZE)
            case "use":
                bench.tier.up.add(session)
                bench.planner.saw_use(session, now)
            case "end" | "fail" if bench.tier.pending:
                bench.happens(OSError(errno.EIO, "") if move == "fail" else None)
            case "busy":
                bench.demand_waits = not bench.demand_waits
            case "tool_done" | "turn_expected=3":
                bench.hints(session, move.encode(), now)
        assert bench.budget.in_flight <= bench.budget.in_flight_max
        assert len(bench.tier.pending) <= bench.budget.in_flight_max + 1
    bench.demand_waits = False
    for _ in range(60):
        now += 30
        while bench.tier.pending:
            bench.happens()
        bench.at(now)
    assert bench.tier.up == set(), "what nobody uses goes down"
    assert bench.budget.in_flight == 0


def test_nothing_is_brought_in_while_memory_is_strained() -> None:
    bench = Bench()
    bench.tier.is_strained = True
    bench.hints(7, b"tool_done", 10.0)
    assert bench.at(11.0) == []
    bench.tier.is_strained = False
    assert bench.at(12.0) == [("up", 7)]


def test_what_agents_found_on_the_accelerator_adds_up_over_sessions_and_reopenings() -> None:
    bench = Bench()
    for session, hits, misses in [(7, 10, 1), (8, 5, 5), (7, 12, 2), (7, 1, 1), (7, 3, 1)]:
        stats = b'hot_stats={"bytes": 1, "hits": %d, "misses": %d}' % (hits, misses)
        bench.hints(session, stats, 10.0)
    uses = bench.planner.hot_uses
    assert (uses.hits, uses.misses) == (12 + 3 + 5, 2 + 1 + 5)

"""Predictions: what is foretold of sessions, and what is not needed soon."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers import predict
from kvfs.tiers.hints import HotStats, Said, ToolDone, ToolStarted, TurnExpected
from kvfs.tiers.predict import PredictOptions, Predictor, Reason

SIZE = 1000
OPTIONS = PredictOptions(sessions_max=20)


def new() -> Predictor:
    predictor = Predictor(OPTIONS)
    predictor.bandwidth = 100.0
    return predictor


def reasons(predictor: Predictor, now: float) -> dict[int, Reason]:
    return {forecast.session: forecast.reason for forecast in predictor.wanted(now)}


def turns(predictor: Predictor, session: int, times: Iterator[float]) -> float:
    now = 0.0
    for now in times:
        list(predictor.idle(now))
        predictor.wanted(now)
        predictor.used(session, now)
    return now


def test_a_session_is_idle_once_after_its_last_use() -> None:
    predictor = new()
    for now in range(0, 200, 10):
        predictor.used(1, now)
    assert list(predictor.idle(489)) == []
    assert list(predictor.idle(490)) == [1]
    assert list(predictor.idle(5000)) == []
    predictor.used(1, 6000)
    assert list(predictor.idle(6299)) == []
    assert list(predictor.idle(6300)) == [1]


def test_a_regular_session_goes_down_and_is_there_again_in_time() -> None:
    """Each 20 minutes, with 10 s to bring it in."""
    predictor = new()
    now = turns(predictor, 1, (1200.0 * number for number in range(30)))
    assert list(predictor.idle(now + 400)) == [1]
    assert reasons(predictor, now + 1000) == {}
    (forecast,) = predictor.wanted(now + 1185)
    assert forecast.reason is Reason.GAPS
    assert forecast.by <= now + 1200 <= forecast.until
    predictor.used(1, now + 1200)
    assert predictor.wanted(now + 1200) == []


def test_a_guess_that_was_wrong_ends_and_the_session_is_idle_again() -> None:
    predictor = new()
    now = turns(predictor, 1, (1200.0 * number for number in range(30)))
    list(predictor.idle(now + 400))
    assert reasons(predictor, now + 1190) == {1: Reason.GAPS}
    assert list(predictor.idle(now + 1195)) == []
    assert reasons(predictor, now + 1300) == {}
    assert [*predictor.idle(now + 1300), *predictor.idle(now + 1500)] == [1]


def test_one_that_is_likely_to_come_soon_stays() -> None:
    predictor = new()
    now = turns(predictor, 1, (320.0 * number for number in range(60)))
    assert list(predictor.idle(now + 319)) == []
    assert list(predictor.idle(now + 500)) == [1]


def test_a_session_without_a_rule_is_not_guessed_at() -> None:
    predictor = new()
    gaps = [5, 4000, 40, 900, 2, 12_000, 600, 30, 2500, 7] * 3
    now = turns(predictor, 1, (float(sum(gaps[:number])) for number in range(30)))
    for later in range(0, 20_000, 100):
        list(predictor.idle(now + later))
        assert predictor.wanted(now + later) == []


def test_an_open_and_a_tools_end_are_wanted_at_once_and_before_guesses() -> None:
    predictor = new()
    now = turns(predictor, 1, (1200.0 * number for number in range(30))) + 1190
    list(predictor.idle(now - 100))
    predictor.used(2, 0.0)
    predictor.opened(3, now, SIZE)
    predictor.hint(2, ToolDone(), now, SIZE)
    wanted = predictor.wanted(now)
    assert [forecast.reason for forecast in wanted[:2]] == [Reason.OPENED, Reason.TOOL_DONE]
    assert wanted[2].sureness < wanted[1].sureness
    assert reasons(predictor, now + 61) == {}


def test_a_turn_that_was_announced_is_brought_in_in_time() -> None:
    predictor = new()
    predictor.used(1, 0.0)
    predictor.hint(1, TurnExpected(100), 0.0, SIZE)
    assert predictor.wanted(87.0) == []
    assert reasons(predictor, 89.0) == {1: Reason.SAID}, "10 s to read it, and 2 to look"
    assert list(predictor.idle(159.0)) == []
    assert reasons(predictor, 161.0) == {}
    assert list(predictor.idle(301.0)) == [1]


def test_one_that_is_announced_for_much_later_goes_down_at_once() -> None:
    predictor = new()
    predictor.used(1, 0.0)
    predictor.hint(1, TurnExpected(3600), 1.0, SIZE)
    assert list(predictor.idle(1.0)) == [1]
    assert reasons(predictor, 3590.0) == {1: Reason.SAID}
    assert list(predictor.idle(3650.0)) == []


def test_gaps_with_a_tool_and_without_are_learnt_apart() -> None:
    """A tool takes 20 minutes each time; what the user does in between has no rule."""
    predictor, now = new(), 0.0
    for number in range(40):
        predictor.used(1, now)
        predictor.hint(1, ToolStarted(), now + 0.5, SIZE)
        now += 1200
        predictor.used(1, now)
        now += [30, 7000, 500, 90][number % 4]
    predictor.used(1, now)
    assert list(predictor.idle(now + 300)) == [1]
    assert predictor.wanted(now + 1195) == []
    now += 4000
    predictor.used(1, now)
    predictor.hint(1, ToolStarted(), now, SIZE)
    assert list(predictor.idle(now + 300)) == [1]
    assert reasons(predictor, now + 1195) == {1: Reason.GAPS}


def test_sessions_that_are_used_together_come_together() -> None:
    predictor, now = new(), 0.0
    for number in range(30):
        now += [900, 4000, 400, 12_000][number % 4]
        list(predictor.idle(now))
        predictor.used(1, now)
        predictor.used(2, now + 6)
    now += 20_000
    list(predictor.idle(now))
    predictor.used(1, now)
    assert reasons(predictor, now) == {2: Reason.TOGETHER}


def test_what_the_accelerator_holds_whole_is_not_brought_in() -> None:
    predictor = new()
    predictor.hint(1, HotStats(SIZE), 0.0, SIZE)
    predictor.opened(1, 1.0, SIZE)
    assert predictor.wanted(1.0) == []
    predictor.hint(1, HotStats(SIZE - 1), 2.0, SIZE)
    assert reasons(predictor, 2.0) == {1: Reason.OPENED}


def test_what_was_removed_is_not_foretold() -> None:
    predictor = new()
    predictor.opened(1, 0.0, SIZE)
    predictor.used(2, 0.0)
    predictor.hint(2, TurnExpected(50), 0.0, SIZE)
    predictor.forget(1)
    predictor.forget(2)
    predictor.forget(3)
    assert predictor.wanted(45.0) == []
    assert list(predictor.idle(1000.0)) == []


HINTS = st.one_of(
    st.just(ToolStarted()),
    st.just(ToolDone()),
    st.builds(TurnExpected, st.floats(0, 5000)),
    st.builds(HotStats, st.integers(0, 2 * SIZE)),
)
WHAT = st.sampled_from(["use", "use", "open", "look", "forget"]) | HINTS
EVENTS = st.lists(st.tuples(WHAT, st.integers(1, 40), st.sampled_from([0, 0.3, 7, 100, 1500])))


@given(EVENTS)
def test_whatever_happens_it_is_bounded_and_keeps_its_word(
    events: list[tuple[str | Said, int, float]],
) -> None:
    predictor, now = new(), 0.0
    used: dict[int, float] = {}
    announced: set[int] = set()
    for what, session, pause in events:
        now += pause
        match what:
            case "use":
                predictor.used(session, now)
                used[session] = now
                announced.discard(session)
            case "open":
                predictor.opened(session, now, SIZE)
            case "forget":
                predictor.forget(session)
            case "look":
                wanted = predictor.wanted(now)
                assert all(forecast.until >= now for forecast in wanted)
                chances = [forecast.sureness for forecast in wanted]
                assert chances == sorted(chances, reverse=True)
                assert all(chance >= OPTIONS.least_sureness for chance in chances)
                for idle in predictor.idle(now):
                    is_long = now - used.get(idle, -1e9) >= OPTIONS.idle_seconds
                    assert is_long or idle in announced
                    assert idle not in {forecast.session for forecast in predictor.wanted(now)}
            case _:
                assert not isinstance(what, str)
                predictor.hint(session, what, now, SIZE)
                announced.add(session)
        tables = (predictor._sessions, predictor._planned, predictor._wanted)
        assert all(len(table) <= OPTIONS.sessions_max for table in tables)
        assert predictor._planned.keys() | predictor._wanted.keys() <= predictor._sessions.keys()
        for heap in (predictor._checks, predictor._later):
            assert len(heap) <= 2 * OPTIONS.sessions_max + predict._STALE_MAX + 1


def test_a_flood_of_hints_takes_no_memory() -> None:
    predictor = new()
    for number in range(5000):
        predictor.hint(1, TurnExpected(200 + number % 50), float(number) / 100, SIZE)
    assert len(predictor._checks) < 200
    assert len(predictor._later) < 200

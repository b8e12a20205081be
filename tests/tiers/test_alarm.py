"""An alarm against looking back over all that it saw."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers.alarm import Alarm

LIMIT, SECONDS = 88.0, 120.0
LEVELS = st.sampled_from([0.0, 87.9, 88.0, 88.1, 100.0])


@given(st.lists(st.tuples(LEVELS, st.sampled_from([0.5, 1.0, 59.0, 60.0, 119.9, 120.0]))))
def test_it_is_on_once_all_looks_of_so_many_seconds_were_above(
    looks: list[tuple[float, float]],
) -> None:
    alarm, now, above, was_on = Alarm(LIMIT, SECONDS), 0.0, list[float](), False
    for level, passed in looks:
        now += passed
        above = [*above, now] if level > LIMIT else []
        changed = alarm.saw(level, now)
        assert alarm.is_on == (bool(above) and now - above[0] >= SECONDS)
        assert changed == (alarm.is_on != was_on), "told once, and once that it is over"
        was_on = alarm.is_on

"""Real engines, each in an environment of its own, on a directory of a mount: `make engines`."""

from __future__ import annotations

import pytest

from scripts.engines.catalog import ENGINES
from scripts.engines.engine import Engine
from scripts.engines.promises import keep, kill, reclaim, restart

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("fuse"),
]


def of_engines(*, that_keep_open: bool) -> pytest.MarkDecorator:
    chosen = [engine for engine in ENGINES if engine.keeps_open == that_keep_open]
    return pytest.mark.parametrize("engine", chosen, ids=lambda engine: engine.name)


@pytest.fixture(autouse=True)
def environment(engine: Engine) -> None:
    engine.environment.make()


@of_engines(that_keep_open=False)
def test_hits_after_a_restart(engine: Engine) -> None:
    restart(engine, None)


@of_engines(that_keep_open=False)
def test_hits_after_the_daemon_was_killed(engine: Engine) -> None:
    kill(engine, None)


@of_engines(that_keep_open=False)
def test_reclaim_under_it_is_harmless(engine: Engine) -> None:
    reclaim(engine, None)


@of_engines(that_keep_open=True)
def test_what_it_keeps_open_stays(engine: Engine) -> None:
    keep(engine, None)

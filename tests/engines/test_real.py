"""Real engines, each in an environment of its own, on a directory of a mount: `make engines`."""

from __future__ import annotations

import pytest

from scripts.engines.catalog import ENGINES
from scripts.engines.engine import Engine
from scripts.engines.promises import kill, reclaim, restart

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("fuse"),
    pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name),
]


@pytest.fixture(autouse=True)
def environment(engine: Engine) -> None:
    engine.environment.make()


def test_hits_after_a_restart(engine: Engine) -> None:
    restart(engine, None)


def test_hits_after_the_daemon_was_killed(engine: Engine) -> None:
    kill(engine, None)


def test_reclaim_under_it_is_harmless(engine: Engine) -> None:
    reclaim(engine, None)

"""Requests of an engine on a directory of a mount: what is loaded is what was computed, and what
was stored is found."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.torch.errors import NotKVFSError
from kvfs.vllm.place import Place
from kvfs.vllm.settings import Settings
from tests.support.mounter import Mounter
from tests.vllm.simulated import BLOCK, Asked, Engine, fingerprint

PROMPT = list(range(100, 120))


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def loadable(tokens: int) -> int:
    """Of so many stored ones: the last one is always computed."""
    return whole(tokens - 1)


def session_of(directory: Path) -> Path:
    (found,) = (one for one in directory.iterdir() if not one.name.startswith("."))
    return found


@pytest.fixture
def stored(directory: Path) -> Path:
    """One session, of the prompt."""
    engine = Engine(directory)
    assert engine.answer(PROMPT).hits == 0
    engine.close()
    return session_of(directory)


def test_a_new_engine_finds_what_another_stored(stored: Path) -> None:
    engine = Engine(stored.parent)
    assert engine.answer(PROMPT).hits == loadable(len(PROMPT))
    assert engine.answer([*PROMPT, 1, 2]).hits == len(PROMPT)
    assert engine.answer([*PROMPT[:9], 1, 2, 3, 4, 5]).hits == 8
    assert engine.answer([1, *PROMPT]).hits == 0
    engine.close()


def test_a_match_is_read_into_warm_memory_before_its_request_runs(stored: Path) -> None:
    layers = sorted(stored.glob("layer.*"))
    os.setxattr(stored, "user.kvfs.demote", b"1")
    _until(lambda: _tiers(layers) == {b"cold"})
    engine = Engine(stored.parent)
    assert engine.planner.matched(Asked("1", PROMPT), 0) == loadable(len(PROMPT))
    _until(lambda: _tiers(layers) == {b"warm"})
    engine.close()


def _tiers(layers: list[Path]) -> set[bytes]:
    return {os.getxattr(layer, "user.kvfs.tier") for layer in layers}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_conversation_is_one_session_and_a_turn_appends_to_it(directory: Path) -> None:
    engine, tokens = Engine(directory), PROMPT
    sizes = []
    for turn in range(4):
        hits = engine.answer(tokens, chunk=7).hits
        assert hits == (whole(len(tokens) - 10) if turn else 0)
        sizes.append((session_of(directory) / "layer.000").stat().st_size)
        tokens = [*tokens, *range(turn * 10, turn * 10 + 10)]
    engine.close()
    assert sizes == [whole(len(PROMPT) + 10 * turn) * 2 * 2 * 4 * 4 for turn in range(4)]


def test_a_prompt_that_leaves_a_session_shares_what_they_have_in_common(directory: Path) -> None:
    engine, prefix = Engine(directory), list(range(400, 432))
    one, other = [*prefix, *range(8)], [*prefix, *range(50, 58)]
    assert engine.answer(one).hits == 0
    assert engine.answer(other).hits == len(prefix)
    assert engine.answer(one).hits == loadable(len(one))
    assert engine.answer(other).hits == loadable(len(other))
    engine.close()
    assert len(list(directory.iterdir())) == 2


def test_requests_of_one_step_that_share_a_prefix_share_what_is_stored(directory: Path) -> None:
    """Whoever is written second finds the first one's blocks there."""
    first, second = Engine(directory), Engine(directory)
    first.planner.matched, second.planner.matched = (lambda *_: 0), (lambda *_: 0)  # type: ignore
    prefix = list(range(32))
    first.answer([*prefix, *range(50, 58)])
    second.answer([*prefix, *range(60, 68)])
    first.close()
    second.close()
    places = set()
    for session in directory.iterdir():
        with open(session / "layer.000") as layer:
            os.fsync(layer.fileno())
            places.add(json.loads(os.getxattr(layer.fileno(), "user.kvfs.extents"))[0]["address"])
    assert len(list(directory.iterdir())) == 2 and len(places) == 1


Damage = Callable[[Path], None]


def _cut(session: Path) -> None:
    os.truncate(session / "layer.001", 40)


def _remove(session: Path) -> None:
    (session / "layer.001").unlink()


def _put_another_in_its_place(session: Path) -> None:
    shutil.copyfile(session / "layer.000", session / "layer.001")


def _overwrite_a_number(session: Path) -> None:
    with open(session / "layer.002", "r+b") as file:
        file.seek(100)
        file.write(b"\1")


def _put_other_tokens(session: Path) -> None:
    """The KV is of other ones then."""
    with open(session / "tokens", "r+b") as file:
        file.write(b"\7\0\0\0")


def _cut_sums(session: Path) -> None:
    os.truncate(session / "sums", 30)


def _remove_sums(session: Path) -> None:
    (session / "sums").unlink()


def _no_json(session: Path) -> None:
    (session / "session.json").write_text("{")


def _reclaim(session: Path) -> None:
    shutil.rmtree(session)


DAMAGES = [
    _cut, _remove, _put_another_in_its_place, _overwrite_a_number, _put_other_tokens, _cut_sums,
    _remove_sums, _no_json, _reclaim,
]  # fmt: skip


# An engine that knows a session has read these, and all that they speak of is still right.
READ_ONCE = [_put_other_tokens, _no_json]
SEEN_WHEN_LOADED = [_put_another_in_its_place, _overwrite_a_number, _put_other_tokens]


@pytest.mark.parametrize(
    ("damage", "is_known"),
    [
        (one, known)
        for one in DAMAGES
        for known in (False, True)
        if not known or one not in READ_ONCE
    ],
)
def test_what_is_damaged_is_computed_and_stored_again(
    stored: Path, damage: Damage, is_known: bool
) -> None:
    engine = Engine(stored.parent)
    if is_known:
        assert engine.answer(PROMPT).hits
    damage(stored)
    for tokens in ([7, *PROMPT[1:]], PROMPT):
        answer = engine.answer(tokens)
        assert not answer.hits or answer.failed
        assert not answer.failed or damage in SEEN_WHEN_LOADED
    assert engine.answer(PROMPT).hits == loadable(len(PROMPT))
    engine.close()
    engine = Engine(stored.parent)
    answer = engine.answer(PROMPT)
    assert answer.hits == loadable(len(PROMPT)) and not answer.failed
    engine.close()


@pytest.mark.parametrize("number", [0, 1])
def test_what_was_computed_from_a_load_that_failed_is_not_stored(
    directory: Path, number: int
) -> None:
    """Though another session with the same prefix could go on with it."""
    engine, prefix = Engine(directory), list(range(400, 432))
    for last in (50, 60):
        engine.answer([*prefix, *range(last, last + 8)])
    _overwrite_a_number(sorted(directory.iterdir())[number])
    answers = [engine.answer([*prefix, *range(70, 78)]) for _ in range(3)]
    assert answers[-1].hits == 36 and not answers[-1].failed
    engine.close()


@pytest.mark.parametrize(
    "change",
    [{"weights": "2"}, {"dtype": "bfloat16"}, {"rope": {"rope_theta": 1.0}}, {"model": "other"}],
)
def test_another_model_in_the_same_directory_finds_nothing(
    stored: Path, change: dict[str, Any]
) -> None:
    other = Engine(stored.parent, like=fingerprint(**change))
    assert other.answer(PROMPT).hits == 0
    assert other.answer(PROMPT).hits == loadable(len(PROMPT))
    other.close()
    engine = Engine(stored.parent)
    assert engine.answer(PROMPT).hits == loadable(len(PROMPT))
    engine.close()


def test_two_engines_grow_the_same_conversation(directory: Path) -> None:
    engines, tokens = [Engine(directory), Engine(directory)], PROMPT
    for turn in range(6):
        hits = engines[turn % 2].answer(tokens).hits
        assert hits == (whole(len(tokens) - 6) if turn else 0)
        tokens = [*tokens, *range(turn * 6, turn * 6 + 6)]
    for engine in engines:
        engine.close()
    session_of(directory)


def test_conversations_are_kept_apart_where_that_is_wanted(directory: Path) -> None:
    engine = Engine(directory, by_request=True)
    for about in ({"session_id": "a"}, {"kv_transfer_params": {"session": "../b"}}):
        assert engine.answer(PROMPT, **about).hits == 0
        assert engine.answer(PROMPT, **about).hits == loadable(len(PROMPT))
    engine.close()
    assert sorted(one.name for one in directory.iterdir()) == ["%2E.%2Fb", "a"]


def test_who_has_another_salt_finds_nothing(directory: Path) -> None:
    engine = Engine(directory)
    for about in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        assert engine.answer(PROMPT, **about).hits == 0
        assert engine.answer(PROMPT, **about).hits == loadable(len(PROMPT))
    engine.close()


@pytest.mark.parametrize(
    "about",
    [{"lora_request": 1}, {"mm_features": [1]}, {"prompt_embeds": 1}, {"pooling_params": 1}],
)
def test_kv_that_tokens_alone_do_not_tell_is_left_out(stored: Path, about: dict[str, Any]) -> None:
    engine = Engine(stored.parent)
    assert engine.answer(PROMPT, **about).hits == 0
    assert engine.answer([*PROMPT, 1, 2, 3, 4, 5], **about).hits == 0
    engine.close()
    assert (stored / "tokens").stat().st_size == len(PROMPT) * 4


def test_an_idle_engine_holds_nothing_open(directory: Path) -> None:
    """What is open is never reclaimed, and keeps the mount."""
    engine = Engine(directory)
    engine.answer(PROMPT, is_last_told=False)
    deadline = time.monotonic() + 30
    while not any(directory.iterdir()) or open_below(directory):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    engine.answer([*PROMPT, *range(8)])
    engine.close()
    session_of(directory)


def open_below(directory: Path) -> list[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.exists(link)]
    return [name for name in names if name.startswith(str(directory))]


def test_a_session_says_whose_it_is(stored: Path) -> None:
    assert os.getxattr(stored, "user.kvfs.model").decode() == str(fingerprint())
    assert os.getxattr(stored / "layer.000", "user.kvfs.dtype") == b"float32"
    assert os.getxattr(stored / "layer.000", "user.kvfs.shape") == b"2,2,4"


def test_the_engine_goes_on_without_the_mount_and_with_it_again(fuse: None) -> None:
    mounter = Mounter()
    try:
        mounter.mount()
        engine = Engine(mounter.mountpoint / "kv")
        engine.answer(PROMPT)
        mounter.kill()
        assert engine.answer(PROMPT).hits == 0
        mounter.mount()
        assert engine.answer(PROMPT).hits == loadable(len(PROMPT))
        mounter.umount()
        assert engine.answer([*PROMPT, 1, 2, 3, 4, 5]).hits == 0
        assert not list(mounter.mountpoint.iterdir())
        engine.close()
    finally:
        mounter.close()


def test_elsewhere_than_on_kvfs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotKVFSError, match="not on KVFS"):
        Place(tmp_path / "kv")
    assert not list(tmp_path.iterdir())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_history(shared_mount: Path, data: st.DataObject) -> None:
    """Two engines, one of them with another block order in its memory each time; damages, forks,
    restarts: the engine itself asserts that its pages hold what they should."""
    directory = Path(tempfile.mkdtemp(dir=shared_mount))
    engines = [Engine(directory), Engine(directory)]
    history: list[list[int]] = [[]]
    is_damaged = False
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["answer"] * 6 + ["damage", "restart"]))
        number = data.draw(st.integers(0, 1))
        sessions = [one for one in directory.iterdir() if not one.name.startswith(".")]
        if what == "damage" and sessions:
            damage = data.draw(st.sampled_from(DAMAGES))
            with suppress(FileNotFoundError):  # what was damaged before
                damage(data.draw(st.sampled_from(sorted(sessions))))
            is_damaged = True
        elif what == "restart":
            engines[number].close()
            engines[number] = Engine(directory)
        else:
            base = data.draw(st.sampled_from(history))
            cut = data.draw(st.integers(0, len(base)))
            more = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=20))
            tokens = [*base[:cut], *more]
            answer = engines[number].answer(tokens, chunk=data.draw(st.sampled_from([1, 5, 64])))
            if not is_damaged:
                expected = max(_common(tokens, one) for one in history)
                assert answer.hits == min(whole(expected), loadable(len(tokens)))
            history.append(tokens)
    for engine in engines:
        engine.close()


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_connector_extra_config": {}}, "needs a directory"),
        ({"kv_connector_extra_config": {"path": "/x", "sesions": "prompt"}}, "'sesions'"),
        ({"kv_connector_extra_config": {"path": "/x", "sessions": "user"}}, "not 'user'"),
        ({"kv_load_failure_policy": "fail"}, "recompute"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(changes: dict[str, Any], says: str) -> None:
    class Transfer:
        kv_connector_extra_config: dict[str, Any] = {"path": "/x"}  # noqa: RUF012
        kv_load_failure_policy = "recompute"

    transfer = Transfer()
    for name, value in changes.items():
        setattr(transfer, name, value)
    with pytest.raises(ValueError, match=says) as error:
        Settings.of(transfer)
    assert "\n" not in str(error.value)


def test_ranks_have_sessions_of_their_own_and_load_what_all_of_them_have(directory: Path) -> None:
    like = fingerprint(kv_heads=4, ranks=2)
    engine = Engine(directory, like=like)
    assert engine.answer(PROMPT).hits == 0
    assert engine.answer(PROMPT).hits == loadable(len(PROMPT))
    assert sorted(one.name for one in directory.iterdir()) == ["rank0of2", "rank1of2"]
    _overwrite_a_number(session_of(directory / "rank1of2"))
    assert engine.answer(PROMPT).failed
    answer = engine.answer(PROMPT)
    assert answer.hits == loadable(len(PROMPT)) and not answer.failed
    shutil.rmtree(session_of(directory / "rank0of2"))
    assert engine.answer(PROMPT).hits == 0
    assert engine.answer(PROMPT).hits == loadable(len(PROMPT))
    engine.close()

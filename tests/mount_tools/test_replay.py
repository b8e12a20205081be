"""`kvfs replay`: how traces are read, what is printed, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvfs.engine.policy import Hint
from mount_tools.common import CommandError
from mount_tools.traces import read_trace
from tests.support.command import error_line
from tests.support.mounter import kvfs

# A directory with agent_turns.csv and mooncake_conversation.jsonl.
TRACES = os.environ.get("KVFS_TRACES")

HEADER = "session,stream,turn,t_s,in_tok,prefix_match_tok,api_s,stop"


def write_requests(path: Path, requests: list[list[int]]) -> Path:
    lines = [
        json.dumps({"timestamp": 1000 * second, "hash_ids": hash_ids})
        for second, hash_ids in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_turns(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def ratios(path: Path, *arguments: str) -> dict[tuple[str, float], float]:
    document = json.loads(kvfs("replay", path, *arguments, "--json").stdout)
    assert all(
        set(r) == {"policy", "cache_pct", "hit_ratio", "default"} for r in document["results"]
    )
    return {(r["policy"], r["cache_pct"]): r["hit_ratio"] for r in document["results"]}


@pytest.fixture
def cyclic(tmp_path: Path) -> Path:
    """Ten prompts of two blocks in turn, twenty times."""
    return write_requests(tmp_path / "cyclic.jsonl", [[2 * n, 2 * n + 1] for n in range(10)] * 20)


# -- what is read --------------------------------------------------------------------------


def test_a_request_list_is_read_tail_first_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"timestamp": 2500, "hash_ids": [900, 7, 8], "input_length": 1300}\n'
        '\n{"timestamp": 1000, "hash_ids": [900, 900, 5]}\n'
    )
    trace = read_trace(path, 4)
    assert trace.times_s == [1.0, 2.5]
    first, second = (request.tolist() for request in trace.requests)
    assert (len(first), len(second), trace.blocks, trace.accesses) == (2, 3, 4, 5)
    assert second[-1] == first[-1], "the first block of a prompt comes last"


def test_turns_share_the_whole_blocks_of_their_prefix(tmp_path: Path) -> None:
    rows = [
        "a,main,0,0,1600,0,1,tool_use",  # 3 blocks
        "a,main,1,10,2100,1599,1,end_turn",  # 3 of 4 shared
        "a,main,2,20,1100,1030,1,",  # 2 of them
        "a,sub,0,5,1100,0,1,tool_use",  # another stream shares nothing
        "a,main,3,30,3000,2048,1,end_turn",  # no more than the last one had: 2 of 5
    ]
    trace = read_trace(write_turns(tmp_path / "turns.csv", rows), 4)
    a, sub, b, c, d = (request.tolist()[::-1] for request in trace.requests)
    assert [len(request) for request in (a, b, c, d, sub)] == [3, 4, 2, 5, 2]
    assert b[:3] == a and c == a[:2] and d[:2] == a[:2]
    assert set(sub).isdisjoint(a + b + c + d)
    assert trace.blocks == len(set(a + b + c + d + sub)) == 3 + 1 + 0 + 3 + 2


def test_sessions_start_at_random_within_the_window(tmp_path: Path) -> None:
    rows = [f"s{n},main,0,{n},1024,0,1,tool_use" for n in range(50)]
    path = write_turns(tmp_path / "turns.csv", rows)
    starts = np.random.default_rng(1).uniform(0, 2 * 3600, 50)
    assert read_trace(path, 2).times_s == pytest.approx(sorted(starts + np.arange(50)))


def test_hints_come_when_a_turn_ends_but_not_after_the_next_began(tmp_path: Path) -> None:
    rows = [
        "a,main,0,0,600,0,3,tool_use",
        "a,main,1,10,600,512,20,end_turn",
        "a,main,2,25,600,512,1,end_turn",
    ]
    trace = read_trace(write_turns(tmp_path / "turns.csv", rows), 4)
    start = trace.times_s[0]
    told = [(given.request, round(given.time_s - start), given.hint) for given in trace.hints]
    assert told == [
        (0, 3, Hint.TOOL_RUNNING),
        (2, 26, Hint.WAITING),
        (2, 26, Hint.FINISHED),
    ]


# -- what is printed -----------------------------------------------------------------------


def test_ratios_of_a_cycle_that_is_too_long_for_lru(cyclic: Path) -> None:
    found = ratios(cyclic, "--size", "50", "--size", "100")
    assert {policy for policy, _ in found} == {"lru", "s3fifo", "heat", "gittins", "min"}
    assert found["lru", 50.0] == 0
    assert found["min", 50.0] == 0.5 * 19 / 20, "half of the blocks stay, the others pass by"
    assert found["lru", 100.0] == found["min", 100.0] == 0.95
    assert found["gittins", 50.0] > 0.2


def test_one_policy_is_the_default(cyclic: Path) -> None:
    document = json.loads(kvfs("replay", cyclic, "--json", "--size", "20").stdout)
    assert [r["policy"] for r in document["results"] if r["default"]] == ["gittins"]


def test_the_table_names_policies_and_sizes(cyclic: Path) -> None:
    output = kvfs("replay", cyclic, "--size", "50", "--size", "2.5").stdout.splitlines()
    assert output[0].startswith("200 requests, 400 blocks asked for, 20 of them unique")
    assert output[2].split() == ["policy", "2.5", "%", "50", "%"]
    assert any(line.split() == ["lru", "0.0000", "0.0000"] for line in output)
    assert any(line.startswith("gittins *") for line in output)


def test_only_the_policies_asked_for_run(cyclic: Path) -> None:
    found = ratios(cyclic, "--policy", "min", "--policy", "lru", "--size", "10")
    assert list(found) == [("min", 10.0), ("lru", 10.0)]


def test_turns_have_rows_with_and_without_hints(tmp_path: Path) -> None:
    rows = [
        f"s{n % 3},main,{n},{n * 10},{600 * n},{600 * n - 600},1,tool_use" for n in range(1, 30)
    ]
    path = write_turns(tmp_path / "turns.csv", rows)
    found = ratios(path, "--size", "50", "--window-hours", "24")
    assert {"gittins", "gittins-no-hints", "gittins-all-hints"} <= {policy for policy, _ in found}


def test_a_plot_is_a_picture(cyclic: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kvfs("replay", cyclic, "--plot", tmp_path / "hits.png", "--policy", "lru")
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_the_work(
    cyclic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    result = kvfs("replay", cyclic, "--plot", tmp_path / "hits.png", check=False)
    assert "pip install 'kvfs[plot]'" in error_line(result)


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no trace"),
        (b"\x80\xff\x00\x01", "is not text"),
        (b"some words\n", "is no trace: neither lines of JSON with hash_ids nor CSV"),
        (b"session,stream,t_s\na,b,1\n", "with the columns session, stream, t_s, in_tok"),
        (b'{"hash_ids": [1]}\n{"hash_ids": [1', "line 2: not a JSON object"),
        (b'{"hash_ids": [1]}\n[1]\n', "line 2: hash_ids is not a list"),
        (b'{"hash_ids": ["1"]}\n', "line 1: hash_ids is not a list of whole numbers"),
        (b'{"hash_ids": [true]}\n', "line 1: hash_ids is not a list of whole numbers"),
        (b'{"prompt": "x"}\n', "line 1: hash_ids is not a list"),
        (b'{"hash_ids": [1], "timestamp": "now"}\n', "line 1: timestamp is not a number"),
        (b'{"hash_ids": [1], "timestamp": NaN}\n', "line 1: timestamp is not a number"),
        (b'{"hash_ids": []}\n', "has no request of a whole block of 512 tokens"),
        (f"{HEADER}\n".encode(), "has no request of a whole block of 512 tokens"),
        (f"{HEADER}\na,main,0,0,511,0,1,\n".encode(), "has no request of a whole block"),
        (f"{HEADER}\na,main,0,0,600,0,1,\na,main,0,x,600,0,1,\n".encode(), "line 3: a number"),
        (f"{HEADER}\na,main,0,0,-600,0,1,\n".encode(), "line 2: a number"),
        (f"{HEADER}\na,main,0,nan,600,0,1,\n".encode(), "line 2: a number"),
        (f"{HEADER}\na,main\n".encode(), "line 2: a number"),
    ],
)
def test_garbage_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(CommandError) as refusal:
        read_trace(path, 4)
    message = str(refusal.value)
    assert said in message
    assert str(path) in message and "\n" not in message


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("some words\n")
    assert "is no trace" in error_line(kvfs("replay", tmp_path / "words", check=False))
    assert "No such file" in error_line(kvfs("replay", tmp_path / "none", check=False))
    assert "directory" in error_line(kvfs("replay", tmp_path, check=False))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "0"), "--size is a percentage"),
        (("--size", "nan"), "--size is a percentage"),
        (("--size", "101"), "--size is a percentage"),
        (("--window-hours", "0"), "--window-hours must be more than 0"),
        (("--policy", "best"), "'best' is not one of"),
    ],
)
def test_wrong_options_are_refused(cyclic: Path, arguments: tuple[str, str], said: str) -> None:
    assert said in error_line(kvfs("replay", cyclic, *arguments, check=False), status=2)


def test_a_plot_goes_nowhere_else_than_into_a_png(cyclic: Path, tmp_path: Path) -> None:
    for name, said in (("hits.jpg", "ends in .png"), ("none/hits.png", "is no directory")):
        result = kvfs("replay", cyclic, "--plot", tmp_path / name, check=False)
        assert said in error_line(result)


# -- real traces ---------------------------------------------------------------------------


def gains(name: str, *arguments: str) -> dict[float, float]:
    """Points of the default over LRU, by size."""
    assert TRACES is not None
    policies = ("--policy", "lru", "--policy", "gittins")
    found = ratios(Path(TRACES) / name, *policies, *arguments)
    sizes = {size for _, size in found}
    return {size: 100 * (found["gittins", size] - found["lru", size]) for size in sizes}


@pytest.mark.skipif(TRACES is None, reason="KVFS_TRACES names no directory of real traces")
def test_the_default_gains_on_a_chat_service() -> None:
    gained = gains("mooncake_conversation.jsonl")
    assert gained[1.0] >= 4 and gained[5.0] >= 2.3 and gained[10.0] >= 1.2


@pytest.mark.skipif(TRACES is None, reason="KVFS_TRACES names no directory of real traces")
@pytest.mark.parametrize(("hours", "least"), [(4, 12), (24, 0.5)])
def test_the_default_gains_on_coding_agents(hours: int, least: float) -> None:
    window = ("--window-hours", str(hours))
    assert gains("agent_turns.csv", *window, "--size", "1")[1.0] >= least
    assert gains("agent_turns.csv", *window, "--size", "5")[5.0] >= -0.5

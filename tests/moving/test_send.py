"""Sessions that move from one ring to another."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mount_tools.common import CommandError
from mount_tools.moving.content import of_bytes
from mount_tools.moving.places import laid, session_at
from mount_tools.moving.reading import content_of_files
from mount_tools.moving.sending import send
from mount_tools.moving.stream import StreamWriter
from tests.conftest import MounterMaker
from tests.moving.sessions import (
    BLOCK,
    fork,
    left_behind,
    make_session,
    make_tree,
    move,
    receive_bytes,
    shown,
    silent,
    stream_of,
)
from tests.support.command import error_line
from tests.support.mounter import KVFS, kvfs
from tests.support.users import as_user, needs_root

MIB = 1024 * 1024
SECONDS = 60


def run_through_pipe(send: list[Any], receive: list[Any]) -> tuple[int, int, str]:
    """Exit statuses of both, and what both say on stderr."""
    sender = subprocess.Popen([KVFS, "send", *send], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    receiver = subprocess.Popen(
        [KVFS, "receive", *receive], stdin=sender.stdout, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert sender.stdout is not None
    sender.stdout.close()
    said = receiver.communicate(timeout=SECONDS)[1]
    assert sender.stderr is not None
    said = sender.stderr.read() + said
    return sender.wait(SECONDS), receiver.returncode, said.decode()


def received(target: Path, stream: bytes, *options: str | Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [KVFS, "receive", target, *options], input=stream, check=False, capture_output=True,
        timeout=SECONDS,
    )  # fmt: skip
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout.decode(), result.stderr.decode()
    )


# -- whole sessions


def test_a_tree_arrives_as_it_is_in_another_ring(here: Path, there: Path) -> None:
    session = make_tree(here / "agent")
    before = shown(session)
    assert run_through_pipe([session], [there / "agent"]) == (0, 0, "")
    move(session, there / "compressed", compress=True)
    assert shown(there / "agent") == shown(there / "compressed") == before == shown(session)
    assert (there / "agent" / "sparse").stat().st_blocks < MIB // 512
    assert os.listdir(here) == ["agent"]
    assert sorted(os.listdir(there)) == ["agent", "compressed"]


def test_a_session_without_anything_arrives(here: Path, there: Path) -> None:
    (here / "nothing").mkdir(mode=0o750)
    move(here / "nothing", there / "nothing")
    assert shown(there / "nothing") == shown(here / "nothing")


def test_what_compresses_is_smaller_on_the_wire_and_the_same_at_its_end(
    here: Path, there: Path
) -> None:
    session = make_session(here / "agent")
    (session / "layer.003").write_bytes(b"again and again " * 100_000)
    plain, _ = move(session, there / "plain")
    small, _ = move(session, there / "small", compress=True)
    assert small.written < plain.written - 1_500_000
    assert shown(there / "plain") == shown(there / "small") == shown(session)


def test_both_ends_say_in_json_what_went(here: Path, there: Path) -> None:
    session = make_session(here / "agent")
    sender = subprocess.run(
        [KVFS, "send", "--json", session], check=True, capture_output=True, timeout=SECONDS
    )
    sent, got = json.loads(sender.stderr), received(there / "a", sender.stdout, "--json")
    told = json.loads(got.stdout)
    assert sent["written"] == len(sender.stdout) > sent["size"] == told["size"] > MIB
    assert sent["entries"] == told["entries"] == 6
    assert sent["content"] == told["content"]
    assert sent["base"] is told["base"] is None


def test_content_is_the_same_number_on_every_ring_and_another_for_other_bytes(
    here: Path, there: Path
) -> None:
    session = make_tree(here / "agent")
    move(session, there / "agent")
    first, second = laid(session), laid(there / "agent")
    assert content_of_files(first, first.files) == content_of_files(second, second.files)
    assert first.known_content == second.known_content == content_of_files(first, first.files)
    with (session / "layer.002").open("r+b") as file:
        file.seek(5)
        file.write(bytes([file.read(1)[0] ^ 1]))
    changed = laid(session)
    assert changed.known_content is None
    assert content_of_files(changed, changed.files) != first.known_content


@given(st.binary(max_size=100), st.integers(0, 3), st.integers(0, 2))
def test_zeros_count_nothing_wherever_they_are(data: bytes, before: int, behind: int) -> None:
    block = memoryview(data.ljust(BLOCK, b"\0"))
    padded = bytes(before * BLOCK) + bytes(block) + bytes(behind * BLOCK)
    assert of_bytes(b"p", 0, memoryview(padded)) == of_bytes(b"p", before * BLOCK, block)
    assert of_bytes(b"p", 0, memoryview(data)) == of_bytes(b"p", 0, block)


# -- differences


class Mutator:
    """Changes a session as a fork of it goes on, at random."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def change(self, session: Path) -> None:
        random = self.random
        files = [path for path in session.rglob("*") if path.is_file() and not path.is_symlink()]
        path = random.choice(files) if files else None
        new = session / f"new-{random.randrange(6)}"
        match random.randrange(11):
            case 0 | 1 if path:
                with path.open("ab") as file:
                    file.write(random.randbytes(random.choice([1, 5000, BLOCK, 3 * BLOCK])))
            case 2 | 3 if path:
                with path.open("r+b") as file:
                    file.seek(random.randrange(path.stat().st_size + 10))
                    file.write(random.randbytes(random.choice([1, 4096, BLOCK])))
            case 4 if path:
                os.truncate(path, random.randrange(path.stat().st_size + 1))
            case 5 if path:
                size = path.stat().st_size
                os.truncate(path, size // 2)
                os.truncate(path, size + random.choice([0, 1, 2 * BLOCK]))
            case 6 if path:
                path.unlink()
            case 7:
                _clear(new)
                if random.randrange(2):
                    new.mkdir()
                    (new / "inner").write_bytes(random.randbytes(BLOCK + 7))
                else:
                    new.write_bytes(random.randbytes(random.choice([0, 3, BLOCK + 1])))
            case 8 if path:
                _clear(new)
                if path.exists():
                    os.link(path, new)
            case 9:
                _clear(new)
                os.symlink("tokens", new)
            case _ if path:
                os.setxattr(path, "user.x", random.randbytes(3))
                os.rename(path, session / f"moved-{random.randrange(3)}")


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@settings(
    max_examples=12, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_any_changes_since_any_fork_arrive(
    here: Path, there: Path, seed: int, rounds: list[int]
) -> None:
    """The session goes on; what changed since the last time is sent; the other end builds it on
    what it had then, sometimes without a note of what that was."""
    mutator = Mutator(Random(seed))
    name = f"{time.monotonic_ns()}"
    session = make_session(here / name, tokens=2000, layers=2, seed=seed)
    fork(session, f"{name}-0")
    move(here / f"{name}-0", there / f"{name}-0")
    for number, changes in enumerate(rounds):
        for _ in range(changes):
            mutator.change(session)
        base, new = f"{name}-{number}", f"{name}-{number + 1}"
        if mutator.random.randrange(2):
            os.removexattr((here, there)[mutator.random.randrange(2)] / base, "user.kvfs-content")
        fork(session, new)
        move(here / new, there / new, since=here / base)
        assert shown(there / new) == shown(here / new)
        assert shown(there / base) == shown(here / base)
        made = laid(there / new)
        assert made.known_content == content_of_files(made, made.files)


def test_only_what_changed_since_a_fork_is_read_and_sent(here: Path, there: Path) -> None:
    session = make_session(here / "agent", tokens=100_000)
    fork(session, "base")
    move(here / "base", there / "base")
    with (session / "layer.001").open("ab") as file:
        file.write(b"one more token")
    # What is shared cannot be read any more, and is not.
    sent, _ = move(session, there / "agent", since=here / "base")
    assert 0 < sent.size <= 2 * BLOCK
    assert sent.written < sent.size + 4096
    assert shown(there / "agent") == shown(session)
    assert shown(there / "base") == shown(here / "base")


def test_an_agent_goes_there_and_comes_back_as_differences(here: Path, there: Path) -> None:
    session = make_session(here / "agent", tokens=20_000)
    fork(session, "monday")
    move(here / "monday", there / "monday")
    (session / "layer.000").write_bytes(b"tuesday")
    move(session, there / "agent", since=here / "monday")
    with (there / "agent" / "layer.002").open("ab") as file:
        file.write(b"wednesday")
    back = [there / "agent", "--since", there / "monday", "--json"]
    sending, receiving, said = run_through_pipe(back, [here / "agent", "--force"])
    assert (sending, receiving) == (0, 0)
    assert json.loads(said)["size"] <= 3 * BLOCK
    assert shown(here / "agent") == shown(there / "agent")
    assert (here / "agent" / "layer.000").read_bytes() == b"tuesday"


def test_a_base_that_is_another_here_is_refused(here: Path, there: Path) -> None:
    session = make_session(here / "agent")
    fork(session, "base")
    move(here / "base", there / "base")
    (session / "layer.001").write_bytes(b"changed")
    stream = stream_of(session, here / "base")
    with (there / "base" / "layer.000").open("r+b") as file:
        file.write(b"!")
    with pytest.raises(CommandError, match="is not what the sender has"):
        receive_bytes(there / "agent", stream)
    (there / "sub").mkdir()
    with pytest.raises(CommandError, match="is not here"):
        receive_bytes(there / "sub" / "agent", stream)
    with pytest.raises(CommandError, match="leave --base"):
        receive_bytes(there / "agent", stream_of(session), base=there / "base")
    assert sorted(os.listdir(there)) == ["base", "sub"]
    assert not os.listdir(there / "sub")


# -- while others are at work


def _heed_signals() -> None:
    """What runs in the background, or under nohup, may have been told to ignore these."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def sending(session: Path, *options: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that has begun, and waits for somebody to read."""
    process = subprocess.Popen(
        [KVFS, "send", session, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=_heed_signals,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def large(here: Path) -> Path:
    """A session that is more than a pipe and all buffers hold."""
    return make_session(here / "large", tokens=100_000, layers=3)


def read_some(process: subprocess.Popen[bytes], size: int = MIB) -> bytes:
    assert process.stdout is not None
    return process.stdout.read(size)


def test_a_session_that_changes_while_it_is_sent_arrives_as_it_was(
    large: Path, there: Path
) -> None:
    before = shown(large)
    with sending(large) as sender:
        stream = read_some(sender)
        (large / "layer.000").write_bytes(b"new")
        os.truncate(large / "layer.001", 5)
        (large / "layer.002").unlink()
        (large / "later").touch()
        assert sender.stdout is not None
        stream += sender.stdout.read()
        assert sender.wait(SECONDS) == 0
    assert received(there / "large", stream).returncode == 0
    assert shown(there / "large") == before
    assert not left_behind(large.parent)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_sender_that_is_told_to_end_leaves_nothing(large: Path, number: int) -> None:
    with sending(large) as sender:
        read_some(sender)
        assert len(left_behind(large.parent)) == 1
        sender.send_signal(number)
        assert sender.wait(SECONDS) == 1
        assert sender.stderr is not None
        assert sender.stderr.read() == b"kvfs: interrupted; nothing of it was kept\n"
    assert not left_behind(large.parent)


def test_a_killed_sender_leaves_a_fork_that_the_next_run_removes(large: Path, there: Path) -> None:
    with sending(large) as sender:
        stream = read_some(sender, 3 * MIB)
        # One that is at work is left alone.
        stream_of(large)
        assert len(left_behind(large.parent)) == 1
        sender.kill()
        sender.wait(SECONDS)
    assert len(left_behind(large.parent)) == 1
    assert "the stream ends before its end" in error_line(received(there / "large", stream))
    assert os.listdir(there) == []
    move(large, there / "large")
    assert not left_behind(large.parent)


def test_a_sender_whose_reader_ends_says_so(large: Path) -> None:
    with sending(large) as sender:
        read_some(sender)
        assert sender.stdout is not None and sender.stderr is not None
        sender.stdout.close()
        assert sender.wait(SECONDS) == 1
        assert sender.stderr.read().startswith(b"kvfs: nobody reads any more")
        sender.stdout = open(os.devnull, "rb")  # noqa: SIM115 - to be closed
    assert not left_behind(large.parent)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_receiver_that_ends_leaves_nothing_that_stays(
    large: Path, there: Path, number: int
) -> None:
    stream = stream_of(large)
    receiver = subprocess.Popen(
        [KVFS, "receive", there / "large"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert receiver.stdin is not None
    receiver.stdin.write(stream[: len(stream) // 2])
    receiver.stdin.flush()
    assert [name for name in os.listdir(there) if not name.startswith(".kvfs-")] == []
    receiver.send_signal(number)
    assert receiver.wait(SECONDS) != 0
    receiver.communicate()
    assert len(left_behind(there)) == (number == signal.SIGKILL)
    move(large, there / "large")
    assert os.listdir(there) == ["large"]
    assert shown(there / "large") == shown(large)


def test_the_daemon_of_the_receiver_dies_and_the_sender_says_so(
    large: Path, make_mounter: MounterMaker
) -> None:
    mounter = make_mounter()
    mounter.mount()
    stream = stream_of(large)
    receiver = subprocess.Popen(
        [KVFS, "receive", mounter.mountpoint / "large"], stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert receiver.stdin is not None
    receiver.stdin.write(stream[: len(stream) // 2])
    receiver.stdin.flush()
    mounter.kill()
    with pytest.raises(BrokenPipeError):
        while True:
            receiver.stdin.write(stream[len(stream) // 2 :])
            receiver.stdin.flush()
    assert receiver.wait(SECONDS) == 1
    assert receiver.stderr is not None
    assert len(receiver.stderr.read().splitlines()) == 1
    with suppress(BrokenPipeError):
        receiver.stdin.close()
    receiver.stderr.close()
    mounter.mount()
    assert received(mounter.mountpoint / "large", stream).returncode == 0
    assert os.listdir(mounter.mountpoint) == ["large"]
    assert shown(mounter.mountpoint / "large") == shown(large)


def test_a_ring_that_is_full_refuses_in_one_line_and_keeps_nothing(
    large: Path, make_mounter: MounterMaker
) -> None:
    mounter = make_mounter("96M")
    mounter.mount("--no-reclaim")
    with (large / "layer.003").open("wb") as file:
        file.write(os.urandom(50 * MIB))
    result = received(mounter.mountpoint / "large", stream_of(large))
    assert "No space left on device" in error_line(result)
    assert os.listdir(mounter.mountpoint) == []


# -- refused


def test_what_exists_is_not_replaced_unless_forced_and_never_while_in_use(
    here: Path, there: Path
) -> None:
    stream = stream_of(make_session(here / "agent"))
    target = make_session(there / "agent", tokens=7)
    (target / "tokens.r0").touch()
    before = shown(target)
    assert "exists" in error_line(received(target, stream))
    for locked in (target, target / "tokens.r0"):
        fd = os.open(locked, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="is open in an agent"):
            receive_bytes(target, stream, force=True)
        os.close(fd)
    assert shown(target) == before
    assert received(target, stream, "--force").returncode == 0
    assert shown(target) == shown(here / "agent")
    assert os.listdir(there) == ["agent"]


def test_what_is_no_session_cannot_be_sent(here: Path, tmp_path: Path) -> None:
    (here / "file").touch()
    (here / "agent").mkdir()
    os.mkfifo(here / "agent" / "pipe")
    for path, why in [
        (here.parent, "is not a session"),
        (here / "file", "is not a session"),
        (here / "nothing", "does not exist"),
        (tmp_path, "is not on KVFS"),
    ]:
        with pytest.raises(CommandError, match=why):
            session_at(path)
    result = kvfs("send", here / "agent", check=False)
    assert "neither a file nor a directory" in error_line(result)
    assert not left_behind(here)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J"])
def test_a_name_that_could_harm_a_terminal_does_not_leave(here: Path, name: str) -> None:
    (here / "agent").mkdir()
    (here / "agent" / name).touch()
    with pytest.raises(CommandError, match="control characters"):
        stream_of(here / "agent")


def test_where_no_session_can_be_none_is_made(here: Path, there: Path, tmp_path: Path) -> None:
    stream = stream_of(make_session(here / "agent"))
    (there / "file").touch()
    for target, why in [
        (there / "no" / "agent", "does not exist"),
        (tmp_path / "agent", "is not on KVFS"),
        (there / "file", "is no directory"),
        (there.parent, "is a mountpoint"),
        (there.parent / ".kvfs", "cannot be a session"),
    ]:
        with pytest.raises(CommandError, match=why):
            receive_bytes(target, stream, force=True)
    for wrong in (b"", b"x" * 5000):
        with pytest.raises(CommandError, match="this is no session"):
            receive_bytes(there / "agent", wrong)
    assert os.listdir(there) == ["file"]


def test_a_session_of_a_read_only_mount_is_sent_as_it_is(
    make_mounter: MounterMaker, there: Path
) -> None:
    mounter = make_mounter()
    mounter.mount()
    make_tree(mounter.mountpoint / "agent")
    before = shown(mounter.mountpoint / "agent")
    mounter.umount()
    mounter.mount("-o", "ro")
    move(mounter.mountpoint / "agent", there / "agent")
    assert shown(there / "agent") == before


@needs_root
def test_who_may_not_fork_sends_what_does_not_change_and_says_when_it_does(
    make_mounter: MounterMaker, there: Path, tmp_path: Path
) -> None:
    mounter = make_mounter()
    mounter.mount("-o", "allow_other")
    session = make_session(mounter.mountpoint / "agent")
    for path in (mounter.directory, mounter.mountpoint, session, *session.iterdir()):
        path.chmod(0o777)

    def sent(begins: Callable[[int], Callable[[int], None]]) -> bytes:
        with (tmp_path / "stream").open("w+b") as file:
            as_user(
                65534, lambda: send(session, None, StreamWriter(file.fileno()), begins) and None
            )
            return (tmp_path / "stream").read_bytes()

    def change(size: int) -> Callable[[int], None]:
        (session / "layer.000").write_bytes(b"changed")
        return silent(size)

    assert received(there / "agent", sent(silent)).returncode == 0
    assert shown(there / "agent") == shown(session)
    with pytest.raises(CommandError, match="while it was read"):
        sent(change)
    with pytest.raises(CommandError, match="ends before its end"):
        receive_bytes(there / "agent-2", (tmp_path / "stream").read_bytes())


def test_a_hole_of_a_terabyte_takes_no_time(here: Path, there: Path) -> None:
    (here / "agent").mkdir()
    with (here / "agent" / "sparse").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"middle")
    sent, _ = move(here / "agent", there / "agent")
    assert sent.size == BLOCK
    with (there / "agent" / "sparse").open("rb") as file:
        assert os.fstat(file.fileno()).st_size == 1 << 40
        file.seek((1 << 39) - 1)
        assert file.read(8) == b"\0middle\0"

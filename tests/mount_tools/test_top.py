"""`kvfs top` on a real mount: what it shows, that its keys do what they say, and that it outlives
the mount."""

from __future__ import annotations

import asyncio
import html
import mmap
import os
import pty
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from mount_tools.common import CommandError
from mount_tools.selection import Order
from mount_tools.top import panels
from mount_tools.top.app import TopApp
from mount_tools.top.history import History
from mount_tools.top.source import Asker, Row, Seen, Source
from mount_tools.top.table import View
from tests.conftest import MounterMaker
from tests.support.command import error_line
from tests.support.mounter import COMMAND_SECONDS, KVFS, Mounter, kvfs
from tests.support.sessions import LAYER_SIZE, make_session, sync

SECONDS = 60
HOSTILE = b"[bold]\x1b[31m\xff\nx"
WIDE = (132, 40)
NAMES = ["agent-1", "agent-2", "team/agent-3"]


def fill(mountpoint: Path) -> None:
    """Three sessions and one with a name of any bytes."""
    for number, name in enumerate(NAMES, 1):
        make_session(mountpoint / name, layers=number, model=f"model-{number}")
    make_session(mountpoint / os.fsdecode(HOSTILE), layers=1)
    sync(mountpoint)


@pytest.fixture(scope="module")
def mounter(fuse: None) -> Iterator[Mounter]:
    made = Mounter("128M")
    try:
        made.mount("--warm", "64M")
        fill(made.mountpoint)
        yield made
    finally:
        made.close()


def screen_text(app: TopApp) -> str:
    """What a user sees, line by line."""
    lines: dict[float, list[str]] = defaultdict(list)
    for y, text in re.findall(
        r'<text [^>]*?y="([\d.]+)"[^>]*>(.*?)</text>', app.export_screenshot()
    ):
        lines[float(y)].append(html.unescape(text).replace("\xa0", " "))
    return "\n".join("".join(lines[y]) for y in sorted(lines))


Scenario = Callable[[TopApp, "Pilot[None]"], Awaitable[None]]


def watch(mounter: Mounter, scenario: Scenario, interval: float = 0.2) -> TopApp:
    """Run the view of a mount, with a scenario at its keys."""
    app = TopApp(Source(mounter.mountpoint, str(mounter.image)), View(Order.NAME), interval)

    async def session() -> None:
        async with app.run_test(size=WIDE) as pilot:
            await scenario(app, pilot)

    asyncio.run(session())
    return app


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what}:\n{screen_text(pilot.app)}"  # type: ignore[arg-type]
        await pilot.pause(0.1)


async def until_shown(app: TopApp, pilot: Pilot[None], text: str) -> None:
    await until(pilot, lambda: text in screen_text(app), f"{text!r} is not shown")


def xattr(path: Path, name: str) -> str:
    return os.getxattr(path, f"user.kvfs.{name}").decode()


# -- what is shown


def test_sessions_tiers_rates_latencies_and_the_ring_are_shown(mounter: Mounter) -> None:
    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        words = ("tiers", "rates", "latency", "ring", "head", "tail", "4 of 4 sessions", "771.9K")
        for word in words:  # not all of them come with the first frame
            await until_shown(app, pilot, word)
        text = screen_text(app)
        (line,) = (line for line in text.splitlines() if "agent-3" in line)
        for word in ("team/agent-3", " 1000 ", "771.9K", "warm", "model-3"):
            assert word in line
        assert "▶" in text and "◀" in text and "·" in text

    watch(mounter, scenario)


def test_names_of_any_bytes_are_shown_as_what_they_are(mounter: Mounter) -> None:
    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        await until_shown(app, pilot, r"[bold]\x1b[31m\udcff\nx")
        for key in ("ctrl+home", "p"):
            await pilot.press(key)
        await until_shown(app, pilot, r"x is pinned")

    watch(mounter, scenario)
    hostile = mounter.mountpoint / os.fsdecode(HOSTILE)
    assert xattr(hostile, "pin") == "1"
    os.removexattr(hostile, "user.kvfs.pin")


def test_it_fits_in_any_terminal(mounter: Mounter) -> None:
    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        await until_shown(app, pilot, "agent-3")
        shown = {
            (200, 60): ("latency", "rates", "ring", "model-3"),
            (90, 30): ("tiers", "rates", "ring", "agent-3"),
            (60, 25): ("tiers", "ring", "agent-3"),
            (60, 18): ("ring", "agent-3"),
            (40, 12): ("agent-1",),
            (10, 4): (),
            (132, 40): ("latency", "agent-3"),
        }
        for size, words in shown.items():
            await pilot.resize_terminal(*size)
            for word in words:
                await until_shown(app, pilot, word)
            widths = {len(line) for line in screen_text(app).splitlines()}
            assert max(widths) <= size[0]

    watch(mounter, scenario)


# -- keys


def test_keys_pin_demote_and_prefetch_the_chosen_session(mounter: Mounter) -> None:
    session = mounter.mountpoint / "agent-2"

    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        await until_shown(app, pilot, "agent-3")
        await pilot.press("slash", *"agent-2", "enter")
        await until_shown(app, pilot, "1 of 4 sessions")
        await pilot.press("p")
        await until(pilot, lambda: xattr(session, "pin") == "1", "it is not pinned")
        await until_shown(app, pilot, "●")
        await pilot.press("p")
        await until(pilot, lambda: xattr(session, "pin") == "0", "it is still pinned")
        await pilot.press("d")
        await until(pilot, lambda: xattr(session, "tier") == "cold", "it is still warm")
        await until_shown(app, pilot, "agent-2 is in the ring alone")
        await until(
            pilot, lambda: "cold" in table_line(app, "agent-2"), "the table does not say so"
        )
        await pilot.press("f")
        await until(pilot, lambda: xattr(session, "tier") == "warm", "it is not brought in")
        await until(
            pilot, lambda: "warm" in table_line(app, "agent-2"), "the table does not say so"
        )
        assert xattr(mounter.mountpoint / "agent-1", "pin") == "0"

    watch(mounter, scenario)


def table_line(app: TopApp, name: str) -> str:
    lines = screen_text(app).splitlines()
    return next((line for line in lines if f" {name} " in line and " 1000 " in line), "")


def shown_names(app: TopApp) -> list[str]:
    return re.findall(r"(agent-\d|\[bold\])", screen_text(app))


def test_rows_are_sorted_and_filtered_and_the_chosen_one_stays_so(mounter: Mounter) -> None:
    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        await until_shown(app, pilot, "771.9K")
        by_name = ["[bold]", "agent-1", "agent-2", "agent-3"]
        await until(pilot, lambda: shown_names(app) == by_name, "not by name")
        await pilot.press("down")
        await pilot.press("r")
        await until(pilot, lambda: shown_names(app) == by_name[::-1], "not reversed")
        await pilot.press("r", "s", "s")  # tokens, then size
        await until(
            pilot,
            lambda: shown_names(app)[:2] == ["agent-3", "agent-2"],
            "not by size",
        )
        await pilot.press("slash", *"model-1 pinned", "enter")
        await until_shown(app, pilot, "0 of 4 sessions")
        await pilot.press("slash", "escape")
        await until_shown(app, pilot, "4 of 4 sessions")
        await pilot.press("slash", *"TEAM/*", "enter")
        await until(pilot, lambda: shown_names(app) == ["agent-3"], "not by pattern")
        await pilot.press("slash", "escape", "s", "s", "s", "s", "s", "s", "s")
        await until(pilot, lambda: shown_names(app) == by_name, "not by name again")
        await pilot.press("ctrl+home", "down", "r", "p")
        await until_shown(app, pilot, "agent-1 is pinned")

    watch(mounter, scenario)
    os.removexattr(mounter.mountpoint / "agent-1", "user.kvfs.pin")


def test_help_is_shown_while_looks_go_on_and_q_quits(mounter: Mounter) -> None:
    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        await until_shown(app, pilot, "agent-3")
        await pilot.press("question_mark")
        await until_shown(app, pilot, "demote it")
        await pilot.pause(0.5)
        await pilot.press("escape")
        await until_shown(app, pilot, "agent-3")
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running, "it does not quit")

    assert watch(mounter, scenario).return_code == 0


# -- when the mount goes away


def test_it_outlives_a_mount_that_hangs_dies_and_comes_back(make_mounter: MounterMaker) -> None:
    mounter = make_mounter("64M")
    mounter.mount()
    make_session(mounter.mountpoint / "agent-1")

    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        await until_shown(app, pilot, "agent-1")
        threads = threading.active_count()
        os.kill(mounter.pid, signal.SIGSTOP)
        try:
            await until_shown(app, pilot, "does not answer; if that stays so, detach it with: kvfs")
            await pilot.press("d", "d", "question_mark")
            await until_shown(app, pilot, "demote it")
            await pilot.press("escape")
            await until_shown(app, pilot, "agent-1")
            assert threading.active_count() <= threads + 1, "what hangs is left behind once"
        finally:
            os.kill(mounter.pid, signal.SIGCONT)
        await until_shown(app, pilot, "it answers again")
        mounter.kill()
        await until_shown(app, pilot, "its daemon has ended; mount it again with: kvfs mount")
        await asyncio.to_thread(mounter.mount)
        await until_shown(app, pilot, f"it was mounted again, by process {mounter.pid}")
        await asyncio.to_thread(mounter.umount)
        await until_shown(app, pilot, "is not mounted; mount it with: kvfs mount")
        await asyncio.to_thread(mounter.mount)
        await until_shown(app, pilot, f"it was mounted again, by process {mounter.pid}")
        await until_shown(app, pilot, "1 of 1 sessions")

    watch(mounter, scenario)


def test_what_a_key_cannot_do_is_one_line(mounter: Mounter) -> None:
    session = mounter.mountpoint / "gone"
    make_session(session)

    async def scenario(app: TopApp, pilot: Pilot[None]) -> None:
        await until_shown(app, pilot, "gone")
        await pilot.press("slash", *"gone", "enter")
        await until_shown(app, pilot, "1 of 5 sessions")
        shutil.rmtree(session)
        await pilot.press("p")
        await until_shown(app, pilot, "No such file or directory")

    watch(mounter, scenario, interval=SECONDS)


def test_it_ends_on_a_terminal_also_while_the_mount_hangs(mounter: Mounter) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = subprocess.Popen(
        [KVFS, "top", mounter.mountpoint, "--interval", "0.2"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    shown = bytearray()

    def output() -> bytearray:
        with suppress(OSError):  # nothing more yet, or for ever
            while True:
                shown.extend(os.read(ours, 65536))
        return shown

    try:
        wait_for(lambda: b"agent-2" in output(), "no sessions are shown")
        os.kill(mounter.pid, signal.SIGSTOP)
        wait_for(lambda: b"does not answer" in output(), "that it hangs is not shown")
        os.write(ours, b"q")
        wait_for(lambda: output() and process.poll() is not None, "it does not end")
        assert process.returncode == 0
    finally:
        os.kill(mounter.pid, signal.SIGCONT)
        process.kill()
        process.wait()
        os.close(ours)


# -- one frame


def test_one_frame_is_plain_text(mounter: Mounter) -> None:
    for arguments in (("--once",), ()):  # stdout is no terminal here
        output = kvfs("top", mounter.mountpoint, "--interval", "0.1", *arguments).stdout
        assert "\x1b" not in output
        for word in ("tiers", "rates", "latency", "ring", "▶ head", *NAMES, "model-3"):
            assert word in output
        assert max(map(len, output.splitlines())) <= 140
    lines = kvfs("top", mounter.mountpoint, "--sort", "size").stdout.splitlines()
    sizes = [line for line in lines if "agent-" in line and "agent-" in line.split()[0]]
    assert [line.split()[0] for line in sizes] == ["team/agent-3", "agent-2", "agent-1"]


def test_a_mount_that_is_not_there_is_one_line(make_mounter: MounterMaker) -> None:
    mounter = make_mounter("64M")
    assert "is not on KVFS" in error_line(kvfs("top", mounter.mountpoint, check=False))
    mounter.mount()
    os.kill(mounter.pid, signal.SIGSTOP)
    try:
        line = error_line(kvfs("top", mounter.mountpoint, "--once", check=False))
        assert "does not answer; detach it with" in line
    finally:
        os.kill(mounter.pid, signal.SIGCONT)
    mounter.kill()
    line = error_line(kvfs("top", mounter.mountpoint, "--once", check=False))
    assert "its daemon has ended; mount it again with" in line


def test_without_textual_one_line_says_what_to_install(mounter: Mounter, tmp_path: Path) -> None:
    """Also that nothing else of it needs textual: --once works without."""
    (tmp_path / "textual.py").write_text("raise ImportError('textual')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    code = "import sys; from mount_tools.main import main; sys.argv[0] = 'kvfs'; main()"
    command = ["-c", code, "top", str(mounter.mountpoint), "--interval", "0.1"]
    python = str(KVFS.with_name("python"))
    run = subprocess.run(
        [python, *command, "--once"], check=True, capture_output=True, text=True, env=environment,
        timeout=COMMAND_SECONDS,
    )  # fmt: skip
    assert "agent-3" in run.stdout
    run = subprocess.run(
        ["script", "-qec", " ".join([python, "-c", f'"{code}"', *command[2:]]), "/dev/null"],
        check=False, capture_output=True, text=True, env=environment, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    assert "install it with: pip install 'kvfs[top]'" in run.stdout


def test_what_is_wrong_with_a_mount_is_in_the_head(mounter: Mounter) -> None:
    stats = mounter.stats()
    assert panels.problems(stats) == []
    assert panels.problems(stats | {"read_only": True}) == ["read-only"]
    wrong = stats | {"read_only": True, "damage": "x", "failure": "y"}
    assert panels.problems(wrong) == ["DAMAGED: x", "THE DEVICE FAILS: y"]


# -- looks


def look(source: Source) -> Seen:
    seen = source.look(SECONDS)
    assert isinstance(seen, Seen), seen
    return seen


def row_of(seen: Seen, name: str) -> Row:
    (row,) = (row for row in seen.rows if row.name == name)
    return row


def test_a_rate_is_what_lies_between_two_looks(mounter: Mounter) -> None:
    source, history = Source(mounter.mountpoint, "ring"), History()
    layer = mounter.mountpoint / "agent-1" / "layer.000"
    first = look(source)
    assert not history.add(first)
    # Past the kernel's page cache, or the daemon would see none of it.
    fd = os.open(layer, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(fd, [mmap.mmap(-1, LAYER_SIZE)], 0)
    finally:
        os.close(fd)
    with layer.open("r+b") as file:
        file.write(os.urandom(LAYER_SIZE))
        file.flush()
        os.fsync(file.fileno())
    second = look(source)
    assert not history.add(second)
    (rates,) = history.rates
    seconds = second.at - first.at
    assert rates.payload_read * seconds == pytest.approx(LAYER_SIZE)
    assert rates.payload_written * seconds >= LAYER_SIZE
    assert rates.device_written >= rates.payload_written
    assert rates.operations * seconds >= 1
    assert history.amplification == pytest.approx(rates.device_written / rates.payload_written)


def test_what_changed_of_a_session_is_found_out_anew(mounter: Mounter) -> None:
    source = Source(mounter.mountpoint, "ring")
    session = mounter.mountpoint / "agent-2"
    assert row_of(look(source), "agent-2").tokens == 1000
    with (session / "tokens").open("ab") as file:
        file.write(bytes(4 * 24))
    assert row_of(look(source), "agent-2").tokens == 1024
    os.setxattr(session, "user.kvfs.demote", b"1")
    cold = row_of(look(source), "agent-2")
    assert (cold.tier, cold.warm) == ("cold", 0)
    os.setxattr(session, "user.kvfs.prefetch", b"1")
    wait_for(lambda: row_of(look(source), "agent-2").tier == "warm", "it is not brought in")


def test_without_time_for_details_sessions_are_shown_all_the_same(mounter: Mounter) -> None:
    source = Source(mounter.mountpoint, "ring")
    seen = source.look(-1)
    assert isinstance(seen, Seen)
    assert {row.name for row in seen.rows} >= set(NAMES)
    assert all(row.tokens is None and row.stored for row in seen.rows)


def test_the_counters_of_another_mount_are_no_rate(mounter: Mounter) -> None:
    source, history = Source(mounter.mountpoint, "ring"), History()
    first = look(source)
    history.add(first)
    assert not history.add(look(source))
    assert len(history.rates) == 1
    assert history.add(replace(first, stats=first.stats | {"epoch": first.stats["epoch"] + 1}))
    assert not history.rates


def test_work_that_hangs_is_left_behind_once() -> None:
    asker, gate = Asker(0.05), threading.Event()
    begun: list[int] = []

    def hang() -> None:
        begun.append(1)
        gate.wait()

    for _ in range(3):
        with pytest.raises(TimeoutError):
            asker.ask(hang)
    assert len(begun) == 1
    gate.set()
    assert asker.ask(lambda: 7, SECONDS) == 7
    with pytest.raises(CommandError, match="no"):
        asker.ask(lambda: refuse(), SECONDS)


def refuse() -> None:
    raise CommandError("no")

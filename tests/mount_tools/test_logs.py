"""The daemon's log: its lines, how many of a kind, what is never in it, and when it is moved."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mount_tools.logs import JsonFormatter, LogFile, RateLimited
from tests.support.mounter import KVFS, Mounter
from tests.support.supervisor import supervised

SECONDS = 30
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
KV = b"<<these are bytes of KV>>"
TOKEN = 1_768_515_945
TOKENS = np.full(64, TOKEN, np.int32).tobytes()


def documents(log: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.splitlines()]
    for document in found:
        assert RFC_3339.fullmatch(document["time"])
        assert document["level"] in ("info", "warning", "error")
        assert document["logger"] and document["message"]
    return found


def make_rot(mounter: Mounter, layers: int, *, has_tokens: bool = False) -> list[Path]:
    """Files of marked KV, and maybe tokens, of which the device has the first bytes wrong."""
    mounter.mount()
    os.setxattr(mounter.mountpoint, "user.kvfs.codec", b"none")
    session = mounter.mountpoint / "agent"
    session.mkdir()
    contents = {f"layer.{number:03}": KV * 200 for number in range(layers)}
    if has_tokens:
        contents["tokens"] = TOKENS
    for name, content in contents.items():
        (session / name).write_bytes(content)
    mounter.umount()
    image = mounter.image.read_bytes()
    with mounter.image.open("r+b") as file:
        for start in (KV * 10, TOKENS):
            for found in re.finditer(re.escape(start), image):
                if found.start() % 4096 == 0:
                    file.seek(found.start())
                    file.write(b"!")
    return [session / name for name in contents]


def errno_of_read(path: Path) -> int | None:
    try:
        path.read_bytes()
    except OSError as failure:
        return failure.errno
    return None


# -- lines


def test_a_line_of_json_is_a_record_with_its_fields_and_of_one_kind_there_are_a_hundred(
    mounter: Mounter,
) -> None:
    layers = make_rot(mounter, 130)
    mounter.log.unlink()
    mounter.mount("--log-json")
    assert {errno_of_read(layer) for layer in layers} == {errno.EIO}
    assert mounter.stats()["errors"]["checksum"] == 130
    mounter.umount()
    mounted, *rotten, unmounted, left_out = documents(mounter.log.read_text())
    about = {"source": str(mounter.image), "mountpoint": str(mounter.mountpoint)}
    assert mounted["level"] == "info" and about.items() <= mounted.items()
    assert unmounted["message"] == f"unmounted {mounter.mountpoint}"
    assert len(rotten) == 100
    for one in rotten:
        assert (one["level"], one["logger"]) == ("error", "kvfs.engine.reader")
        assert one["message"] == (
            f"extent {one['extent']} at byte {one['address']} of the device fails its checksum"
        )
    assert left_out["left_out"] == 30
    assert left_out["message"].startswith("30 more like this were left out: extent ")


def test_a_service_logs_json_to_stderr(mounter: Mounter) -> None:
    command = [
        KVFS, "mount", "--foreground", "--log-json", "--warm-dir", mounter.warm_directory,
        mounter.mountpoint, mounter.image,
    ]  # fmt: skip
    with supervised(command, mounter.directory) as daemon:
        daemon.send_signal(signal.SIGTERM)
        _, log = daemon.communicate(timeout=SECONDS)
    assert [document["message"].split()[0] for document in documents(log)] == [
        "mounted",
        "unmounted",
    ]


def test_json_escapes_what_would_begin_a_line_and_has_the_exception() -> None:
    formatter = JsonFormatter()
    try:
        raise ValueError("é\n\x1b[2J\udcff")
    except ValueError as failure:
        record = logging.LogRecord(
            "kvfs", logging.ERROR, __file__, 1, "%s failed", ("a\nb\udcff",),
            (ValueError, failure, failure.__traceback__),
        )  # fmt: skip
    record.path, record.size, record.place = "c\nd", 7, Path("/x")
    line = formatter.format(record)
    assert line.isascii() and line.isprintable()
    document = json.loads(line)
    assert document["message"] == "a\\nb\\udcff failed"
    assert (document["path"], document["size"], document["place"]) == ("c\\nd", 7, "/x")
    assert document["exception"].splitlines()[-1].startswith("\\x1b[2J")
    assert set(document) == {
        "time", "level", "logger", "message", "exception", "path", "size", "place",
    }  # fmt: skip


# -- how many


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.is_closed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def close(self) -> None:
        super().close()
        self.is_closed = True


@pytest.fixture
def logger() -> logging.Logger:
    made = logging.getLogger("tests.limited")
    made.propagate = False
    made.setLevel(logging.INFO)
    made.handlers.clear()
    return made


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_of_one_line_of_the_code_so_many_pass_and_one_tells_of_the_rest(
    logger: logging.Logger,
) -> None:
    kept = Kept()
    logger.addHandler(RateLimited(kept, count_max=3, window_seconds=1.0))
    for number in range(10):
        logger.error("extent %d is bad", number)
    logger.error("another")
    assert kept.messages == [*(f"extent {n} is bad" for n in range(3)), "another"]
    eventually(lambda: len(kept.messages) == 5)
    assert kept.messages[-1] == "7 more like this were left out: extent 9 is bad"


def test_a_new_window_begins_when_one_is_over(logger: logging.Logger) -> None:
    kept = Kept()
    logger.addHandler(RateLimited(kept, count_max=1, window_seconds=0.01))
    for number in range(3):
        logger.error("extent %d is bad", number)
        time.sleep(0.02)
    assert kept.messages == [f"extent {number} is bad" for number in range(3)]


def test_what_was_left_out_is_told_at_the_end(logger: logging.Logger) -> None:
    kept = Kept()
    limited = RateLimited(kept, count_max=1, window_seconds=3600)
    logger.addHandler(limited)
    for number in range(4):
        logger.error("extent %d is bad", number)
    limited.close()
    assert kept.messages == ["extent 0 is bad", "3 more like this were left out: extent 3 is bad"]
    assert kept.is_closed


# -- what is never in it


def test_no_bytes_of_kv_and_no_tokens_are_in_any_log(mounter: Mounter) -> None:
    """In none of the forms in which a log might show them."""
    files = make_rot(mounter, 3, has_tokens=True)
    mounter.mount()
    assert {errno_of_read(file) for file in files} == {errno.EIO}
    scrub = subprocess.run(
        [KVFS, "scrub", mounter.mountpoint], check=False, capture_output=True, text=True
    )
    assert scrub.returncode == 1
    session = files[0].parent
    for name, value in [
        ("hint", KV), ("hint", b"hot_stats=" + KV), ("ttl", KV), ("shape", KV), ("fork", KV * 20),
        ("codec", KV), ("unknown", KV),
    ]:  # fmt: skip
        with pytest.raises(OSError, match=r".+"):
            os.setxattr(session, f"user.kvfs.{name}", value)
    (session / "layer.000").unlink()
    (session / "layer.000").write_bytes(KV)
    mounter.kill()
    mounter.mount("--log-json")
    assert {errno_of_read(file) for file in files[1:]} == {errno.EIO}
    mounter.umount()
    told = mounter.log.read_text() + scrub.stdout + scrub.stderr
    assert told.count("fails its checksum") == 4 + 3 and "rot:" in told
    for secret in (KV, TOKENS[:16]):
        for form in (
            secret.decode("latin-1"), repr(secret)[2:-1], secret.hex(), str(list(secret))[1:-1],
            base64.b64encode(secret).decode()[:20],
        ):  # fmt: skip
            assert form not in told
    assert str(TOKEN) not in told


# -- when it is moved


def test_a_log_that_was_moved_away_is_begun_anew(mounter: Mounter) -> None:
    (layer,) = make_rot(mounter, 1)
    mounter.mount()
    moved = mounter.log.rename(mounter.directory / "kvfs.log.1")
    before = moved.read_text()
    assert errno_of_read(layer) == errno.EIO
    assert "fails its checksum" in mounter.log.read_text()
    assert stat.S_IMODE(mounter.log.stat().st_mode) == 0o600
    mounter.umount()
    assert mounter.log.read_text().endswith(f"unmounted {mounter.mountpoint}\n")
    assert moved.read_text() == before
    assert "fails its checksum" not in before


def in_a_child(work: Callable[[], None]) -> None:
    """A log's file takes the process's own output."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("kvfs", logging.INFO, __file__, 1, message, (), None)


def test_what_is_written_past_logging_follows_it(tmp_path: Path) -> None:
    """Such as what the interpreter has to say at a crash."""
    path = tmp_path / "log"

    def work() -> None:
        handler = LogFile(path)
        path.rename(tmp_path / "log.1")
        handler.handle(record("logged"))
        os.write(2, b"past logging\n")

    in_a_child(work)
    assert path.read_text() == "logged\npast logging\n"
    assert (tmp_path / "log.1").read_text() == ""


def test_a_log_that_cannot_be_begun_anew_is_as_soon_as_it_can(tmp_path: Path) -> None:
    """Whoever has something to say meanwhile does not see it."""
    folder = tmp_path / "logs"
    folder.mkdir()

    def work() -> None:
        handler = LogFile(folder / "log")
        folder.rename(tmp_path / "away")
        handler.handle(record("lost"))
        folder.mkdir()
        handler.handle(record("kept"))

    in_a_child(work)
    assert (folder / "log").read_text() == "kept\n"

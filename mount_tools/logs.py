"""The daemon's log: a record a line, as text or JSON, and no more of one kind than helps.

Names of files that are in a record are escaped; bytes of files are in none.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from mount_tools.common import printable

_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_COUNT_MAX, _WINDOW_SECONDS = 100, 60.0
_OWN = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """One line a record, whatever names of files are in it; what tells of an exception is
    indented, so that it does not look like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """A JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, `exception` if
    there is one, and what the record was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, timezone.utc)
        document: dict[str, object] = {
            "time": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            document["exception"] = "\n".join(map(printable, lines))
        for name, value in record.__dict__.items():
            if name not in _OWN:
                document[name] = printable(value) if isinstance(value, str) else value
        return json.dumps(document, default=str)


class LogFile(logging.handlers.WatchedFileHandler):
    """A file that may be moved away, as logrotate does: the next record begins a new one. What
    is written past `logging`, by the interpreter say, goes there too."""

    def _open(self) -> TextIOWrapper:
        stream = open_log(Path(self.baseFilename))
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        """A log that cannot be opened again, on a full disk say, ends no request."""
        with suppress(OSError):
            super().emit(record)


def open_log(path: Path) -> TextIOWrapper:
    """To be appended to; the user's alone if it is new. Raises OSError."""
    return open(
        path,
        "a",
        encoding="utf-8",
        errors="backslashreplace",
        opener=lambda name, flags: os.open(name, flags, 0o600),
    )


@dataclass(slots=True)
class _Kind:
    """Records of one line of the code within a window, which `ends` by the monotonic clock."""

    ends: float
    count: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None


class RateLimited(logging.Handler):
    """Passes on at most 100 records a minute of what one line of the code has to say; one more
    tells how many were left out, when the minute is over."""

    def __init__(
        self,
        target: logging.Handler,
        count_max: int = _COUNT_MAX,
        window_seconds: float = _WINDOW_SECONDS,
    ) -> None:
        super().__init__()
        self._target = target
        self._count_max = count_max
        self._window_seconds = window_seconds
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def emit(self, record: logging.LogRecord) -> None:
        key, now = (record.pathname, record.lineno), time.monotonic()
        kind = self._kinds.get(key)
        if kind is None or (now >= kind.ends and not kind.left_out):
            kind = self._kinds[key] = _Kind(now + self._window_seconds)
        kind.count += 1
        if kind.count <= self._count_max:
            self._target.handle(record)
            return
        kind.left_out += 1
        kind.last = record
        if kind.left_out == 1:
            timer = threading.Timer(kind.ends - now, self._end, (key,))
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        for key in list(self._kinds):
            self._end(key)
        self._target.close()
        super().close()

    def _end(self, key: tuple[str, int]) -> None:
        self.acquire()
        try:
            kind = self._kinds.pop(key, None)
            if kind is not None and kind.last is not None:
                self._target.handle(_left_out(kind.left_out, kind.last))
        finally:
            self.release()


def _left_out(count: int, last: logging.LogRecord) -> logging.LogRecord:
    text = "%d more like this were left out: %s"
    told = (count, last.getMessage())
    record = logging.LogRecord(last.name, last.levelno, __file__, 0, text, told, None)
    record.left_out = count
    return record


def log_to(handler: logging.Handler, *, as_json: bool) -> None:
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(_LINE))
    logging.basicConfig(level=logging.INFO, handlers=[RateLimited(handler)])

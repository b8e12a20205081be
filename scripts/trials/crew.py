"""Processes that work on a mount together. They are forked, so that they begin at once."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Concatenate, ParamSpec

from scripts.trials.ring import Broken

P = ParamSpec("P")
IsOver = Callable[[], bool]
Work = Callable[Concatenate[IsOver, P], "Counter[str]"]

_END_SECONDS = 300
_context = multiprocessing.get_context("fork")


@dataclass(slots=True)
class Crew:
    """Each member is a function that is given whether it is told to stop, and returns what it
    counted; what is wrong it raises as Broken."""

    _members: list[tuple[BaseProcess, Connection]] = field(default_factory=list)

    def start(self, work: Work[P], *args: P.args, **kwargs: P.kwargs) -> int:
        """Its process."""
        here, there = _context.Pipe(duplex=False)
        process = _context.Process(target=_member, args=(there, work, args, kwargs))
        process.start()
        there.close()
        self._members.append((process, here))
        assert process.pid is not None
        return process.pid

    def work(self, seconds: float, is_over: IsOver = lambda: False) -> None:
        """Wait for so long, until it is over, or until all have ended, or one with a failure."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            ended = [process.exitcode for process, _ in self._members]
            if any(ended) or None not in ended or is_over():
                return
            time.sleep(0.05)

    def stop(self) -> Counter[str]:
        """Have them end, and see what they counted."""
        for process, _ in self._members:
            process.terminate()
        return self.join()

    def join(self) -> Counter[str]:
        """What they counted, all together. Raises Broken with what they found."""
        counts: Counter[str] = Counter()
        failures = []
        limit = time.monotonic() + _END_SECONDS
        try:
            for process, connection in self._members:
                if not connection.poll(max(limit - time.monotonic(), 0)):
                    raise Broken(f"a process does not end: {process.pid}")
                try:
                    told = connection.recv()
                except EOFError:
                    process.join()
                    if process.exitcode != -signal.SIGTERM:  # else before it had begun
                        failures.append(f"a process has ended by {process.exitcode}")
                    continue
                if isinstance(told, str):
                    failures.append(told)
                else:
                    counts.update(told)
        finally:
            self.close()
        if failures:
            raise Broken("; ".join(failures))
        return counts

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.join(1)
            process.kill()
            process.join()
        self._members.clear()


def _member(
    connection: Connection, work: Work[...], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who began it tells it
    try:
        connection.send(work(lambda: bool(stopped), *args, **kwargs))
    except Broken as broken:
        connection.send(str(broken))
        raise SystemExit(1) from None
    except BaseException:
        connection.send(traceback.format_exc())
        raise SystemExit(1) from None

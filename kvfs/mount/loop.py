"""A loop that is quick to see what comes: it spins for a moment before it sleeps."""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_Ready = list[tuple[selectors.SelectorKey, int]]

# Who asks for one thing after the other comes back within this time; a processor that has
# gone to sleep meanwhile takes as long to wake up.
_SPIN_SECONDS = 50e-6
_SPINS_MAX = 4


class Mailbox:
    """Callbacks from other threads for the loop's. Who is awake is not woken up."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.waiting: deque[Callable[[], None]] = deque()
        self.is_asleep = False

    def put(self, callback: Callable[[], None]) -> None:
        self.waiting.append(callback)
        if self.is_asleep:
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """What comes from now on stays where it is."""
        self.is_asleep = False
        os.close(self.fd)

    def empty(self) -> None:
        """In the loop: call those that came until now."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        for _ in range(len(self.waiting)):
            self.waiting.popleft()()


class SpinningSelector(selectors.EpollSelector):
    """Looks again and again for a moment before it sleeps, as long as that was worth it lately.
    The mailbox is ready when something is in it, whether or not that was signalled."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._may_spin = len(os.sched_getaffinity(0)) > 1
        self._spins = 0  # in vain, that may still be

    def select(self, timeout: float | None = None) -> _Ready:
        if timeout is not None and timeout <= 0:
            return self._with_mail(super().select(0))
        begin = time.perf_counter()
        if self._spins:
            end = begin + _SPIN_SECONDS
            while time.perf_counter() < end:
                if ready := self._with_mail(super().select(0)):
                    self._spins = _SPINS_MAX
                    return ready
            self._spins -= 1
        ready = self._sleep(timeout)
        if self._may_spin and time.perf_counter() - begin < 2 * _SPIN_SECONDS:
            self._spins = _SPINS_MAX
        return ready

    def _sleep(self, timeout: float | None) -> _Ready:
        self._mailbox.is_asleep = True
        try:
            # What came before that was seen is not signalled.
            return self._with_mail(super().select(0 if self._mailbox.waiting else timeout))
        finally:
            self._mailbox.is_asleep = False

    def _with_mail(self, ready: _Ready) -> _Ready:
        if self._mailbox.waiting and all(key.fd != self._mailbox.fd for key, _ in ready):
            ready.append((self.get_key(self._mailbox.fd), selectors.EVENT_READ))
        return ready


class Loop(asyncio.SelectorEventLoop):
    """One that is quick to see the next request, and the work of a thread that is done."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        super().__init__(SpinningSelector(self._mailbox))
        self.add_reader(self._mailbox.fd, self._mailbox.empty)

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """Have it called in the loop, soon; nobody hears of it once the loop has ended."""
        self._mailbox.put(callback)

    def close(self) -> None:
        super().close()
        self._mailbox.close()
